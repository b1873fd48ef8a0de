"""Provides scriptable modules for the end of a detector: raw head maps to padded detections, with nothing copied to the host.

The functions that return lists, as those of YOLOv5 and Ultralytics do, are in :mod:`torch_fastdet.suppression`.
"""

# No "from __future__ import annotations": TorchScript reads the classes' attribute types as they stand.
import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet.ops import image, nms
from torch_fastdet.ops._checks import check_type
from torch_fastdet.ops.jpeg import decode_jpeg
from torch_fastdet.ops.letterbox import letterbox, place

__all__ = ["ImageDetector", "UltralyticsPostProcess", "YOLOv5PostProcess", "split_ultralytics_heads"]


def _stride_list(op: str, strides: object) -> list[float]:
    values = strides.tolist() if isinstance(strides, Tensor) else strides
    if not isinstance(values, Iterable):
        raise TypeError(f"{op}: strides is a {type(strides).__name__}, but a list of numbers is expected, one a level")
    strides = [float(value) for value in values]
    if not strides:
        raise ValueError(f"{op}: strides is empty, but a number for each level is expected")
    return strides


def _check_count(op: str, name: str, value: int, least: int, what: str) -> None:
    if not hasattr(value, "__int__") or value < least:
        raise ValueError(f"{op}: {name} is {value}, but {least} or more {what} are expected")


# The values of extra_kind for each task. The first one is its default.
_EXTRA_KINDS = {
    "detect": ("raw",),
    "segment": ("raw",),
    "pose": ("keypoints_xyv", "keypoints_xy", "cell_keypoints_xyv", "cell_keypoints_xy"),
    "obb": ("angle_logit", "raw"),
}

# Only the head of an Ultralytics model, or of a YOLOv5 model, has these attributes.
_ULTRALYTICS_HEAD = ("stride", "nc", "reg_max")
_YOLOV5_HEAD = ("anchors", "stride", "nc", "no")


def _check_word(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"UltralyticsPostProcess: {name} is {value!r}, but one of {', '.join(known)} is expected")


class _PostProcess(nn.Module):
    """Hold the options of a head's suppression, each an attribute that may be changed. TorchScript reads a class's own annotations."""

    classes: list[int] | None

    def _take(self, *options: Any) -> None:
        # Raise the operator's own errors now.
        nothing, flags = torch.empty(0, 0, 6, device="cpu"), map(bool, options[3:5])
        limits, rest = (*options[:3], *flags, options[5]), options[6:]
        nms.non_max_suppression_padded(*(nothing, *limits, 0, None, None, *rest))
        # TorchScript requires attributes of plain types.
        self.conf_thres, self.iou_thres, self.max_wh = float(options[0]), float(options[1]), float(options[8])
        self.agnostic, self.multi_label, self.per_class = bool(options[3]), bool(options[4]), str(options[6])
        self.max_det, self.max_nms = int(options[5]), int(options[7])
        self.classes = [options[2]] if isinstance(options[2], int) else options[2]

    def _limits(self) -> tuple[float, float, list[int] | None, bool, bool, int]:
        return self.conf_thres, self.iou_thres, self.classes, self.agnostic, self.multi_label, self.max_det

    def extra_repr(self) -> str:
        names = ("task", "nc", "reg_max", "strides", "conf_thres", "iou_thres")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names if hasattr(self, name))


