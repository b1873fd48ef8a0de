"""Computes Ultralytics' whole losses: task-aligned assignment, CIoU, distribution focal loss or L1, class entropy, the task's own part, and
all gradients."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from torch_fastdet.ops._checks import checked
from torch_fastdet.ops.yolov5_loss import yolov5_loss_fault


class V8Arguments(NamedTuple):
    """Hold the arguments that all losses of this module take last (:func:`v8_loss`), in the order of the schemas."""

    targets: torch.Tensor
    settings: torch.Tensor
    strides: list[float]
    sizes: list[int]
    num_targets: torch.Tensor | None = None
    class_weights: torch.Tensor | None = None
    reg_max: int = 16
    topk: int = 10
    topk2: int = 10


class V8Found(NamedTuple):
    """Hold what the operators return: loss and items, and (n, topk) the anchors that targets got, with the rows of these."""

    loss: torch.Tensor
    items: torch.Tensor
    scales: torch.Tensor
    slot_anchor: torch.Tensor
    slot_row: torch.Tensor
    slot_score: torch.Tensor
    status: torch.Tensor


@checked
def v8_loss_settings(
    box: float = 7.5,
    cls: float = 0.5,
    dfl: float = 1.5,
    weight: float = 1.0,
    alpha: float = 0.5,
    beta: float = 6.0,
    eps: float = 1e-9,
    least_side: float = 16.0,
) -> list[float]:
    """Return the numbers of :func:`v8_loss`'s ``settings``, in their order. It runs on the host alone.

    Args:
        box: gain of the box part.
        cls: gain of the class part.
        dfl: gain of the distance part.
        weight: factor of the loss, but not of the items: for a loss that is one of several in a sum.
        alpha: exponent of the class score in the alignment of an anchor and a target.
        beta: exponent of their overlap.
        eps: keeps the division of alignments above 0.
        least_side: short sides of targets, in pixels, are assigned as if they were this long.

    Returns:
        Nine numbers, for ``torch.tensor(..., dtype=torch.float64, device=...)``.

    The defaults are those of Ultralytics 8.4.190 for heads of strides 8, 16 and 32.
    """
    return [box, cls, dfl, weight, alpha, beta, eps, least_side, least_side]


@checked
def v8_loss(
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    settings: torch.Tensor,
    strides: list[float],
    sizes: list[int],
    num_targets: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    reg_max: int = 16,
    topk: int = 10,
    topk2: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute v8DetectionLoss as one operator, without a host sync, with the same bits in each run.

    Args:
        heads: raw outputs, one (bs, 4 * reg_max + classes, ny, nx) a level, or two joined tensors, boxes
            (bs, 4 * reg_max, anchors) and scores (bs, classes, anchors), with the levels one after the other;
            float16, bfloat16, float32 or float64, any strides. Dense heads are read, and their gradients written, without a copy.
            Arithmetic is float32, float64 for float64.
        targets: (n, 6) float32: image index, class, x, y, width, height; the last four are shares of the image. Rows may come
            in any order. A box whose corners, in pixels, add up to 0 or less, or are not finite, is left out, as in Ultralytics.
        settings: nine float64 on the heads' device, as :func:`v8_loss_settings` lists them. They are read when the kernels
            run, so a captured graph follows them.
        strides: pixels a cell of each level.
        sizes: height and width of each level, one after the other, where the heads are joined; else empty.
        num_targets: one int64 on the heads' device: rows of ``targets`` in use, the others are padding. None: all rows.
        class_weights: one number a class, factors of the class entropy. None: 1.
        reg_max: bins of a box side; 1: the head gives the distance itself, and the distance part is an L1 loss.
        topk: how many anchors a target may name. An anchor that several name goes to the target, of all that it lies in, with
            which it overlaps most. Ties go to the lower anchor and the lower row, as on a GPU in the original.
        topk2: number of assigned anchors that each target keeps. Default: ``topk`` (all).

    Returns:
        loss: (3), box, class and distance part times batch size and weight; differentiable by the heads. float32 (float64 for
            float64).
        items: (3), the parts before that.
        status: (4) int64: how many rows of targets were ignored, the first of them (:func:`v8_loss_fault` reads it),
            num_targets less the rows of targets where it is negative or exceeds them (else 0), 0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit each other.
        ValueError: on the CPU, a row of targets whose image is not in the batch or whose class is not one of the model's. On a
            GPU it is ignored and counted, because the host does not wait for it.

    Behavior: that of v8DetectionLoss in Ultralytics 8.4.190.
    """
    given = V8Arguments(targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2)
    found = v8_detection(heads, given)
    return found.loss, found.items, found.status


