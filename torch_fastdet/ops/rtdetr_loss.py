"""Computes RT-DETR's whole loss: costs, assignment, varifocal, box and GIoU terms of every prediction set, and all gradients."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def rtdetr_loss(
    boxes: Tensor,
    scores: Tensor,
    targets: Tensor,
    counts: Tensor,
    dn_boxes: Tensor | None = None,
    dn_scores: Tensor | None = None,
    dn_matches: Tensor | None = None,
    class_gain: float = 1.0,
    box_gain: float = 5.0,
    giou_gain: float = 2.0,
    class_cost: float = 2.0,
    box_cost: float = 5.0,
    giou_cost: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute RTDETRDetectionLoss as one operator, without a host sync, with the same bits in each run.

    It takes four launches forward and one backward. Queries are assigned to targets in each set and image as :func:`linear_assignment` does, at
    the least sum of ``class_cost`` x focal cost + ``box_cost`` x L1 distance + ``giou_cost`` x (1 - GIoU); a cost that is not finite
    counts as 0. The terms of a set are divided by the number of its assigned queries, or by 1:

    * class: varifocal entropy (alpha 0.25, gamma 1.5), with the IoU as the score of an assigned query's class. If no image has a
      target, focal entropy (alpha 0.25, gamma 1.5).
    * box: L1 distance. GIoU: 1 - GIoU.

    Args:
        boxes: (sets, images, queries, 4): x, y, width, height as shares of the image; float16, bfloat16, float32 or float64. Read as
            float32 (float64 beside float64 scores).
        scores: (sets, images, queries, classes) logits; float16, bfloat16, float32 or float64. Arithmetic is float32 (float64 for
            float64).
        targets: (images, most targets, 5) float32: class, x, y, width, height, the image's own first and then padding.
        counts: (images) int64: targets of each image.
        dn_boxes: (sets, images, queries, 4) of denoising sets, as boxes; numbers of sets and queries of their own. None: there are none.
        dn_scores: as scores, of their dtype.
        dn_matches: (images, queries) int64: the target of each denoising query in every set, -1 for none.
        class_gain: factor of the class terms.
        box_gain: factor of the box terms.
        giou_gain: factor of the GIoU terms.
        class_cost: factor of the class in the cost.
        box_cost: factor of the distance in the cost.
        giou_cost: factor of GIoU in the cost.

    Returns:
        loss: the sum of all terms, differentiable by boxes, scores, dn_boxes and dn_scores. float32 (float64 for float64).
        terms: (sets, 3), class, box and GIoU of each set, those of the denoising sets behind the others.
        status: (2) int64: how many targets have a class that the model does not have, or counts are out of range, and the first of them,
            which :func:`rtdetr_loss_fault` reads.

    Tensors that are not contiguous, and boxes that are not aligned to 16 bytes, are copied first.

    Raises:
        RuntimeError: shapes, dtypes, layouts or devices do not fit each other.
        ValueError: on the CPU, a class or a count that is out of range. On a GPU such a class is ignored, and such an image has no
            targets.

    Source: Zhao et al., DETRs Beat YOLOs on Real-time Object Detection (2024); Zhang et al., VarifocalNet (2021). The behavior is that
    of RTDETRDetectionLoss in Ultralytics 8.4.190.
    """
    given = boxes, scores, targets, counts, dn_boxes, dn_scores, dn_matches
    loss, terms, status, _, _, _ = torch.ops.torch_fastdet.rtdetr_loss(
        *given,
        class_gain=class_gain,
        box_gain=box_gain,
        giou_gain=giou_gain,
        class_cost=class_cost,
        box_cost=box_cost,
        giou_cost=giou_cost,
    )
    return loss, terms, status


@checked
def rtdetr_loss_fault(status: list[int], most: int) -> tuple[int, int]:
    """Return which of the targets was bad, from what :func:`rtdetr_loss` reports. It runs on the host alone.

    Args:
        status: the operator's status, as a list.
        most: the second size of ``targets``.

    Returns:
        Image and row of the first bad target, (-1, -1) if there is none. Row ``most`` is the image's count.
    """
    if not status[0]:
        return -1, -1
    place = (1 << 60) - status[1]  # 2**60 is a float in TorchScript
    return place // (most + 1), place % (most + 1)