class YOLOv5PostProcess(_PostProcess):
    """Apply :func:`torch_fastdet.ops.yolov5_postprocess` as a module; all options but these are its own.

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
        op = "YOLOv5PostProcess"
        self._take(conf_thres, iou_thres, classes, agnostic, multi_label, max_det, per_class, max_nms, max_wh)
        _check_count(op, "nc", nc, 1, "classes")
        _check_count(op, "nm", nm, 0, "masks")
        self.strides = _stride_list(op, strides)
        try:
            anchors = torch.as_tensor(anchors).detach().float().clone()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{op}: anchors is a {type(anchors).__name__} that cannot become a tensor, but (levels, na, 2) is expected"
            ) from None
        if anchors.dim() != 3 or anchors.size(0) != len(self.strides) or anchors.size(2) != 2:
            raise RuntimeError(
                f"YOLOv5PostProcess: anchors has shape {tuple(anchors.shape)}, but ({len(self.strides)}, na, 2) is expected: "
                "width and height of each anchor of each level, in cells"
            )
        self.register_buffer("anchors", anchors)
        self.nc = int(nc)
        self.nm = int(nm)

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "YOLOv5PostProcess":
        """Read anchors, strides, classes and mask coefficients of a YOLOv5 model.

        Args:
            model: The model, or its Detect or Segment module.
            options: Further arguments of the class, such as ``conf_thres``.

        Raises:
            ValueError: The model has no such module.
        """
        head = _head_of(model, *_YOLOV5_HEAD)
        if head is None:
            raise ValueError("YOLOv5PostProcess.from_model: the model has no Detect module (anchors, stride, nc, no)")
        return cls(head.anchors, head.stride, head.nc, nm=head.no - 5 - head.nc, **options)

    def forward(self, heads: list[Tensor], letterboxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return detections (images, max_det, 6 + nm) and counts (images,) of heads.

        Args:
            heads: the raw maps, one a level, as :func:`torch_fastdet.ops.yolov5_decode` takes them.
            letterboxes: (images, 6), rows of :func:`torch_fastdet.ops.letterbox`: boxes come out in the original images' pixels.
        """
        if not torch.jit.is_scripting():
            check_type("YOLOv5PostProcess", "heads", heads, list[Tensor])
        if len(heads) == 0:
            raise ValueError(f"YOLOv5PostProcess: heads is empty, but {len(self.strides)} maps are expected")
        for head in heads:
            outputs = head.size(4) if head.dim() == 5 else head.size(1) // self.anchors.size(1)
            if outputs != self.nc + 5 + self.nm:
                raise RuntimeError(
                    f"YOLOv5PostProcess: a head map has {outputs} channels an anchor, but nc + 5 + nm = "
                    f"{self.nc + 5 + self.nm} are expected"
                )
        rest = letterboxes, self.per_class, self.max_nms, self.max_wh
        return nms.yolov5_postprocess(heads, self.anchors, self.strides, *self._limits(), self.nm, *rest)


