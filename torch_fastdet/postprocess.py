"""Modules for the end of a detector, scriptable: raw head maps to padded detections, with nothing copied to the host.

The list-returning functions of the stock packages are in :mod:`torch_fastdet.suppression`.
"""

# No "from __future__ import annotations": TorchScript reads the classes' attribute types as they stand.
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet.ops import nms

__all__ = ["UltralyticsPostProcess", "YOLOv5PostProcess", "split_ultralytics_heads"]


def _stride_list(op: str, strides: Any) -> list[float]:
    values = strides.tolist() if isinstance(strides, Tensor) else strides
    if not isinstance(values, Iterable):
        raise TypeError(f"{op}: strides is a {type(strides).__name__}, but a list of numbers is wanted, one a level")
    return [float(value) for value in values]


def _check_count(op: str, name: str, value: int, least: int, what: str) -> None:
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, but {least} or more {what} are wanted")


class YOLOv5PostProcess(nn.Module):
    """:func:`torch_fastdet.ops.yolov5_postprocess` as a module; all options but these are its own.

    Args:
        anchors: (levels, na, 2) in grid cells, as ``Detect.anchors``: a tensor or nested lists.
        strides: pixels a cell of each level, as ``Detect.stride``.
        nc: classes.
    """

    anchors: Tensor
    classes: list[int] | None

    def __init__(
        self,
        anchors: Tensor | Sequence[Sequence[Sequence[float]]],
        strides: Tensor | Sequence[float],
        nc: int,
        conf_thres: float = 0.25,
        iou_thres: float = 0.45,
        classes: list[int] | None = None,
        agnostic: bool = False,
        multi_label: bool = False,
        max_det: int = 300,
        nm: int = 0,
        per_class: str = "offset",
        max_nms: int = 30000,
        max_wh: float = 7680.0,
    ):
        super().__init__()
        nms._check_options("YOLOv5PostProcess", conf_thres, iou_thres, max_det, max_nms, per_class)
        _check_count("YOLOv5PostProcess", "nc", nc, 1, "classes")
        _check_count("YOLOv5PostProcess", "nm", nm, 0, "masks")
        self.strides = _stride_list("YOLOv5PostProcess", strides)
        anchors = torch.as_tensor(anchors).detach().float().clone()
        if anchors.dim() != 3 or anchors.size(0) != len(self.strides) or anchors.size(2) != 2:
            raise ValueError(
                f"YOLOv5PostProcess: anchors has shape {tuple(anchors.shape)}, but ({len(self.strides)}, na, 2) is wanted: "
                "width and height of each anchor of each level, in cells"
            )
        self.register_buffer("anchors", anchors)
        # TorchScript types attributes by their values, so each is stored as the plain type that the operator wants.
        self.nc = int(nc)
        self.conf_thres = float(conf_thres)
        self.iou_thres = float(iou_thres)
        self.classes = nms._class_list("YOLOv5PostProcess", classes)
        self.agnostic = bool(agnostic)
        self.multi_label = bool(multi_label)
        self.max_det = int(max_det)
        self.nm = int(nm)
        self.per_class = per_class
        self.max_nms = int(max_nms)
        self.max_wh = float(max_wh)

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "YOLOv5PostProcess":
        """With anchors, strides, classes and mask coefficients of a YOLOv5 model (or of its Detect or Segment module)."""
        candidates: list[Any] = [model, *reversed(list(model.modules()))]
        for head in candidates:
            if all(hasattr(head, name) for name in ("anchors", "stride", "nc", "no")):
                return cls(head.anchors, head.stride, head.nc, nm=head.no - 5 - head.nc, **options)
        raise ValueError("YOLOv5PostProcess.from_model: the model has no Detect module (anchors, stride, nc, no)")

    def forward(self, heads: list[Tensor], letterboxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """heads, optional letterboxes -> detections (images, max_det, 6 + nm), counts (images,)."""
        for head in heads:
            outputs = head.size(4) if head.dim() == 5 else head.size(1) // self.anchors.size(1)
            if outputs != self.nc + 5 + self.nm:
                raise ValueError(
                    f"YOLOv5PostProcess: a head map has {outputs} channels an anchor, but nc + 5 + nm = "
                    f"{self.nc + 5 + self.nm} are wanted"
                )
        return nms.yolov5_postprocess(
            heads,
            self.anchors,
            self.strides,
            self.conf_thres,
            self.iou_thres,
            self.classes,
            self.agnostic,
            self.multi_label,
            self.max_det,
            self.nm,
            letterboxes,
            self.per_class,
            self.max_nms,
            self.max_wh,
        )

    def extra_repr(self) -> str:
        return f"nc={self.nc}, strides={self.strides}, conf_thres={self.conf_thres}, iou_thres={self.iou_thres}"


class UltralyticsPostProcess(nn.Module):
    """:func:`torch_fastdet.ops.ultralytics_postprocess` as a module; all options but these are its own.

    Args:
        strides: pixels a cell of each level, as ``Detect.stride``.
        nc: classes.
        reg_max: bins of the distance distribution, as ``Detect.reg_max`` (1: the head regresses the distance itself).
    """

    classes: list[int] | None

    def __init__(
        self,
        strides: Tensor | Sequence[float],
        nc: int,
        reg_max: int = 16,
        conf_thres: float = 0.25,
        iou_thres: float = 0.45,
        classes: list[int] | None = None,
        agnostic: bool = False,
        multi_label: bool = False,
        max_det: int = 300,
        per_class: str = "offset",
        max_nms: int = 30000,
        max_wh: float = 7680.0,
    ):
        super().__init__()
        nms._check_options("UltralyticsPostProcess", conf_thres, iou_thres, max_det, max_nms, per_class)
        _check_count("UltralyticsPostProcess", "nc", nc, 1, "classes")
        _check_count("UltralyticsPostProcess", "reg_max", reg_max, 1, "bins")
        self.strides = _stride_list("UltralyticsPostProcess", strides)
        self.nc = int(nc)
        self.reg_max = int(reg_max)
        self.conf_thres = float(conf_thres)
        self.iou_thres = float(iou_thres)
        self.classes = nms._class_list("UltralyticsPostProcess", classes)
        self.agnostic = bool(agnostic)
        self.multi_label = bool(multi_label)
        self.max_det = int(max_det)
        self.per_class = per_class
        self.max_nms = int(max_nms)
        self.max_wh = float(max_wh)

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "UltralyticsPostProcess":
        """With strides, classes and bins of an Ultralytics model (or of its Detect, Segment or Pose module)."""
        candidates: list[Any] = [model, *reversed(list(model.modules()))]
        for head in candidates:
            if all(hasattr(head, name) for name in ("stride", "nc", "reg_max")):
                if any(kind.__name__ == "OBB" for kind in type(head).__mro__):
                    raise ValueError(
                        f"UltralyticsPostProcess.from_model: the model ends in {type(head).__name__}, but rotated boxes are "
                        "not supported; use the model's own post-processing"
                    )
                return cls(head.stride, head.nc, head.reg_max, **options)
        raise ValueError("UltralyticsPostProcess.from_model: the model has no Detect module (stride, nc, reg_max)")

    def forward(self, heads: list[Tensor], letterboxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """heads: (images, 4 * reg_max + nc + extra, ny, nx) a level -> detections (images, max_det, 6 + extra), counts."""
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        extra: list[Tensor] = []
        bins = 4 * self.reg_max
        for head in heads:
            if head.dim() != 4 or head.size(1) < bins + self.nc:
                raise ValueError(
                    f"UltralyticsPostProcess: a head map has shape {list(head.shape)}, but (images, 4 * reg_max + nc = "
                    f"{bins + self.nc} or more, ny, nx) is wanted"
                )
            boxes.append(head[:, :bins])
            scores.append(head[:, bins : bins + self.nc])
            if head.size(1) > bins + self.nc:
                extra.append(head[:, bins + self.nc :])
        detections, counts, _ = self.forward_split(boxes, scores, extra, letterboxes)
        return detections, counts

    @torch.jit.export
    def forward_split(
        self, boxes: list[Tensor], scores: list[Tensor], extra: list[Tensor], letterboxes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for maps that are apart, as the operator takes them; also gives indices."""
        return nms.ultralytics_postprocess(
            boxes,
            scores,
            extra,
            self.strides,
            self.conf_thres,
            self.iou_thres,
            self.classes,
            self.agnostic,
            self.multi_label,
            self.max_det,
            letterboxes,
            self.per_class,
            self.max_nms,
            self.max_wh,
        )

    def extra_repr(self) -> str:
        return (
            f"nc={self.nc}, reg_max={self.reg_max}, strides={self.strides}, conf_thres={self.conf_thres}, "
            f"iou_thres={self.iou_thres}"
        )


def split_ultralytics_heads(predictions: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Maps a level, (boxes, scores, extra), from the dict that ultralytics >= 8.4 heads return; views, nothing is copied.

    They are the arguments of :meth:`UltralyticsPostProcess.forward_split` in their order.

    Args:
        predictions: "boxes" (images, 4 * reg_max, N), "scores" (images, nc, N) and "feats", whose maps give the sizes. A
            model with two heads returns "one2many" and "one2one"; the first is taken, which is the one to suppress.

    Returns:
        boxes, scores, and extra: mask coefficients of Segment, keypoints of Pose as the head gives them
        (``Pose.kpts_decode`` makes pixels of them, before or after suppression), an empty list for Detect.

    Raises:
        ValueError: rotated boxes, or a dict without these entries.
    """
    predictions = predictions.get("one2many", predictions)
    missing = [name for name in ("boxes", "scores", "feats") if name not in predictions]
    if missing:
        raise ValueError(
            f"split_ultralytics_heads: predictions has {', '.join(predictions) or 'nothing'}, but {', '.join(missing)} is "
            "wanted too: the dict that a head of ultralytics >= 8.4 returns"
        )
    if "angle" in predictions:
        raise ValueError("split_ultralytics_heads: predictions has an angle, but rotated boxes are not supported")
    extra = next((predictions[name] for name in ("mask_coefficient", "kpts") if name in predictions), None)
    sizes = [feature.shape[-2:] for feature in predictions["feats"]]

    def maps(joined: Tensor | None) -> list[Tensor]:
        if joined is None:
            return []
        parts = joined.split([rows * columns for rows, columns in sizes], -1)
        return [part.unflatten(-1, size) for part, size in zip(parts, sizes)]

    return maps(predictions["boxes"]), maps(predictions["scores"]), maps(extra)
