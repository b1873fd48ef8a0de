"""Non-maximum suppression under the stock signatures: a list of detections for each image, one copy to the host a call."""

from __future__ import annotations

import sys
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from torch_fastdet.crossover import faster_device
from torch_fastdet.ops import nms
from torch_fastdet.ops._checks import check_tensors


def _first(op: str, prediction: Any) -> Tensor:
    """Models in validation mode give (decoded, raw)."""
    if isinstance(prediction, (list, tuple)):
        if not prediction:
            raise ValueError(f"{op}: prediction is an empty list, but its first element should be the decoded tensor")
        prediction = prediction[0]
    check_tensors(op, prediction=prediction)
    return prediction.detach()


def _computing_device(
    op: str, prediction: Tensor, device: Any, layout: str, conf_thres: float, multi_label: bool
) -> torch.device:
    if device is None:
        return prediction.device
    if isinstance(device, str) and device == "auto":
        return faster_device(prediction, layout, conf_thres, multi_label)
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{op}: device is {device!r}, but None, 'auto' or a device is expected") from None


def _stock_class_list(op: str, classes: object) -> list[int] | None:
    """Classes as the stock functions accept them: a list, an int, an array or a tensor."""
    if classes is None:
        return None
    try:
        values = torch.as_tensor(classes).reshape(-1).tolist()
        # Fractions, NaN and what is beyond the operators' integers match no class.
        return [int(value) for value in values if abs(value) < 2**63 and int(value) == value]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{op}: classes is {classes!r}, but None, an int or a list of ints is expected") from None


def _label_rows(op: str, labels: Any, images: int, device: torch.device) -> Tensor | None:
    """One (n, 6) tensor [image, class, x, y, width, height] from a list of (n, 5) tensors, or of what makes one."""
    if labels is None or len(labels) == 0:
        return None
    if len(labels) < images:
        raise ValueError(f"{op}: labels holds {len(labels)} tensors, but one for each of {images} images is expected")
    rows = []
    wanted = "but (n, 5) is expected: class, x, y, width, height"
    for image, label in enumerate(labels[:images]):
        try:
            label = torch.as_tensor(label)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{op}: labels[{image}] is a {type(label).__name__} that cannot become a tensor, {wanted}"
            ) from None
        if label.dim() and len(label) == 0:
            continue
        if label.dim() != 2 or label.size(1) < 5:
            raise ValueError(f"{op}: labels[{image}] has shape {tuple(label.shape)}, {wanted}")
        rows.append(torch.nn.functional.pad(label[:, :5].to(device, torch.float32), (1, 0), value=float(image)))
    return torch.cat(rows) if rows else None


def _room(max_det: Any) -> tuple[Any, Any]:
    """max_det as the operators take it, and the end of a slice behind them: a negative one leaves the last out, as in stock."""
    if max_det is None or (isinstance(max_det, Integral) and max_det < 0):
        return sys.maxsize, max_det
    return max_det, None


def _split(detections: Tensor, counts: list[int], end: Any) -> list[Tensor]:
    return [rows[:count][:end] for rows, count in zip(detections.unbind(0), counts)]


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
    """``non_max_suppression`` of YOLOv5: the same rows in the same order, without its time limit and its host syncs.

    Args:
        prediction: (images, N, 5 + classes + nm), or a tuple whose first element that is. Never changed.
        max_det: detections an image; None keeps all, and a negative number all but the last, as a slice does in stock.
        labels: for each image a tensor (n, 5) of class, x, y, width, height that joins with confidence 1, or an empty
            one; an array or nested lists serve too. Entries past the last image are skipped, as in stock.
        per_class: "offset" (as stock) or "exact", see :func:`torch_fastdet.ops.non_max_suppression_padded`, which
            explains the other arguments too.
        device: where to compute; None is where the prediction lies. "auto" is the faster of CPU and GPU for a prediction of this
            size that lies on the host (:mod:`torch_fastdet.crossover`), else the same. The result lies where the prediction does.

    Returns:
        For each image (n, 6 + nm): x1, y1, x2, y2, confidence, class, mask coefficients.

    Raises:
        ValueError: a wrong shape, a threshold outside 0..1 (also an AssertionError, as stock's), an unknown per_class, no
            device.
        TypeError: prediction is not a tensor, classes not an int or a list of ints, another option not a number, or an entry of labels
            cannot become a tensor.
    """
    op = "non_max_suppression"
    prediction = _first(op, prediction)
    if prediction.dim() != 3:
        raise ValueError(
            f"{op}: prediction has shape {tuple(prediction.shape)}, but (images, N, 5 + classes + nm) is expected"
        )
    listed = _stock_class_list(op, classes)
    most, end = _room(max_det)
    options = nms.checked_options(op, conf_thres, iou_thres, listed, agnostic, multi_label, most, per_class)
    home = prediction.device
    where = _computing_device(op, prediction, device, "yolov5", options.conf_thres, options.multi_label)
    prediction = prediction.to(where)
    label_rows = _label_rows(op, labels, prediction.shape[0], prediction.device)
    rows = prediction.shape[1] + (0 if label_rows is None else label_rows.shape[0])
    candidates = rows * (prediction.shape[2] if multi_label else 1)
    capacity = min(options.max_det, options.max_nms, candidates)  # no more than there can be
    detections, counts = nms.non_max_suppression_padded(
        prediction, *options[:5], capacity, int(nm), label_rows, *options[6:]
    )
    return _split(detections.to(home), counts.tolist(), end)


