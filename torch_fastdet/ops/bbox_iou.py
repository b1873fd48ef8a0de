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

    Args:
        box1: boxes of shape (..., 4), in any one unit (pixels, grid cells): centre, width and height with ``xywh``, else
            the corners x1, y1, x2, y2. float16, bfloat16, float32 or float64, on the CPU or a GPU, of any strides.
        box2: as ``box1``; leading dimensions broadcast against those of ``box1``, dtypes may differ.
        xywh: the layout of both.
        GIoU: generalised IoU. Without any of the three, the plain IoU.
        DIoU: distance IoU; takes precedence over GIoU.
        CIoU: complete IoU; takes precedence over both.
        eps: added to the union, to the enclosing box's area and squared diagonal and to the denominator of CIoU's alpha,
            and in xyxy layout to the heights.

    Returns:
        A new tensor of the broadcast leading shape and a last dimension of 1. Its dtype is the promoted one (float16 with
        float32 gives float32); the arithmetic is float32, or float64 where an input is float64, whatever the storage type:
        float16 boxes of thousands of pixels do not overflow. Under autocast, half-precision boxes are first cast to float32
        and the result is float32, as the original CIoU and DIoU are on a GPU; float64 stays float64.

    Gradients reach both boxes, summed over broadcast dimensions in a fixed order (bitwise repeatable). CIoU's alpha is
    a constant in them. Where corners coincide, the two boxes share a corner's gradient half and half, as in PyTorch's
    own minimum and maximum. Unlike with the PyTorch formula, value and gradient stay finite for boxes without width or
    height, and equal boxes never give NaN. (A float16 gradient beyond 65504 is infinite, as always; GradScaler looks
    for it.) NaN coordinates give NaN. There is no second derivative: asking for one raises.

    Raises:
        RuntimeError: a last dimension other than 4, shapes that do not broadcast or do not merge into at most 8 leading dimensions,
            integer, sparse, nested or quantized boxes, tensors on two devices, a tensor of ``torch.inference_mode`` beside one whose
            gradient is recorded.
        ValueError: a negative eps.

    Source: Rezatofighi et al., Generalized Intersection over Union (2019); Zheng et al., Distance-IoU Loss (2020).
    The signature is that of the function of this name in YOLOv5 and Ultralytics.
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
        A scalar, or with "none" the tensor ``1 - bbox_iou(...)`` of shape (..., 1); dtype as for :func:`bbox_iou`, sums in
        float32 (float64 for float64) in an order that depends only on the number of pairs: the same bits in every run.
        The mean over no pairs is NaN and their sum 0, as in PyTorch.

    Raises:
        RuntimeError, TypeError: as for :func:`bbox_iou`.
        ValueError: a negative eps, an unknown kind or reduction.
    """
    return torch.ops.torch_fastdet.iou_loss(box1, box2, kind, xywh, reduction, eps)
