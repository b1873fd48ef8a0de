"""Computes the whole YOLOv5 training loss: target assignment, CIoU, class and objectness entropy, masks, and the heads' gradients."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from torch_fastdet.ops._checks import checked


class Yolov5LossOptions(NamedTuple):
    """Hold the arguments that both losses of this module take behind ``num_targets``, in the order of the schema."""

    box: float = 0.05
    obj: float = 1.0
    cls: float = 0.5
    cls_pw: float = 1.0
    obj_pw: float = 1.0
    label_smoothing: float = 0.0
    fl_gamma: float = 0.0
    anchor_t: float = 4.0
    gr: float = 1.0
    sort_obj_iou: bool = False


def yolov5_detection(
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    anchors: torch.Tensor,
    balance: torch.Tensor,
    num_targets: torch.Tensor | None,
    options: Yolov5LossOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call :func:`yolov5_loss`, and also return the cell of each match."""
    loss, items, levels, owner, matches, _, _ = torch.ops.torch_fastdet.yolov5_loss(
        heads,
        targets,
        anchors,
        balance,
        num_targets,
        box_gain=options.box,
        obj_gain=options.obj,
        cls_gain=options.cls,
        cls_pw=options.cls_pw,
        obj_pw=options.obj_pw,
        label_smoothing=options.label_smoothing,
        fl_gamma=options.fl_gamma,
        anchor_t=options.anchor_t,
        gr=options.gr,
        sort_obj_iou=options.sort_obj_iou,
    )
    return loss, items, levels[:, 0], owner[-4:], matches