def _filter_end2end(
    prediction: Tensor, conf_thres: float, classes: list[int] | None, max_det: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of an end-to-end model above the threshold, in their order: detections, counts, indices, all padded."""
    passes = (prediction[..., 4] > conf_thres) & prediction[..., :5].isfinite().all(-1)
    if classes is not None:
        allowed = torch.zeros_like(passes)
        for c in classes:
            allowed |= prediction[..., 5] == c
        passes &= allowed
    order = passes.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :max_det]
    counts = passes.sum(1).clamp(max=max_det)
    rows = prediction.gather(1, order[..., None].expand(-1, -1, prediction.shape[-1])).float()
    return rows, counts, order


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
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """``non_max_suppression`` of ultralytics 8.4: the same rows in the same order, without its time limit and host syncs.

    Args:
        prediction: (images, 4 + nc + extra, N), or a tuple whose first element that is; (images, N, 6) and, with
            end2end, (images, N, 6 + extra) are filtered alone. Never changed.
        max_det: detections an image; None keeps all, and a negative number all but the last, as a slice does in stock.
        nc: classes; 0 or None takes every channel past the box for one.
        max_time_img: taken and ignored: there is no time limit.
        rotated: boxes are rotated, and the last channel is their angle in radians. They stay center and size.
        return_idxs: also give the anchors of the detections.
        per_class: "offset" (as stock) or "exact", see :func:`torch_fastdet.ops.non_max_suppression_padded`, which
            explains the other arguments too.
        rotated_rule: "fast" (as stock) or "greedy", see :func:`torch_fastdet.ops.ultralytics_non_max_suppression_padded`.
        device: where to compute; None is where the prediction lies. "auto" is the faster of CPU and GPU for a prediction of this
            size that lies on the host (:mod:`torch_fastdet.crossover`), else the same. The result lies where the prediction does.
            What is filtered alone stays where it is.

    Returns:
        For each image (n, 6 + extra): x1, y1, x2, y2 (rotated: x, y, width, height), confidence, class, extra channels (rotated:
        the angle is the last). With return_idxs a pair of that
        and, for each image, (n,) int64.

    Raises:
        ValueError: a wrong shape, a threshold outside 0..1 (also an AssertionError, as stock's), a negative max_nms, an unknown
            per_class or rotated_rule, no device.
        TypeError: prediction is not a tensor, classes not an int or a list of ints, or another option not a number.
    """
    op = "non_max_suppression"
    prediction = _first(op, prediction)
    filters = prediction.shape[-1:] == (6,) or end2end
    if rotated_rule not in ("fast", "greedy"):
        raise ValueError(f"{op}: rotated_rule is {rotated_rule!r}, but 'fast' or 'greedy' is expected")
    shape = tuple(prediction.shape)
    if len(shape) != 3:
        raise ValueError(f"{op}: prediction has shape {shape}, but (images, 4 + classes + extra, N) is expected")
    if filters and shape[-1] < 6:
        raise ValueError(f"{op}: prediction has shape {shape}, but end2end wants (images, N, 6 + extra)")
    listed = _stock_class_list(op, classes)
    most, end = _room(max_det)
    options = nms.checked_options(
        op, conf_thres, iou_thres, listed, agnostic, multi_label, most, per_class, max_nms, max_wh
    )
    home = prediction.device
    if filters and isinstance(device, str) and device == "auto":
        device = None
    where = _computing_device(op, prediction, device, "ultralytics", options.conf_thres, options.multi_label)
    if filters:
        detections, counts, indices = _filter_end2end(prediction, options.conf_thres, options.classes, options.max_det)
    else:
        prediction = prediction.to(where)
        candidates = prediction.shape[2] * (prediction.shape[1] if multi_label else 1)
        capacity = min(options.max_det, options.max_nms, candidates)
        detections, counts, indices = nms.ultralytics_non_max_suppression_padded(
            prediction, *options[:5], capacity, int(nc or 0), *options[6:], rotated_rule if rotated else "none"
        )
    sizes = counts.tolist()
    rows = _split(detections.to(home), sizes, end)
    return (rows, _split(indices.to(home), sizes, end)) if return_idxs else rows
