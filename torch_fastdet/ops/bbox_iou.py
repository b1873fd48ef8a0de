"""Computes the intersection over union of box pairs, and the loss 1 - IoU."""

import torch

from torch_fastdet.ops._checks import checked


@checked
def bbox_iou(
    box1: torch.Tensor,
    box2: torch.Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Compute IoU, GIoU, DIoU or CIoU of pairs of boxes: element i of ``box1`` with element i of ``box2``.

    Value and gradient stay finite for boxes without width or height, and equal boxes never give NaN, unlike with the PyTorch formula. NaN
    coordinates give NaN.

    Args:
        box1: (..., 4), in any one unit: center, width and height with ``xywh``, else corners. float16, bfloat16, float32 or float64, any
            strides.
        box2: as ``box1``; leading dimensions broadcast against those of ``box1``, dtypes may differ.
        xywh: the layout of both.
        GIoU: generalized IoU. Without any of the three, the plain IoU.
        DIoU: distance IoU; takes precedence over GIoU.
        CIoU: complete IoU; takes precedence over both. Its alpha is a constant in the gradients.
        eps: added to the union, to the enclosing box's area and squared diagonal and to the denominator of CIoU's alpha,
            and in xyxy layout to the heights.

    Returns:
        (..., 1), of the broadcast leading shape and the promoted dtype. The arithmetic is float32, or float64 where an input is float64.
        Under autocast, half-precision boxes are cast to float32 first, and the result is float32.

    Gradients reach both boxes, summed over broadcast dimensions in a fixed order: the same bits in every run. Boxes whose corners coincide
    share the gradient, as in PyTorch's minimum and maximum. There is no second derivative.

    Raises:
        RuntimeError: a last dimension other than 4, shapes that do not broadcast or do not merge into at most 8 leading dimensions,
            integer, sparse, nested or quantized boxes, tensors on two devices, a tensor of ``torch.inference_mode`` beside one whose
            gradient is recorded.
        ValueError: a negative eps.

    Source: Rezatofighi et al., Generalized Intersection over Union (2019); Zheng et al., Distance-IoU Loss (2020).
    """
    return torch.ops.torch_fastdet.bbox_iou(box1, box2, xywh, GIoU, DIoU, CIoU, eps)


@checked
def iou_loss(
    box1: torch.Tensor,
    box2: torch.Tensor,
    kind: str = "ciou",
    xywh: bool = True,
    reduction: str = "mean",
    eps: float = 1e-7,
) -> torch.Tensor:
    """Compute 1 - IoU of pairs of boxes, reduced in the same pass; the IoUs themselves are never stored.

    Args:
        kind: "iou", "giou", "diou" or "ciou". The arguments that are not here are those of :func:`bbox_iou`.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or with "none" the tensor ``1 - bbox_iou(...)`` of shape (..., 1); dtype as for :func:`bbox_iou`. Sums are in float32
        (float64 for float64), with the same bits in every run. The mean over no pairs is NaN and their sum 0, as in PyTorch.

    Raises:
        RuntimeError, TypeError: as for :func:`bbox_iou`.
        ValueError: a negative eps, an unknown kind or reduction.
    """
    return torch.ops.torch_fastdet.iou_loss(box1, box2, kind, xywh, reduction, eps)
