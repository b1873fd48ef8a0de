"""Turns squares of 2x2 pixels into channels, which makes a strided convolution on few channels a dense one on more."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def space_to_depth(x: Tensor, channels: int, border: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``F.pixel_unshuffle(x, 2)`` with further channels of zeros, in another dtype and channels_last.

    A convolution of stride 2 on x is one of stride 1 on the result, whose weights are the same numbers in another order.
    Tensor cores want channels in multiples of eight, so the result may have more channels than 4C; they are zero.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64, of any strides. H and W are even. Or uint8, which counts as ``x / 255``.
        channels: of the result, at least 4C.
        border: also make a first row and a first column of zeros, for a kernel of odd size.
        dtype: of the result; x's by default. Values are rounded once, those of ``x / 255`` once more, as torch does.

    Returns:
        (N, channels, H / 2 + border, W / 2 + border), channels_last. Channel 4c + 2i + j of pixel (h, w) is channel c of x's
        pixel (2h + i, 2w + j), counted from behind the border.

    The gradient is one launch too, in x's dtype and in the memory format of the incoming one. There are gradients of any order.

    Raises:
        RuntimeError: x is not four-dimensional, not dense, neither floating nor uint8, its height or width is odd, or ``channels`` is
            less than 4C.

    Behavior: ``Focus`` in the stem of YOLOv5, and of the 6x6 convolution that took its place.
    """
    return torch.ops.torch_fastdet.space_to_depth(x, channels, border, dtype)