@checked
def yolov5_loss(
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    anchors: torch.Tensor,
    balance: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    box: float = 0.05,
    obj: float = 1.0,
    cls: float = 0.5,
    cls_pw: float = 1.0,
    obj_pw: float = 1.0,
    label_smoothing: float = 0.0,
    fl_gamma: float = 0.0,
    anchor_t: float = 4.0,
    gr: float = 1.0,
    sort_obj_iou: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute YOLOv5's ComputeLoss as one operator, without a host sync, with the same bits in each run.

    Args:
        heads: raw outputs of the detection layers, one a level: (bs, na, ny, nx, no) or (bs, na*no, ny, nx), no = 5 +
            classes; float16, bfloat16, float32 or float64, any strides. Dense heads (contiguous, channels_last, and the
            permuted view of either) are read, and their gradients written, in their own layout, without a copy.
        targets: (nt, 6) float32: image index, class, x, y, width, height; the last four are shares of the image.
        anchors: (nl, na, 2) float32, in grid cells of their level (``Detect.anchors``).
        balance: (nl) or longer, float64: weight of each level's objectness.
        num_targets: one int64 on the heads' device: rows of ``targets`` in use, the others are padding. None: all rows.
        box: gain of the box part.
        obj: gain of the objectness part.
        cls: gain of the class part.
        cls_pw: weight of the class entropy's positive terms.
        obj_pw: weight of the objectness entropy's positive terms.
        label_smoothing: classes aim at 1 - s/2 and s/2.
        fl_gamma: above 0, both entropies are focal losses with this gamma and alpha 0.25.
        anchor_t: a target goes to an anchor if no side is this many times longer or shorter.
        gr: objectness aims at 1 - gr + gr * CIoU.
        sort_obj_iou: of several targets in one cell the one with the greatest CIoU gives the objectness (ties: the last in
            the order below). Otherwise the last does, by offset (center, left, up, right, down), anchor, row of targets.

    Returns:
        loss: (1), the sum of the parts times the batch size; differentiable by the heads. float32 (float64 for float64).
        items: (3), box, objectness and class part.
        level_objectness: (nl), mean objectness entropy of each level, before gains.
        status: (4) int64: how many rows of targets were ignored, the first of them (:func:`yolov5_loss_fault` reads it),
            num_targets less the rows of targets where it is negative or exceeds them (else 0), 0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit each other.
        ValueError: on the CPU, a row of targets whose image is not in the batch, whose class is below 0 or not below the number of
            classes, or whose box is not finite. On a GPU it is ignored and counted, because the host does not wait for it.

    Behavior: that of ComputeLoss in YOLOv5 v7.0.
    """
    options = Yolov5LossOptions(box, obj, cls, cls_pw, obj_pw, label_smoothing, fl_gamma, anchor_t, gr, sort_obj_iou)
    return yolov5_detection(heads, targets, anchors, balance, num_targets, options)[:4]


@checked
def yolov5_segmentation_loss(
    heads: list[torch.Tensor],
    protos: torch.Tensor,
    masks: torch.Tensor,
    targets: torch.Tensor,
    anchors: torch.Tensor,
    balance: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    box: float = 0.05,
    obj: float = 1.0,
    cls: float = 0.5,
    cls_pw: float = 1.0,
    obj_pw: float = 1.0,
    label_smoothing: float = 0.0,
    fl_gamma: float = 0.0,
    anchor_t: float = 4.0,
    gr: float = 1.0,
    sort_obj_iou: bool = False,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute YOLOv5's segmentation loss: :func:`yolov5_loss`, and the masks of its matches.

    The mask part is, for each level and image, the mean over its matches of the entropy of coefficients x ``protos`` and the
    target's mask inside of the target's box, as a mean over all pixels, divided by the share of the image that the box covers; the sum
    of these means over the number of images, times ``box``. No mask of a match is ever in memory.

    The other arguments and the errors are those of :func:`yolov5_loss`.

    Args:
        heads: raw outputs, one a level: (bs, na, ny, nx, no), no = 5 + classes + channels, any strides. The last ``channels`` are the
            mask coefficients.
        protos: (bs, channels, height, width), at most 128 channels, any strides; a float dtype.
        masks: with ``overlap`` (bs, h, w): each pixel holds the number of its target among the image's rows, counted from 1, or 0.
            Without (nt, h, w): a mask of numbers from 0 to 1 a row of targets. Masks of another size are resized to that of the
            prototypes (nearest). uint8, bool, int32 and float32 are read as they are where the size is that of the prototypes; others are
            converted to float32 first.
        overlap: If True, ``masks`` holds indices.

    Returns:
        loss: (1), the sum of the parts times the batch size; differentiable by heads and protos.
        items: (4), box, mask, objectness and class part.
        level_objectness: (nl), mean objectness entropy of each level, before gains.
        status: as that of :func:`yolov5_loss`.

    Source: the behavior of utils.segment.loss.ComputeLoss in YOLOv5 v7.0.
    """
    options = Yolov5LossOptions(box, obj, cls, cls_pw, obj_pw, label_smoothing, fl_gamma, anchor_t, gr, sort_obj_iou)
    detection, coefficients, sizes = split_coefficients(heads, protos)
    loss, items, levels, status, matches = yolov5_detection(detection, targets, anchors, balance, num_targets, options)
    part, item = yolov5_mask_part(coefficients, protos, masks, targets, matches, sizes, num_targets, box, overlap)
    items = torch.cat((items[:1], item.to(items.dtype), items[1:]))
    return loss + part.to(loss.dtype), items, levels, status


def split_coefficients(
    heads: list[torch.Tensor], protos: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """Return the heads without their last channels, those as (bs, channels, anchors) in the prototypes' dtype, and the levels' sizes."""
    if len(heads) == 0:
        raise RuntimeError("yolov5_segmentation_loss: heads is an empty list, but one map for each level is expected")
    detection: list[torch.Tensor] = []
    coefficients: list[torch.Tensor] = []
    sizes: list[int] = []
    for head in heads:
        if head.dim() != 5 or protos.dim() != 4 or head.shape[4] <= protos.shape[1]:
            raise RuntimeError(
                f"yolov5_segmentation_loss: a head has shape {head.shape} and protos {protos.shape}, but (bs, na, ny, nx, 5 + classes + "
                "channels) and (bs, channels, height, width) are expected"
            )
        # This is one split instead of two slices, because its gradient is one copy.
        parts = torch.split(head, [head.shape[4] - protos.shape[1], protos.shape[1]], 4)
        detection.append(parts[0])
        coefficients.append(parts[1].flatten(1, 3))
        sizes.append(head.shape[2])
        sizes.append(head.shape[3])
    joined = torch.cat(coefficients, 1).transpose(1, 2)
    return detection, joined, sizes


def yolov5_mask_part(
    coefficients: torch.Tensor,
    protos: torch.Tensor,
    masks: torch.Tensor,
    targets: torch.Tensor,
    matches: torch.Tensor,
    sizes: list[int],
    num_targets: torch.Tensor | None,
    box: float,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and item of the masks; ``matches`` is the match_cell of the operator yolov5_loss."""
    if masks.dim() == 3 and masks.shape[1:] != protos.shape[2:]:
        masks = F.interpolate(masks[:, None].float(), [protos.shape[2], protos.shape[3]], mode="nearest")[:, 0]
    dtype = torch.promote_types(coefficients.dtype, protos.dtype)
    loss, item, _, _, _, _ = torch.ops.torch_fastdet.yolov5_mask_loss(
        coefficients.to(dtype),
        protos.to(dtype),
        masks,
        targets,
        matches,
        sizes,
        num_targets,
        box_gain=box,
        overlap=overlap,
    )
    return loss, item


@checked
def yolov5_loss_fault(status: list[int]) -> tuple[int, int]:
    """Return which of the targets was bad, from what :func:`yolov5_loss` reports. It runs on the host alone.

    Args:
        status: the operator's status, as a list.

    Returns:
        Row and column of the first bad row of targets, (-1, -1) if there is none.
    """
    if status[0] == 0:
        return -1, -1
    fault = (1 << 62) - status[1]
    return fault // 6, fault % 6
