"""Decodes YOLO heads, suppresses exactly with a fixed capacity, and scales boxes to original pixels.

Every operator works without a host sync, is capturable in a CUDA graph and gives the same result on the CPU and the GPU.
"""

from functools import partial

import torch
from torch import Tensor

from torch_fastdet.ops._checks import check_type, checked
from torch_fastdet.ops.letterbox import letterbox


def _class_list(classes: list[int] | None) -> list[int] | None:
    """Return a list of classes; an int is one class, as the original functions take it."""
    return [classes] if isinstance(classes, int) else classes


_suppressing = partial(checked, lone="classes")


@checked
def yolov5_decode(heads: list[Tensor], anchors: Tensor, strides: list[float], nm: int = 0) -> Tensor:
    """Decode raw YOLOv5 head maps into the prediction tensor of the original ``Detect`` module.

    Args:
        heads: one map a level, (images, na * no, ny, nx) or the original 5-D view (images, na, ny, nx, no); any strides
            (channels_last is read where it lies); float16, bfloat16, float32 or float64.
        anchors: (levels, na, 2), width and height in grid cells, as ``Detect.anchors``; on the heads' device or the CPU.
        strides: pixels a cell of each level, as ``Detect.stride.tolist()``.
        nm: the last nm channels are mask coefficients and stay raw.

    Returns:
        (images, N, no), contiguous, of the heads' dtype: x, y, width, height in pixels, sigmoid of objectness and
        classes, nm raw columns. Computed in float32 (float64 for float64) and rounded once. Differentiable by the heads.

    Raises:
        ValueError: a stride or nm that is not positive.
        RuntimeError: maps, anchors and strides that do not fit each other, maps of two dtypes or none that floats, tensors on two
            devices.

    Behavior: ``Detect.forward`` of YOLOv5 v7.0 (xy = (2 sigmoid - 0.5 + cell) * stride, wh = (2 sigmoid)^2 * anchor).
    """
    return torch.ops.torch_fastdet.yolov5_decode(heads, anchors, strides, nm)


