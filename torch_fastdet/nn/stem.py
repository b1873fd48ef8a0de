"""Runs a detector's first convolution, of stride 2 on three channels, as a convolution of stride 1 on sixteen.

YOLOv5 begins with 6x6, stride 2, padding 2, Ultralytics' models with 3x3, stride 2, padding 1. No tensor core takes three
channels. With each square of 2x2 pixels as channels the same sums are a 3x3 or 2x2 convolution of stride 1. The module and its
weight stay as they are; the weight is rearranged in each step, and autograd brings its gradient back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.widened import major

# Maps kernel sizes to paddings.
_SHAPES: dict[tuple[int, ...], tuple[int, ...]] = {(6, 6): (2, 2), (3, 3): (1, 1)}
_CHANNELS = 16  # of the squares: 12, and 4 of zeros; on an H200 half the time of 12
_FORWARD = nn.Conv2d.forward
# This was measured to be faster in these dtypes. In float32 the original convolution runs.
DTYPES = (torch.float16, torch.bfloat16)
DEVICES = ("cuda",)
# stem_conv2d takes these outputs, at most so many pixels of a batch and elements of an image (core::stem_conv_has, stem_conv_fits).
_OUTPUTS, _MOST = range(16, 97, 16), 2**31 - 1


def divided(images: Tensor) -> Tensor:
    """Return ``images.float() / 255``, the same bits in one pass where torch's default dtype has them in float32."""
    return images / 255 if torch.get_default_dtype() == torch.float32 else images.float() / 255


def has_stem_shape(conv: nn.Conv2d) -> bool:
    return (
        conv.in_channels == 3
        and conv.stride == (2, 2)
        and _SHAPES.get(conv.kernel_size) == conv.padding
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
    )


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return what the convolution computes in: autocast's dtype, or that of both tensors."""
    if torch.is_autocast_enabled(x.device.type):
        casts = x.dtype != torch.float64 and weight.dtype != torch.float64
        return torch.get_autocast_dtype(x.device.type) if casts else None
    return x.dtype if x.dtype == weight.dtype else None


def is_stem(conv: nn.Module, x: object, floating: bool = True) -> bool:
    """Return whether ``conv(x)`` is such a convolution, with channels_last weights, in half precision, and unobserved.

    With ``floating=False``, return whether ``conv(x / 255)`` is one, for uint8 images.
    """
    if type(conv) is not nn.Conv2d or not has_stem_shape(conv) or not runs_plainly(conv, _FORWARD):
        return False
    weight = conv.weight
    return (
        type(x) is Tensor
        and x.device.type in DEVICES
        and x.device == weight.device
        and x.dim() == 4
        and x.shape[1] == 3
        and (x.is_floating_point() if floating else x.dtype == torch.uint8)
        and x.numel() > 0
        and x.shape[2] % 2 == 0
        and x.shape[3] % 2 == 0
        # Otherwise the result would have another memory format than the original.
        and weight.is_contiguous(memory_format=torch.channels_last)
        and _dtype(x, weight) in DTYPES
    )


def stem_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (K, 3, k, k) as the (K, 16, n, n) of the squares, channels_last. The result is differentiable."""
    if weight.shape[2] % 2:
        weight = F.pad(weight, (1, 0, 1, 0))  # the first row of an odd kernel is the second one of its squares
    return ops.space_to_depth(weight, _CHANNELS, dtype=dtype)


def _has_kernel(conv: nn.Conv2d, squares: Tensor) -> bool:
    """Return whether ``stem_conv2d`` takes the squares; it has no gradient of them, and no bias."""
    outputs, pixels = conv.weight.shape[0], squares.shape[2] * squares.shape[3]
    return (
        conv.bias is None
        and outputs in _OUTPUTS
        and squares.shape[0] * pixels <= _MOST
        and outputs * pixels <= _MOST
        and squares.dtype in (torch.float16, torch.bfloat16)
        and not squares.requires_grad
        and major(squares.device) >= 8  # its tensor cores
    )


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return ``conv(x)``; compute a stem by way of its squares.

    On GPUs of compute capability 8.0 and newer ``stem_conv2d`` convolves them, where it has a kernel: 16, 32, ... 96 outputs, no bias,
    images without a gradient, and fewer than 2^31 pixels. Otherwise cuDNN does. ``stem_conv2d`` has no second derivative.
    """
    return convolve_squares(conv, x) if is_stem(conv, x) else conv(x)


def convolve_squares(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return :func:`convolve` where :func:`is_stem` said yes."""
    dtype = _dtype(x, conv.weight) or x.dtype
    border = conv.kernel_size[0] % 2 == 1
    squares, weight = ops.space_to_depth(x, _CHANNELS, border, dtype), stem_weight(conv.weight, dtype)
    if _has_kernel(conv, squares):
        return ops.stem_conv2d(squares, weight)
    return F.conv2d(squares, weight, conv.bias, padding=0 if border else 1)
