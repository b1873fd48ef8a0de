"""Suppresses boxes under the original signatures: a list of detections for each image, one copy to the host a call."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fastdet._torch.private import foreach_copy_, lost_cuda_in_fork
from torch_fastdet.ops import nms
from torch_fastdet.ops._checks import check_type

__all__ = ["ultralytics_non_max_suppression", "yolov5_non_max_suppression"]

_OP = "non_max_suppression"  # Errors begin with the frameworks' name of both functions.


def _first(prediction: Any, columns: str) -> Tensor:
    """Return the decoded tensor (images, ``columns``) of a prediction; models in validation mode give (decoded, raw)."""
    if isinstance(prediction, (list, tuple)):
        if not prediction:
            raise ValueError(f"{_OP}: prediction is an empty list, but its first element should be the decoded tensor")
        prediction = prediction[0]
    check_type(_OP, "prediction", prediction, Tensor)
    if prediction.dim() != 3:
        raise RuntimeError(
            f"{_OP}: prediction has shape {tuple(prediction.shape)}, but (images, {columns}) is expected"
        )
    return prediction.detach()


# From so many candidates an image (pairs of anchor and class above conf_thres) on, device="auto" sends a host prediction to the GPU. By
# benchmarks/results (nms.json), CPU and GPU with the upload take the same time at 13,000 to 38,000 candidates.
GPU_CANDIDATES = 30_000
_SAMPLE = 16  # one of so many anchors is counted


def _faster_device(scores: Tensor, objectness: Tensor | None, conf_thres: float, multi_label: bool) -> torch.device:
    """Return where device="auto" suppresses (images, anchors, classes) of scores with (images, anchors, 1) of objectness, or without."""
    # A process that was forked from one with CUDA cannot use the GPU.
    if scores.device.type != "cpu" or not torch.cuda.is_available() or lost_cuda_in_fork():
        return scores.device
    images, anchors, classes = scores.shape
    if anchors * (classes if multi_label else 1) < GPU_CANDIDATES:
        return scores.device
    confidence = scores[:, ::_SAMPLE] if objectness is None else scores[:, ::_SAMPLE] * objectness[:, ::_SAMPLE]
    passes = confidence > conf_thres
    candidates = _SAMPLE * int((passes if multi_label else passes.any(-1)).sum())
    if candidates < GPU_CANDIDATES * max(images, 1):
        return scores.device
    return torch.device("cuda", torch.cuda.current_device())


def _computing_device(
    scores: Tensor, objectness: Tensor | None, device: torch.device | str | None, conf_thres: float, multi_label: bool
) -> torch.device:
    if device is None:
        return scores.device
    if isinstance(device, str) and device == "auto":
        return _faster_device(scores, objectness, conf_thres, multi_label)
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{_OP}: device is {device!r}, but None, 'auto' or a device is expected") from None


def _stock_class_list(classes: object, op: str = _OP) -> list[int] | None:
    """Return classes as the original functions accept them: a list, an int, an array or a tensor."""
    if classes is None:
        return None
    try:
        values = torch.as_tensor(classes).reshape(-1).tolist()
        # Fractions, NaN and numbers beyond the operators' integers match no class.
        return [int(value) for value in values if abs(value) < 2**63 and int(value) == value]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{op}: classes is {classes!r}, but None, an int or a list of ints is expected") from None


def _label_rows(labels: Any, images: int, device: torch.device) -> Tensor | None:
    """Return one (n, 6) tensor [image, class, x, y, width, height] from a list of (n, 5) tensors, or of what makes one."""
    if labels is None or len(labels) == 0:
        return None
    if len(labels) < images:
        raise ValueError(f"{_OP}: labels holds {len(labels)} tensors, but one for each of {images} images is expected")
    rows = []
    wanted = "but (n, 5) is expected: class, x, y, width, height"
    for image, label in enumerate(labels[:images]):
        try:
            label = torch.as_tensor(label)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{_OP}: labels[{image}] is a {type(label).__name__} that cannot become a tensor, {wanted}"
            ) from None
        if label.dim() and len(label) == 0:
            continue
        if label.dim() != 2 or label.size(1) < 5:
            raise RuntimeError(f"{_OP}: labels[{image}] has shape {tuple(label.shape)}, {wanted}")
        rows.append(torch.nn.functional.pad(label[:, :5].to(device, torch.float32), (1, 0), value=float(image)))
    return torch.cat(rows) if rows else None


class _ThresholdError(ValueError, AssertionError):
    """Raise for a threshold outside of 0 to 1. The frameworks assert it, which programs may catch."""


def _check_thresholds(**thresholds: float) -> None:
    for name, value in thresholds.items():
        check_type(_OP, name, value, float)
        if not 0 <= value <= 1:
            raise _ThresholdError(f"{_OP}: {name} is {value}, but a threshold between 0 and 1 is expected")


def _room(max_det: int | None, *most: int) -> tuple[int, int | None]:
    """Return how many rows there can be, of max_det and ``most``, and the end of a slice of them, which a negative max_det is."""
    check_type(_OP, "max_det", max_det, int | None)
    end = max_det if max_det is None or max_det < 0 else None
    return min(*most, sys.maxsize if max_det is None or max_det < 0 else int(max_det)), end


def _split(detections: Tensor, counts: list[int], end: int | None) -> list[Tensor]:
    """Return each image's rows in memory of their own: a result that somebody keeps or pickles holds nothing of the other images."""
    kept = counts if end is None else [len(range(count)[:end]) for count in counts]
    # One call cuts the rows of all images, and the room after each, which nobody takes.
    sizes = [size for count in kept for size in (count, detections.shape[1] - count)]
    rows = detections.flatten(0, 1).split_with_sizes(sizes)[::2]
    own = [torch.empty_like(each) for each in rows]
    if own:
        foreach_copy_(own, rows)
    return own