class UltralyticsPostProcess(_PostProcess):
    """Apply :func:`torch_fastdet.ops.ultralytics_postprocess` as a module; all options but these are its own.

    Args:
        strides: pixels a cell of each level, as ``Detect.stride``.
        nc: classes.
        reg_max: bins of the distance distribution, as ``Detect.reg_max`` (1: the head regresses the distance itself).
        task: "detect", "segment" (extra channels are mask coefficients, passed on), "pose" (keypoints, decoded to pixels) or
            "obb" (rotated boxes, whose angle is the last extra channel).
        extra_kind: how extra channels are decoded, one of the operator's values; None means "keypoints_xyv" for pose, "angle_logit"
            for obb and "raw" for the others.
        rotated_rule: "fast" (as in Ultralytics) or "greedy" suppression of rotated boxes.
        end2end: the maps are those of a head that needs no suppression (YOLO26's "one2one"): its best pairs of anchor and class
            (with agnostic: its best anchors) come out, and iou_thres and multi_label do nothing. Boxes may differ from the original
            by float32 roundings.
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
        task: str = "detect",
        extra_kind: str | None = None,
        rotated_rule: str = "fast",
        end2end: bool = False,
    ):
        super().__init__()
        op = "UltralyticsPostProcess"
        self._take(conf_thres, iou_thres, classes, agnostic, multi_label, max_det, per_class, max_nms, max_wh)
        if end2end:  # which needs no suppression: no IoU is above 1
            self.iou_thres, self.multi_label = 1.0, not agnostic
        _check_count(op, "nc", nc, 1, "classes")
        _check_count(op, "reg_max", reg_max, 1, "bins")
        _check_word("task", task, tuple(_EXTRA_KINDS))
        self.task = task
        self.extra_kind = _EXTRA_KINDS[task][0] if extra_kind is None else extra_kind
        _check_word("extra_kind", self.extra_kind, _EXTRA_KINDS[task])
        _check_word("rotated_rule", rotated_rule, ("fast", "greedy"))
        self.strides = _stride_list(op, strides)
        self.nc, self.reg_max, self.end2end = int(nc), int(reg_max), bool(end2end)
        self.rotated = rotated_rule if task == "obb" else "none"

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "UltralyticsPostProcess":
        """Read strides, classes, bins and the task of an Ultralytics model, or of its Detect, Segment, Pose or OBB module.

        The result takes the maps of :func:`split_ultralytics_heads`, which takes the same ``end2end`` as the model's head has.
        :meth:`YOLOv5PostProcess.from_model` explains the arguments and the error.
        """
        head = _head_of(model, *_ULTRALYTICS_HEAD)
        if head is None:
            raise ValueError("UltralyticsPostProcess.from_model: the model has no Detect module (stride, nc, reg_max)")
        given = {"end2end": bool(getattr(head, "end2end", False)), **_task_of(head), **options}
        return cls(head.stride, head.nc, head.reg_max, **given)

    def forward(self, heads: list[Tensor], letterboxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return detections (images, max_det, 6 + extra) and counts (images,) of heads.

        Args:
            heads: the raw maps, one a level, (images, 4 * reg_max + nc + extra, ny, nx).
            letterboxes: (images, 6), rows of :func:`torch_fastdet.ops.letterbox`: boxes come out in the original images' pixels.
        """
        extra: list[Tensor] = []
        if not torch.jit.is_scripting():
            check_type("UltralyticsPostProcess", "heads", heads, list[Tensor])
        if len(heads) == 0:
            raise ValueError(f"UltralyticsPostProcess: heads is empty, but {len(self.strides)} maps are expected")
        bins = 4 * self.reg_max
        end = bins + self.nc
        for head in heads:
            if head.dim() != 4 or head.size(1) < end:
                raise RuntimeError(
                    f"UltralyticsPostProcess: a head map has shape {list(head.shape)}, but (images, 4 * reg_max + nc = "
                    f"{end} or more, ny, nx) is expected"
                )
            if head.size(1) > end:
                extra.append(head[:, end:])
        boxes, scores = [head[:, :bins] for head in heads], [head[:, bins:end] for head in heads]
        detections, counts, _ = self.forward_split(boxes, scores, extra, letterboxes)
        return detections, counts

    @torch.jit.export
    def forward_split(
        self, boxes: list[Tensor], scores: list[Tensor], extra: list[Tensor], letterboxes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take the separate maps of :func:`torch_fastdet.ops.ultralytics_postprocess`, and letterboxes as :meth:`forward`; also return indices."""
        rest = letterboxes, self.per_class, self.max_nms, self.max_wh, self.rotated, self.extra_kind
        return nms.ultralytics_postprocess(boxes, scores, extra, self.strides, *self._limits(), *rest)


def _task_of(head: Any) -> dict[str, str]:
    """Return task and meaning of the extra channels of a head, by the names of its classes."""
    names = {kind.__name__ for kind in type(head).__mro__}
    if "OBB" in names:
        return {"task": "obb", "extra_kind": "raw"}  # the head's dict holds angles, not logits
    if "Pose" in names:
        values = "xyv" if head.kpt_shape[1] == 3 else "xy"
        return {"task": "pose", "extra_kind": f"{'cell_' if 'Pose26' in names else ''}keypoints_{values}"}
    return {"task": "segment" if names & {"Segment", "YOLOESegment"} else "detect"}


def _head_of(model: nn.Module, *names: str) -> Any:
    """Return the model itself or its last module that has attributes of these names; None without."""
    candidates: list[Any] = [model, *reversed(list(model.modules()))]
    return next((module for module in candidates if all(hasattr(module, name) for name in names)), None)


class _YOLOv5Heads(nn.Module):
    """Wrap a YOLOv5 model, to be traced, whose head returns its convolutions' outputs and prototypes; the original returns permuted copies."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.eval()
        head = _head_of(model, "anchors", "m")
        proto = getattr(head, "proto", None)
        head.forward = lambda maps: (
            [] if proto is None else [proto(maps[0])],
            [conv(x) for conv, x in zip(head.m, maps)],
        )

    def forward(self, batch: Tensor) -> list[Tensor]:
        prototypes, heads = self.model(batch)
        return [*heads, *prototypes]


class _UltralyticsHeads(nn.Module):
    """Wrap an Ultralytics model, to be traced, whose maps are joined a level as UltralyticsPostProcess takes them, and prototypes."""

    def __init__(self, model: nn.Module, end2end: bool):
        super().__init__()
        head = _head_of(model, *_ULTRALYTICS_HEAD)
        if end2end and not hasattr(head, "one2one_cv2"):
            raise ValueError("ImageDetector.from_model: end2end is True, but the model has no one-to-one head")
        if bool(getattr(head, "end2end", False)) != end2end:
            head.end2end = end2end  # or fuse() drops the branch that is asked for
        if callable(fuse := getattr(model, "fuse", None)):
            fuse(verbose=False)
        self.model = model.eval()
        self.end2end = end2end
        # The head returns its maps beside its results, but they are not needed.
        head._inference = lambda maps: maps["scores"]
        head.postprocess = lambda scores: scores

    def forward(self, batch: Tensor) -> list[Tensor]:
        _, predictions = self.model(batch)
        levels = zip(*filter(None, split_ultralytics_heads(predictions, self.end2end)))
        heads = [torch.cat(parts, 1) for parts in levels]
        proto = predictions.get("one2one" if self.end2end else "one2many", predictions).get("proto")
        return heads if proto is None else [*heads, proto]


def _check_image_model(model: object) -> None:
    """Check what ImageDetector.from_model takes: a head that detects, and three channels if the model's yaml says how many."""
    heads = (_ULTRALYTICS_HEAD, _YOLOV5_HEAD)
    if not isinstance(model, nn.Module) or all(_head_of(model, *names) is None for names in heads):
        raise ValueError(
            f"ImageDetector.from_model: model is a {type(model).__name__}, which has no Detect module, but a model of YOLOv5 or "
            "Ultralytics is expected that detects, segments, or finds rotated boxes or poses"
        )
    yaml = getattr(model, "yaml", None)
    channels = yaml.get("channels", yaml.get("ch", 3)) if isinstance(yaml, dict) else 3
    if channels != 3:
        raise ValueError(f"ImageDetector.from_model: model takes images of {channels} channels, but 3 are expected")


class ImageDetector(nn.Module):
    """Detect in uint8 images of any sizes: letterbox, network and post-processing. Boxes are in each image's pixels. Scriptable.

    Images are resized as ``cv2.resize`` does and padded with gray to ``size``, in the middle, as YOLOv5's and Ultralytics' letterboxes with
    ``auto=False`` do; a side that YOLOv5's would resize to nothing gets one pixel.

    Args:
        network: (images, 3, height, width), RGB, 0..1 -> list of raw heads, a level each, as ``postprocess`` takes them, and after
            them the prototypes of a model that segments: scripted, traced, or scriptable.
        postprocess: What makes detections of the heads.
        size: height and width of the network's input, or one number for both.
        bgr: The images' channels are blue, green, red, as OpenCV reads them, and not red, green, blue.
        half_precision: The network takes float16, not float32.
    """

    on_device: Tensor

    def __init__(
        self,
        network: nn.Module,
        postprocess: "YOLOv5PostProcess | UltralyticsPostProcess",
        size: int | Sequence[int] = 640,
        bgr: bool = False,
        half_precision: bool = False,
    ):
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        for side in (height, width):
            _check_count("ImageDetector", "size", side, 1, "pixels")
        self.network = network
        self.postprocess = postprocess
        self.size = [int(height), int(width)]
        self.bgr = bool(bgr)
        self.half_precision = bool(half_precision)
        self.rounding = "ultralytics" if isinstance(postprocess, UltralyticsPostProcess) else "yolov5"
        # This empty tensor moves with the module, so that its device is the module's.
        there = next(chain(postprocess.buffers(), network.parameters(), network.buffers()), torch.empty(0))
        self.register_buffer("on_device", torch.empty(0, device=there.device), persistent=False)

    @classmethod
    def from_model(
        cls, model: nn.Module, size: int | Sequence[int] = 640, bgr: bool = False, half: bool = False, **options: object
    ) -> "ImageDetector":
        """Return a detector of a model of YOLOv5 or Ultralytics: a copy is traced, on its device, fused as by its predictor.

        Args:
            model: The model, or what holds it in ``model``, such as ``YOLO("yolo11n.pt")``; it stays as it is.
            size: height and width of the network's input, or one number for both.
            bgr: The images will be blue, green, red.
            half: The copy computes in float16.
            options: Those of :class:`YOLOv5PostProcess` or :class:`UltralyticsPostProcess`.
        """
        while isinstance(inner := getattr(model, "model", None), nn.Module) and hasattr(inner, "model"):
            model = inner
        _check_image_model(model)
        network = copy.deepcopy(model).float().eval()
        heads: nn.Module
        postprocess: YOLOv5PostProcess | UltralyticsPostProcess
        if _head_of(model, *_ULTRALYTICS_HEAD) is None:
            postprocess = YOLOv5PostProcess.from_model(model, **options)
            heads = _YOLOv5Heads(network)
        else:
            postprocess = UltralyticsPostProcess.from_model(model, **options)
            heads = _UltralyticsHeads(network, postprocess.end2end)
        height, width = (size, size) if isinstance(size, int) else size
        dtype = torch.float16 if half else torch.float32
        example = torch.zeros(1, 3, height, width, dtype=dtype, device=next(model.parameters()).device)
        with torch.no_grad():
            traced = torch.jit.trace(heads.to(dtype), example, check_trace=False, strict=False)
        return cls(traced, postprocess, size, bgr, half).eval()

    def forward(self, images: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return detections (images, max_det, 6 + nm) and counts (images,) of images, each (height, width, 3) uint8, on one device."""
        detections, counts, _ = self._detect_images(images, self.bgr)
        return detections, counts

    def forward_files(self, files: "Sequence[str | PathLike[str] | bytes]") -> tuple[Tensor, Tensor]:
        """Detect in JPEG files, paths or their bytes, which are decoded on the module's device. TorchScript cannot call it.

        The pixels are those of ``cv2.imdecode``; ``bgr`` applies only to image tensors.

        Raises:
            ValueError: :func:`torch_fastdet.ops.decode_jpeg` refuses a file, as "file 3: progressive".
        """
        # torch warns about a buffer that is read-only, as bytes are.
        data = [bytearray(file if isinstance(file, bytes) else Path(file).read_bytes()) for file in files]
        encoded = [
            torch.frombuffer(file, dtype=torch.uint8) if file else torch.empty(0, dtype=torch.uint8) for file in data
        ]
        detections, counts, _ = self._detect_images(decode_jpeg(encoded, self.on_device.device), True)
        return detections, counts

    @torch.jit.export
    def forward_prototypes(self, images: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return also the prototypes (images, channels, height, width) of a model that segments, for :mod:`torch_fastdet.masks`."""
        detections, counts, prototypes = self._detect_images(images, self.bgr)
        if prototypes is None:
            raise ValueError("ImageDetector.forward_prototypes: the network gives no prototypes, only forward serves")
        return detections, counts, prototypes

    def _detect_images(self, images: list[Tensor], bgr: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        if len(images) == 0:
            raise ValueError("ImageDetector: images is empty, but one or more images are expected")
        rows: list[list[int]] = []
        boxes: list[list[float]] = []
        flat: list[Tensor] = []
        offset = 0
        for pixels in images:
            if pixels.dim() != 3 or pixels.size(2) != 3 or pixels.dtype != torch.uint8 or pixels.numel() == 0:
                raise RuntimeError(
                    f"ImageDetector: an image has shape {list(pixels.shape)} and dtype {pixels.dtype}, but "
                    "(height, width, 3) of uint8 is expected"
                )
            rows.append(self._row(offset, pixels.size(0), pixels.size(1)))
            boxes.append(letterbox(self.size, [pixels.size(0), pixels.size(1)], rounding=self.rounding))
            flat.append(pixels.reshape(-1))
            offset += pixels.numel()
        device = self.on_device.device
        storage = torch.cat(flat)
        if storage.device.type == "cpu" and device.type == "cuda":
            storage = storage.pin_memory()
        rows_there, boxes_there = torch.tensor(rows).to(device), torch.tensor(boxes).to(device)
        return self._detect(storage.to(device, non_blocking=True), rows_there, boxes_there, bgr)

    @torch.jit.export
    def forward_batch(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Detect in images of one size, (images, height, width, 3) uint8 on the module's device.

        Nothing comes from the host, so that a CUDA graph can capture it, and nothing is kept, so that threads can share the module.
        """
        device = self.on_device.device
        if images.dim() != 4 or images.size(3) != 3 or images.dtype != torch.uint8 or images.numel() == 0:
            raise RuntimeError(
                f"ImageDetector: images has shape {list(images.shape)} and dtype {images.dtype}, but "
                "(images, height, width, 3) of uint8 is expected"
            )
        if images.device != device:
            raise ValueError(f"ImageDetector: images is on {images.device}, but the module is on {device}")
        count, height, width = images.size(0), images.size(1), images.size(2)
        plan = _repeated([float(value) for value in self._row(0, height, width)], count, torch.int64, device)
        if count > 1:  # where each begins
            plan.select(1, 1).copy_(torch.arange(count, device=device) * (height * width * 3))
        boxes = letterbox(self.size, [height, width], rounding=self.rounding)
        letterboxes = _repeated(boxes, count, torch.float32, device)
        detections, counts, _ = self._detect(images.reshape(-1), plan, letterboxes, self.bgr)
        return detections, counts

    def _row(self, offset: int, height: int, width: int) -> list[int]:
        placed = place([height, width], self.size)
        return [0, offset, height, width, width * 3, placed.height, placed.width, placed.top, placed.left, 0]

    def _detect(
        self, storage: Tensor, plan: Tensor, letterboxes: Tensor, bgr: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = torch.float16 if self.half_precision else torch.float32
        batch = image.image_letterbox([storage], plan, self.size, 3, dtype, False, not bgr)
        maps = self.network(batch)
        levels = len(self.postprocess.strides)
        if len(maps) > levels + 1:
            raise ValueError(
                f"ImageDetector: the network gives {len(maps)} maps, but {levels}, or one more with prototypes, are expected"
            )
        detections, counts = self.postprocess(maps[:levels], letterboxes)
        prototypes: Tensor | None = None
        if len(maps) > levels:
            prototypes = maps[levels]
        return detections, counts, prototypes

    def extra_repr(self) -> str:
        return f"size={self.size}, bgr={self.bgr}, half_precision={self.half_precision}"


def _repeated(row: list[float], rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (rows, columns) of equal rows, which the device writes."""
    table = torch.zeros(rows, len(row), dtype=dtype, device=device)
    for column, value in enumerate(row):
        if value != 0:
            table.select(1, column).fill_(value)
    return table


def split_ultralytics_heads(
    predictions: dict[str, Any], end2end: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the maps of each level, (boxes, scores, extra), from the dict that Ultralytics' heads return, as views.

    They are the arguments of :meth:`UltralyticsPostProcess.forward_split` in their order. ``extra`` is mask coefficients of Segment, keypoints
    of Pose as the head gives them, angles of OBB in radians, or an empty list.

    Args:
        predictions: "boxes" (images, 4 * reg_max, N), "scores" (images, nc, N) and "feats", whose maps give the sizes. A
            model with two heads returns "one2many" and "one2one"; the first is taken, which is the one to suppress.
        end2end: take "one2one", which needs no suppression.

    Raises:
        ValueError: a dict without these entries.
    """
    predictions = predictions.get("one2one" if end2end else "one2many", predictions)
    missing = [name for name in ("boxes", "scores", "feats") if name not in predictions]
    if missing:
        raise ValueError(
            f"split_ultralytics_heads: predictions has {', '.join(predictions) or 'nothing'}, but {', '.join(missing)} is "
            "expected too: the dict that a head of ultralytics >= 8.4 returns"
        )
    extra = next((predictions[name] for name in ("mask_coefficient", "kpts", "angle") if name in predictions), None)
    sizes = [feature.shape[-2:] for feature in predictions["feats"]]

    def maps(joined: Tensor | None) -> list[Tensor]:
        if joined is None:
            return []
        parts = joined.split([rows * columns for rows, columns in sizes], -1)
        return [part.unflatten(-1, size) for part, size in zip(parts, sizes)]

    return maps(predictions["boxes"]), maps(predictions["scores"]), maps(extra)
