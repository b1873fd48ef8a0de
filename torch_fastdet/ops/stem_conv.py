"""Computes the convolution that a detector's first layer is on squares of pixels, on tensor cores."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def stem_conv2d(squares: Tensor, weight: Tensor) -> Tensor:
    """Compute ``F.conv2d(squares, weight, padding=weight.shape[2] // 3)`` on sixteen channels. Only ``weight`` gets a gradient.

    A kernel of 3x3 has a padding of 1, one of 2x2 none. Forward is one launch, the weight's gradient two: blocks leave partial
    sums, which are added up in a fixed order. Results are bitwise reproducible on one GPU model.

    Args:
        squares: (N, 16, H, W), float16 or bfloat16 on a GPU, float16, bfloat16, float32 or float64 on the CPU, as
            :func:`space_to_depth` makes them. channels_last is read in place; other strides are copied.
        weight: (K, 16, 2, 2) or (K, 16, 3, 3) of the same dtype, where K is 16, 32, 48, 64, 80 or 96.

    Returns:
        (N, K, H, W), or (N, K, H - 1, W - 1) for 2x2, of the same dtype, under autocast too, channels_last. Sums are float32
        (float64 for float64), rounded once.

    The result is once differentiable by the weight. The gradient has the weight's dtype and is channels_last.

    Raises:
        ValueError: the backward operator's kernel_size is not 2 or 3.
        RuntimeError: a shape, dtype, device or layout is another, squares requires a gradient, a second derivative is asked
            for, the GPU has a compute capability below 8.0, or an image of the result has 2^31 elements or more.

    Behavior: the first ``Conv`` of YOLOv5 (6x6, stride 2) and of Ultralytics' models (3x3, stride 2).
    """
    return torch.ops.torch_fastdet.stem_conv2d(squares, weight)