def yolov5_non_max_suppression(
    prediction: Tensor | list | tuple,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: object = None,
    agnostic: bool = False,
    multi_label: bool = False,
    labels: object = (),
    max_det: int | None = 300,
    nm: int = 0,
    *,
    per_class: str = "offset",
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Suppress as YOLOv5's ``non_max_suppression``: the same rows in the same order, without time limit and host syncs.

    :func:`torch_fastdet.ops.non_max_suppression_padded` explains the other arguments.

    Args:
        prediction: (images, N, 5 + classes + nm), or a tuple whose first element that is. Never changed.
        max_det: detections an image; None keeps all, and a negative number all but the last, as a slice does in YOLOv5.
        labels: for each image (n, 5) of class, x, y, width, height that join with confidence 1, or an empty one: tensors, arrays or nested
            lists. Entries past the last image are skipped, as in YOLOv5.
        per_class: "offset" (as in YOLOv5) or "exact".
        device: where to compute; None is where the prediction lies. "auto" is the GPU for a prediction on the host that has
            30,000 candidates an image or more (pairs of anchor and class above conf_thres, or anchors without multi_label; one
            of 16 anchors is counted), else the same. The result lies where the prediction does.

    Returns:
        For each image (n, 6 + nm): x1, y1, x2, y2, confidence, class, mask coefficients.

    Raises:
        ValueError: a threshold outside 0..1 (also an AssertionError, as in the original), an unknown per_class, no device.
        RuntimeError: a wrong shape.
        TypeError: an argument is of another type.
    """
    _check_thresholds(conf_thres=conf_thres, iou_thres=iou_thres)
    prediction = _first(prediction, "N, 5 + classes + nm")
    check_type(_OP, "nm", nm, int)
    home = prediction.device
    scores, objectness = prediction[..., 5 : prediction.shape[2] - int(nm)], prediction[..., 4:5]
    prediction = prediction.to(_computing_device(scores, objectness, device, conf_thres, multi_label))
    label_rows = _label_rows(labels, prediction.shape[0], prediction.device)
    rows = prediction.shape[1] + (0 if label_rows is None else label_rows.shape[0])
    capacity, end = _room(max_det, 30000, rows * (prediction.shape[2] if multi_label else 1))
    limits = conf_thres, iou_thres, _stock_class_list(classes), bool(agnostic), bool(multi_label), capacity
    detections, counts = nms.non_max_suppression_padded(prediction, *limits, nm, label_rows, per_class=per_class)
    return _split(detections.to(home), counts.tolist(), end)


class Padded(NamedTuple):
    """Hold the detections of a batch before the host knows their counts: (images, most, columns), (images,), (images, most)."""

    detections: Tensor
    counts: Tensor
    indices: Tensor
    #: The end of a slice of each image's rows.
    end: int | None

    def rows(self, counts: list[int], return_idxs: bool = False) -> Any:
        """Return the detections of each image, once its count has come to the host, and as a pair with them their anchors if asked."""
        rows = _split(self.detections, counts, self.end)
        return (rows, _split(self.indices, counts, self.end)) if return_idxs else rows


def rows_of_rtdetr(prediction: object, sizes: list[list[int]], options: Any) -> Padded | None:
    """Return the detections that RT-DETR's ``postprocess`` keeps, in pixels of images of these sizes (width and height).

    ``prediction`` is what the model returns; ``options`` of the predictor or validator have conf, classes and max_det. Returns None if
    the prediction is not (images, N, 6) in float32.
    """
    rows = prediction[0] if isinstance(prediction, (list, tuple)) else prediction
    if not isinstance(rows, Tensor) or rows.dtype != torch.float32 or rows.shape[2:] != (6,) or len(rows) != len(sizes):
        return None
    capacity, end = _room(options.max_det, rows.shape[1])
    table = torch.tensor(sizes, dtype=torch.float32, device="cpu").view(-1, 2).to(rows.device, non_blocking=True)
    listed = _stock_class_list(options.classes, "postprocess")
    return Padded(*nms.filter_detections(rows, options.conf, listed, capacity, table), end)


def ultralytics_non_max_suppression(
    prediction: Tensor | list | tuple,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: object = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int | None = 300,
    nc: int | None = 0,
    max_time_img: float = 0.05,
    max_nms: int = 30000,
    max_wh: int = 7680,
    rotated: bool = False,
    end2end: bool = False,
    return_idxs: bool = False,
    *,
    per_class: str = "offset",
    rotated_rule: str = "fast",
    device: torch.device | str | None = None,
    padded: bool = False,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]] | Padded:
    """Suppress as Ultralytics' ``non_max_suppression``: the same rows in the same order, without time limit and host syncs.

    :func:`yolov5_non_max_suppression` explains the other arguments and the errors.

    Args:
        prediction: (images, 4 + nc + extra, N), or a tuple whose first element that is; (images, N, 6) and, with
            end2end, (images, N, 6 + extra) are filtered alone, where they are. Never changed.
        nc: classes; 0 or None treats every channel past the box as one.
        max_time_img: taken and ignored: there is no time limit.
        rotated: boxes are rotated, and the last channel is their angle in radians. They stay center and size.
        return_idxs: also give the anchors of the detections.
        rotated_rule: "fast" (as in Ultralytics) or "greedy", see :func:`torch_fastdet.ops.ultralytics_non_max_suppression_padded`.
        padded: copy nothing to the host.

    Returns:
        For each image (n, 6 + extra): x1, y1, x2, y2 (rotated: x, y, width, height), confidence, class, extra channels. With
        return_idxs a pair of that and, for each image, (n,) int64. With padded, both of the batch, and counts on the device.
    """
    _check_thresholds(conf_thres=conf_thres, iou_thres=iou_thres)
    prediction = _first(prediction, "4 + classes + extra, N")
    check_type(_OP, "nc", nc, int | None)
    filters = prediction.shape[-1:] == (6,) or end2end
    if rotated_rule not in ("fast", "greedy"):
        raise ValueError(f"{_OP}: rotated_rule is {rotated_rule!r}, but 'fast' or 'greedy' is expected")
    if filters and prediction.shape[-1] < 6:
        raise RuntimeError(
            f"{_OP}: prediction has shape {tuple(prediction.shape)}, but end2end wants (images, N, 6 + extra)"
        )
    check_type(_OP, "max_nms", max_nms, int)
    if max_nms < 0:
        raise ValueError(f"{_OP}: max_nms is {max_nms}, but 0 or more is expected")
    if per_class not in ("offset", "exact"):
        raise ValueError(f"{_OP}: per_class is {per_class!r}, but 'offset' or 'exact' is expected")
    listed, home = _stock_class_list(classes), prediction.device
    if filters:
        capacity, end = _room(max_det, prediction.shape[1])
        detections, counts, indices = nms.filter_detections(prediction, conf_thres, listed, capacity, finite=True)
        detections = detections.float()  # as the original, of float64 too
    else:
        scores = (prediction[:, 4 : 4 + int(nc)] if nc else prediction[:, 4:]).transpose(1, 2)
        prediction = prediction.to(_computing_device(scores, None, device, conf_thres, multi_label))
        capacity, end = _room(max_det, max_nms, prediction.shape[2] * (prediction.shape[1] if multi_label else 1))
        limits = conf_thres, iou_thres, listed, bool(agnostic), bool(multi_label), capacity
        rest = None, per_class, max_nms, max_wh, rotated_rule if rotated else "none"
        detections, counts, indices = nms.ultralytics_non_max_suppression_padded(prediction, *limits, nc or 0, *rest)
    found = Padded(detections.to(home), counts, indices.to(home), end)
    return found if padded else found.rows(counts.tolist(), return_idxs)