@_suppressing
def non_max_suppression_padded(
    prediction: Tensor,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: list[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
    nm: int = 0,
    labels: Tensor | None = None,
    letterboxes: Tensor | None = None,
    per_class: str = "offset",
    max_nms: int = 30000,
    max_wh: float = 7680.0,
) -> tuple[Tensor, Tensor]:
    """Suppress a YOLOv5 prediction exactly, with a fixed capacity and nothing copied to the host.

    Args:
        prediction: (images, N, 5 + classes + nm): x, y, width, height in pixels, objectness, class scores, mask
            coefficients; float16, bfloat16, float32 or float64, any strides. Never changed; gradients end here.
        conf_thres: objectness and confidence must be above it (in the prediction's dtype); 0 to 1.
        iou_thres: a box is suppressed by a better one if their IoU is above it; 0 to 1. The IoU and the threshold are
            float32 (float64 for float64) on every device.
        classes: detect these only (an int: this one); a box whose best class is another is dropped.
        agnostic: boxes of different classes suppress each other too.
        multi_label: each class above conf_thres is a candidate, not the best one alone.
        max_det: detections an image, the capacity of the result.
        nm: mask coefficients at the end of each row; they come out multiplied by objectness, as in YOLOv5.
        labels: (n, 6) rows [image, class, x, y, width, height] that join the candidates with confidence 1 (autolabels),
            after all others. Rows whose image or class does not exist are skipped, so a buffer can be padded with -1.
            An image with labels is computed in float32.
        letterboxes: (images, 6) rows [gain_x, gain_y, pad_x, pad_y, width, height] from :func:`letterbox`: boxes come out
            in the original images' pixels. Any float dtype, as labels; both are made contiguous.
        per_class: "offset" moves each class by max_wh pixels before boxes are compared, with the rounding that this
            implies, as the original functions do; "exact" compares boxes of one class where they are.
        max_nms: candidates an image, the best by confidence.
        max_wh: pixels between classes with per_class="offset".

    Returns:
        detections (images, max_det, 6 + nm): x1, y1, x2, y2, confidence, class, mask coefficients, best first; float32
        (float64 for float64); rows past the count are zero. counts (images,): int64. Ties are broken by the lower anchor index, then
        the lower class. Candidates with a NaN or infinite confidence or box are dropped: without multi_label the whole anchor.
        There is no gradient.

    Raises:
        ValueError: a threshold outside 0..1, a negative max_det, an unknown per_class.
        RuntimeError: a wrong shape, a dtype that is not floating, tensors on two devices.

    Behavior: ``non_max_suppression`` of YOLOv5 v7.0, without its time limit.
    """
    limits = conf_thres, iou_thres, _class_list(classes), agnostic, multi_label, max_det
    rest = letterboxes, per_class, max_nms, max_wh
    return torch.ops.torch_fastdet.non_max_suppression_padded(prediction, *limits, nm, labels, *rest)


@_suppressing
def ultralytics_non_max_suppression_padded(
    prediction: Tensor,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: list[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
    nc: int = 0,
    letterboxes: Tensor | None = None,
    per_class: str = "offset",
    max_nms: int = 30000,
    max_wh: float = 7680.0,
    rotated: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """Suppress an Ultralytics prediction as :func:`non_max_suppression_padded` does; also return indices.

    Options, dtypes, layouts and errors are those of :func:`non_max_suppression_padded`; this is what differs:

    Args:
        prediction: (images, 4 + nc + extra, N): x, y, width, height in pixels, class scores, extra channels (mask
            coefficients, keypoints).
        nc: classes; 0 treats every channel past the box as a class.
        rotated: "none" for upright boxes. "fast" and "greedy" take the last extra channel for an angle in radians (without
            extra channels the class, as in Ultralytics) and compare boxes by probiou. With "fast", as in Ultralytics, a box goes if
            any better one overlaps it; with "greedy" only a kept one counts. A probiou within 1e-5 of the threshold may go either way, as
            may one of a box 1,000 times as long as wide, whose area float32 loses as in Ultralytics.

    Returns:
        detections (images, max_det, 6 + extra), counts (images,), indices (images, max_det), int64: the anchor of each
        detection, -1 past the count. An anchor with a NaN class score is dropped whole, as in Ultralytics. Rotated boxes come
        out as center, size, confidence, class, extra channels, with the angle last; letterboxes scale them without clipping.

    Raises:
        ValueError: an unknown rotated.
        TypeError, ValueError, RuntimeError: what :func:`non_max_suppression_padded` raises.

    Behavior: ``non_max_suppression`` of ultralytics 8.4, without its time limit; probiou, https://arxiv.org/abs/2106.06072.
    """
    limits = conf_thres, iou_thres, _class_list(classes), agnostic, multi_label, max_det
    rest = letterboxes, per_class, max_nms, max_wh, rotated
    return torch.ops.torch_fastdet.ultralytics_non_max_suppression_padded(prediction, *limits, nc, *rest)


@_suppressing
def yolov5_postprocess(
    heads: list[Tensor],
    anchors: Tensor,
    strides: list[float],
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: list[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
    nm: int = 0,
    letterboxes: Tensor | None = None,
    per_class: str = "offset",
    max_nms: int = 30000,
    max_wh: float = 7680.0,
) -> tuple[Tensor, Tensor]:
    """Run :func:`yolov5_decode` and :func:`non_max_suppression_padded` as one operator, with the same bits.

    Nothing decoded is stored. Heads, anchors and strides are those of :func:`yolov5_decode`, options and results those of
    :func:`non_max_suppression_padded`.

    Behavior: ``Detect.forward`` and ``non_max_suppression`` of YOLOv5 v7.0.
    """
    limits = conf_thres, iou_thres, _class_list(classes), agnostic, multi_label, max_det
    rest = letterboxes, per_class, max_nms, max_wh
    return torch.ops.torch_fastdet.yolov5_postprocess(heads, anchors, strides, *limits, nm, *rest)


@_suppressing
def ultralytics_postprocess(
    boxes: list[Tensor],
    scores: list[Tensor],
    extra: list[Tensor],
    strides: list[float],
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    classes: list[int] | None = None,
    agnostic: bool = False,
    multi_label: bool = False,
    max_det: int = 300,
    letterboxes: Tensor | None = None,
    per_class: str = "offset",
    max_nms: int = 30000,
    max_wh: float = 7680.0,
    rotated: str = "none",
    extra_kind: str = "raw",
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn raw maps of Ultralytics' head into what :func:`ultralytics_non_max_suppression_padded` returns.

    Distances are computed in float32 (float64 for float64). Options and results are those of
    :func:`ultralytics_non_max_suppression_padded`.

    Args:
        boxes: one map a level, (images, 4 * reg_max, ny, nx): logits of the distance bins of left, top, right, bottom
            (the distance itself where reg_max is 1). Slices of a joined map serve: ``head[:, :4 * reg_max]``. float16, bfloat16,
            float32 or float64, any strides (channels_last is read where it lies), as all three lists.
        scores: one map a level, (images, nc, ny, nx): class logits.
        extra: an empty list, or one map a level, (images, ne, ny, nx), copied to the detections as extra_kind says.
        strides: pixels a cell of each level.
        rotated: "none", or "fast" or "greedy" for heads of rotated boxes: their angle is the last extra channel.
        extra_kind: "raw": as it is. "angle_logit": the last channel is the logit of the angle, (sigmoid - 1/4) pi, as of ``OBB``.
            "keypoints_xy" and "keypoints_xyv" (with a visibility): keypoints of ``Pose``; "cell_keypoints_xy" and
            "cell_keypoints_xyv": of ``Pose26``. They come out in pixels, with letterboxes in those of the original image and
            clipped to it; visibilities as sigmoids.

    Raises:
        ValueError: rotated without extra, an unknown extra_kind.
        RuntimeError: maps and strides that do not fit each other.
        TypeError, ValueError, RuntimeError: what :func:`non_max_suppression_padded` raises.

    Behavior: ``Detect`` of ultralytics 8.4 (distribution focal loss, https://arxiv.org/abs/2006.04388).
    """
    if len(boxes) == 0:
        raise RuntimeError("ultralytics_postprocess: boxes is an empty list, but one map for each stride is expected")
    limits = conf_thres, iou_thres, _class_list(classes), agnostic, multi_label, max_det
    rest = letterboxes, per_class, max_nms, max_wh, rotated, extra_kind
    return torch.ops.torch_fastdet.ultralytics_postprocess(boxes, scores, extra, strides, *limits, *rest)


@checked
def filter_detections(
    prediction: Tensor,
    conf_thres: float = 0.25,
    classes: list[int] | None = None,
    max_det: int = 300,
    sizes: Tensor | None = None,
    finite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the rows of a model without suppression that are above a threshold, in their order.

    Args:
        prediction: (images, N, 6 or more): box, confidence, class, further columns, which are copied. float16, bfloat16, float32 or
            float64, any strides.
        conf_thres: a row's confidence must be above it.
        classes: keep rows of these classes alone; each below 16,384.
        max_det: the most rows of an image.
        sizes: (images, 2), width and height of each image: boxes are center and size as shares of it, and come out as corners.
            If None, boxes are unchanged.
        finite: drop rows whose box or confidence is NaN or infinite, too.

    Returns:
        - (images, max_det, columns) float32 (float64 for float64); rows past the count are 0;
        - (images,) int64: rows of each image;
        - (images, max_det) int64: which of the N each row is, -1 past the count.

    Raises:
        RuntimeError: shapes that do not fit, a dtype that is not floating, tensors on two devices, a class of 16,384 or more.
        ValueError: conf_thres is outside 0..1, or max_det negative.
    """
    return torch.ops.torch_fastdet.filter_detections(prediction, conf_thres, classes, max_det, sizes, finite)


def scale_boxes(
    input_shape: list[int],
    boxes: Tensor,
    image_shape: list[int],
    ratio_pad: tuple[tuple[float, float], tuple[float, float]] | None = None,
    padding: bool = True,
    xywh: bool = False,
    rounding: str = "yolov5",
) -> Tensor:
    """Scale boxes of the network's input to the pixels of the original image, and clip them to it.

    For many images at once call :func:`scale_boxes_batched` or give ``letterboxes`` to the suppression operators.

    Args:
        input_shape: height and width of the network's input.
        boxes: (..., 4 or more): x1, y1, x2, y2 first; further columns are copied. float16, bfloat16, float32 or float64, any
            strides. Never changed (the original functions write in place).
        image_shape: height and width of the original image.
        ratio_pad: ((gain_y, gain_x), (pad_x, pad_y)) where the loader knows it.
        padding: False if the image was stretched and not padded.
        xywh: boxes are center and size; they are not clipped.
        rounding: the framework whose padding is used, "yolov5" or "ultralytics"; see :func:`letterbox`.

    Returns:
        A new, contiguous tensor of the boxes' shape and dtype, which does not require grad.

    Raises:
        RuntimeError: fewer than four columns, a dtype that is not floating.
        TypeError, ValueError: an argument of another type than its annotation, and what :func:`letterbox` raises.
    """
    if not torch.jit.is_scripting():
        check_type("scale_boxes", "boxes", boxes, Tensor)
        check_type("scale_boxes", "padding", padding, bool)
        check_type("scale_boxes", "xywh", xywh, bool)
    if boxes.dim() < 1 or boxes.size(-1) < 4:
        raise RuntimeError(
            f"scale_boxes: boxes has shape {list(boxes.shape)}, but (..., 4 or more columns) is expected"
        )
    row = letterbox(input_shape, image_shape, ratio_pad, rounding)
    if not padding:
        row[2] = 0.0
        row[3] = 0.0
    dtype = torch.float64 if boxes.dtype == torch.float64 else torch.float32
    letterboxes = torch.cat([torch.full([1], value, dtype=dtype, device=boxes.device) for value in row]).unsqueeze(0)
    return scale_boxes_batched(boxes.reshape(1, -1, boxes.size(-1)), letterboxes, xywh).reshape(boxes.shape)


@checked
def scale_boxes_batched(boxes: Tensor, letterboxes: Tensor, xywh: bool = False) -> Tensor:
    """Scale boxes as :func:`scale_boxes` does, for a batch, in one launch.

    Args:
        boxes: (images, n, 4 or more), otherwise as for :func:`scale_boxes`, which also explains xywh and the result.
        letterboxes: (images, 6), rows of :func:`letterbox`, of any float dtype, on the boxes' device; made contiguous.

    Raises:
        RuntimeError: shapes that do not fit, a dtype that is not floating, tensors on two devices.
    """
    return torch.ops.torch_fastdet.scale_boxes(boxes, letterboxes, xywh)
