"""Writes max poolings of max poolings into one concatenation."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def max_pools_cat(x: Tensor, kernel_size: int = 5, pools: int = 3) -> Tensor:
    """Compute ``torch.cat([x, p(x), p(p(x)), ...], 1)``, where ``p`` is ``nn.MaxPool2d(kernel_size, 1, kernel_size // 2)``.

    Each pooling takes one launch forward and one backward, and writes its part of the result, so nothing is concatenated.
    One byte for each pooled value is kept for the backward pass. Of equal values in a window the first gets the gradient, of
    NaNs the last, as in MaxPool2d. Gradients are summed in float32 (float64 for float64) in a fixed order, for
    the same bits in every run.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64. Slices and other views are read in place.
        kernel_size: odd, at most 15.
        pools: how many poolings, 1 or more.

    Returns:
        (N, (pools + 1) * C, H, W) of x's dtype, under autocast too, in the memory format that x suggests.

    The result is once differentiable by x. The gradient has the memory format of the result.

    Raises:
        ValueError: kernel_size is even or more than 15, or pools is less than 1.
        RuntimeError: x is not four-dimensional, not floating or not dense, or a second derivative is asked for.

    Behavior: ``SPPF`` of YOLOv5 and Ultralytics.
    """
    return torch.ops.torch_fastdet.max_pools_cat(x, kernel_size, pools)[0]