def v8_detection(heads: list[torch.Tensor], given: V8Arguments) -> V8Found:
    """Call :func:`v8_loss` and return what tasks read of it."""
    result = torch.ops.torch_fastdet.v8_loss(
        heads, *given[:6], reg_max=given.reg_max, topk=given.topk, topk2=given.topk2
    )
    return V8Found(*result)


@checked
def v8_segmentation_loss(
    heads: list[torch.Tensor],
    coefficients: torch.Tensor,
    protos: torch.Tensor,
    masks: torch.Tensor,
    targets: torch.Tensor,
    settings: torch.Tensor,
    strides: list[float],
    sizes: list[int],
    num_targets: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    overlap: bool = True,
    reg_max: int = 16,
    topk: int = 10,
    topk2: int = 10,
    compare_masks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute v8SegmentationLoss: :func:`v8_loss`, and the masks of the anchors that it assigned.

    The mask part is the mean, over all assigned anchors of the batch, of the entropy of ``coefficients`` x ``protos`` and the target's
    mask inside of the target's box, as a mean over all pixels, divided by the share of the image that the box covers.

    The other arguments and the errors are those of :func:`v8_loss`. The box gain of ``settings`` weighs the mask part, too.

    Args:
        coefficients: (bs, channels, anchors), at most 128 channels, any strides; of the heads' dtype.
        protos: (bs, channels, height, width), any strides; of the heads' dtype. Where they are not of the masks' size, they are enlarged
            to it first (bilinear), whose gradient on a GPU PyTorch does not repeat bit by bit.
        masks: with ``overlap`` (bs, height, width): each pixel holds the number of its target among the image's rows, counted from 1, or
            0. Without (n, height, width): a mask of numbers from 0 to 1 a row of targets. uint8, bool, int32 and float32 are read as
            they are; other dtypes are converted first.
        overlap: If True, ``masks`` holds indices.
        compare_masks: rank anchors by the mean of the boxes' CIoU and the masks' IoU, as in YOLO26.
            Masks are compared for each target's 3 * ``topk`` best anchors by score and CIoU; for others their IoU is 0. Without
            ``overlap`` a target's mask covers the pixels above 0.5.

    Returns:
        loss: (4), box, mask, class and distance part times batch size and weight; differentiable by heads, coefficients and protos.
        items: (4), the parts before that.
        status: as that of :func:`v8_loss`.

    Source: the behavior of v8SegmentationLoss in Ultralytics 8.4.190, with ``compare_masks`` that of SegmentLoss26, less its
    semantic part.
    """
    given = V8Arguments(targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2)
    found = v8_segmentation(heads, coefficients, protos, masks, given, overlap, compare_masks)
    return found.loss, found.items, found.status


def v8_segmentation(
    heads: list[torch.Tensor],
    coefficients: torch.Tensor,
    protos: torch.Tensor,
    masks: torch.Tensor,
    given: V8Arguments,
    overlap: bool,
    compare_masks: bool,
) -> V8Found:
    """Call :func:`v8_segmentation_loss` and return what tasks read of it."""
    if compare_masks:
        result = torch.ops.torch_fastdet.v8_masked_loss(
            heads,
            coefficients,
            protos,
            masks,
            *given[:6],
            reg_max=given.reg_max,
            topk=given.topk,
            topk2=given.topk2,
            overlap=overlap,
        )
        found = V8Found(*result)
    else:
        found = v8_detection(heads, given)
    if protos.dim() == 4 and masks.dim() == 3 and masks.shape[1:] != protos.shape[2:]:
        protos = F.interpolate(protos, [masks.shape[1], masks.shape[2]], mode="bilinear", align_corners=False)
    # A stride that float32 cannot represent, such as 320 / 12, gives a whole number of pixels only after rounding.
    image_size = [int(round(side * given.strides[0])) for side in _sizes(heads, given.sizes)[:2]]  # noqa: RUF046  TorchScript's round() gives a float
    part, item, _, _, _, _ = torch.ops.torch_fastdet.v8_mask_loss(
        coefficients,
        protos,
        masks,
        given.targets,
        given.settings,
        found.slot_anchor,
        found.slot_row,
        image_size,
        given.num_targets,
        overlap,
    )
    return _with_parts(found, part, item)


def _with_parts(found: V8Found, parts: torch.Tensor, items: torch.Tensor) -> V8Found:
    """Return ``found`` with a task's own parts behind that of the boxes."""
    whole: list[torch.Tensor] = []
    for before, between in ((found.loss, parts), (found.items, items)):
        # This is one split instead of two slices, because its gradient is one copy.
        boxes, rest = torch.split(before, [1, before.shape[0] - 1])
        whole.append(torch.cat([boxes, between.to(before.dtype), rest]))
    return V8Found(whole[0], whole[1], *found[2:])


@checked
def v8_pose_loss(
    heads: list[torch.Tensor],
    predictions: torch.Tensor,
    keypoints: torch.Tensor,
    sigmas: torch.Tensor,
    targets: torch.Tensor,
    settings: torch.Tensor,
    gains: torch.Tensor,
    strides: list[float],
    sizes: list[int],
    num_targets: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    reg_max: int = 16,
    topk: int = 10,
    topk2: int = 10,
    compare_keypoints: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute v8PoseLoss: :func:`v8_loss`, and the keypoints of the anchors that it assigned.

    The pose part is the mean, over assigned anchors and keypoints, of ``1 - exp(-e)`` for visible keypoints, times keypoints / visible
    ones; ``e`` is the squared distance over ``2 * (2 * sigma)**2 *`` the area of the target's box, all in cells of the anchor's level. The
    kobj part is the mean entropy of the visibility.

    The other arguments and the errors are those of :func:`v8_loss`.

    Args:
        predictions: (bs, keypoints * 2 or 3, anchors), keypoint after keypoint: x, y and, with 3, the logit of its visibility; the anchors
            of all levels; float16, bfloat16, float32 or float64, any strides. A position is 2 x + column of the anchor's cell.
        keypoints: (n, keypoints, 2 or 3) float32, one row for each row of targets: x and y as shares of the image, and visibility; 0 is
            invisible. With two columns all are visible.
        sigmas: (keypoints) float32, how far each keypoint may be off, as a share of the object's size.
        gains: two float64 on the heads' device, of the pose and the kobj part (12 and 1 in Ultralytics).
        compare_keypoints: as in YOLO26, rank anchors by the object keypoint similarity, not by the boxes' CIoU (for targets with a
            visible keypoint). A target's anchors are of the levels with strides of 1 / 12 to 1 / 2 of its size (the finest level takes
            smaller, the coarsest larger targets, too), and a position is x + the center of the anchor's cell. ``heads`` are joined
            then, and of the dtype of ``predictions``.

    Returns:
        loss: (5), box, pose, kobj, class and distance part times batch size and weight; differentiable by heads and predictions.
        items: (5), the parts before that. kobj is 0 where the predictions have no visibility.
        status: as that of :func:`v8_loss`.

    Source: the behavior of v8PoseLoss in Ultralytics 8.4.190, with ``compare_keypoints`` that of PoseLoss26, less its RLE part.
    """
    given = V8Arguments(targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2)
    found = v8_pose(heads, predictions, keypoints, sigmas, gains, given, compare_keypoints)
    return found.loss, found.items, found.status


def v8_pose(
    heads: list[torch.Tensor],
    predictions: torch.Tensor,
    keypoints: torch.Tensor,
    sigmas: torch.Tensor,
    gains: torch.Tensor,
    given: V8Arguments,
    compare_keypoints: bool,
) -> V8Found:
    """Call :func:`v8_pose_loss` and return what tasks read of it."""
    if compare_keypoints:
        result = torch.ops.torch_fastdet.v8_posed_loss(
            heads, predictions, keypoints, sigmas, *given[:6], reg_max=given.reg_max, topk=given.topk, topk2=given.topk2
        )
        found = V8Found(*result)
    else:
        found = v8_detection(heads, given)
    parts, items, _ = torch.ops.torch_fastdet.v8_keypoint_loss(
        predictions,
        keypoints,
        sigmas,
        given.targets,
        found.slot_anchor,
        found.slot_row,
        gains,
        given.settings,
        given.strides,
        _sizes(heads, given.sizes),
        compare_keypoints,
    )
    return _with_parts(found, parts, items)


@checked
def v8_obb_loss(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    angles: torch.Tensor,
    targets: torch.Tensor,
    settings: torch.Tensor,
    strides: list[float],
    sizes: list[int],
    num_targets: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    reg_max: int = 16,
    topk: int = 10,
    topk2: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute v8OBBLoss as one operator: as :func:`v8_loss`, for rotated boxes.

    Boxes overlap by probiou, the similarity of Gaussians that have their spread. Distances are measured along a box's own axes. The
    angle part is ``sin(2 d)**2`` of the angle ``d`` between prediction and target, weighted less the longer the target is.

    The other arguments and the errors are those of :func:`v8_loss`.

    Args:
        boxes: (bs, 4 * reg_max, anchors), the levels one after the other; float16, bfloat16, float32 or float64, any strides.
        scores: (bs, classes, anchors), as boxes.
        angles: (bs, 1, anchors) in radians, as boxes.
        targets: (n, 7) float32: image index, class, x, y, width, height as shares of the image, and the angle in radians. Rows may come in
            any order. A target with a side below two pixels is left out, and one whose numbers, in pixels, add up to 0 or less.
        settings: ten float64 on the boxes' device: those of :func:`v8_loss_settings`, and the gain of the angle part (1 in Ultralytics).

    Returns:
        loss: (4), box, class, distance and angle part times batch size and weight; differentiable by boxes, scores and angles.
        items: (4), the parts before that.
        status: as that of :func:`v8_loss`.

    Source: the behavior of v8OBBLoss in Ultralytics 8.4.190.
    """
    given = V8Arguments(targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2)
    found = v8_obb(boxes, scores, angles, given)
    return found.loss, found.items, found.status


def v8_obb(boxes: torch.Tensor, scores: torch.Tensor, angles: torch.Tensor, given: V8Arguments) -> V8Found:
    """Call :func:`v8_obb_loss` and return what tasks read of it."""
    result = torch.ops.torch_fastdet.v8_obb_loss(
        boxes, scores, angles, *given[:6], reg_max=given.reg_max, topk=given.topk, topk2=given.topk2
    )
    return V8Found(*result)


def _sizes(heads: list[torch.Tensor], sizes: list[int]) -> list[int]:
    if len(sizes) > 0:
        return sizes
    found: list[int] = []
    for head in heads:
        found.append(head.shape[2])
        found.append(head.shape[3])
    return found


@checked
def v8_loss_fault(status: list[int]) -> tuple[int, int]:
    """Return which of the targets was bad, from what :func:`v8_loss` reports. It runs on the host alone.

    Args:
        status: the operator's status, as a list.

    Returns:
        Row and column of the first bad row of targets, (-1, -1) if there is none.
    """
    return yolov5_loss_fault(status)
