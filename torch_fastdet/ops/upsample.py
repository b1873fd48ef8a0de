"""Upsamples by 2 to the nearest neighbor, by itself and straight into a concatenation."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def upsample_nearest2x(x: Tensor) -> Tensor:
    """Double height and width, each value repeated in a 2x2 square: ``nn.Upsample(None, 2, "nearest")``.

    It takes one launch forward and one backward. The gradient of an element is the sum of its 2x2 square in a fixed order, in float32
    (float64 for float64): the same bits in every run. There are gradients of any order.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64. Tensors with adjacent channels or adjacent rows are read in place; others are
            first made contiguous in the output's memory format.

    Returns:
        (N, C, 2H, 2W) of x's dtype, under autocast too, in the memory format that x suggests.

    Raises:
        RuntimeError: x is not four-dimensional, not floating or not a dense tensor.

    Source: the definition of nearest-neighbor interpolation at scale 2, https://pytorch.org/docs/stable/generated/torch.nn.Upsample.html
    """
    return torch.ops.torch_fastdet.upsample_nearest2x(x)


@checked
def upsample_nearest2x_cat(x: Tensor, skip: Tensor) -> Tensor:
    """Compute ``torch.cat([upsample_nearest2x(x), skip], 1)`` in one launch: x is upsampled straight into the result.

    Backward is one launch, which reads x's part of the gradient in place; the gradient of skip is a view of its channels. There are gradients
    of any order.

    Args:
        x: (N, C1, H, W), float16, bfloat16, float32 or float64. It and skip are read in place if their innermost dimension in the result's
            memory format has stride 1, and else made contiguous first.
        skip: (N, C2, 2H, 2W) on the same device. Different dtypes are promoted, as torch.cat does; the narrower one is converted first.

    Returns:
        (N, C1 + C2, 2H, 2W), channels_last where both x and skip are, otherwise contiguous.

    Raises:
        RuntimeError: an argument is not four-dimensional, not floating or not dense, skip does not fit 2x the size of x, or
            the two are on different devices.

    Behavior: ``Upsample`` and ``Concat`` in the neck of YOLOv5 and of YOLOv3 before it.
    """
    return torch.ops.torch_fastdet.upsample_nearest2x_cat(x, skip)
