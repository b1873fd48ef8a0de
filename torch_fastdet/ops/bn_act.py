"""Computes BatchNorm2d in training and the activation behind it as one operator, also several into one concatenation.

In evaluation the norm is a scale and a bias, or part of the convolution before it.
"""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def bn_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "silu",
    slope: float = 0.01,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``residual + act(batch_norm(x))`` with the batch's statistics, and update the running ones in place.

    It takes two launches forward and two backward, without a host sync, and keeps x and two values a channel for the backward pass. Nothing
    is rounded between the norm and the activation. Sums are in float32 (float64 for float64) and in a fixed order: the same bits in every
    run on one GPU.

    Args:
        x: (N, C, H, W), the convolution's output; float16, bfloat16, float32 or float64. Contiguous and channels_last tensors and slices of
            them along the channels are read in place; others are made contiguous in the result's memory format first.
        weight: (C,), of any of these dtypes, or None for 1.
        bias: (C,), or None for 0.
        running_mean: (C,), updated in place as BatchNorm2d does, or None.
        running_var: (C,), the same; updated with the unbiased variance.
        num_batches_tracked: one int64 on x's device, to which 1 is added, or None.
        momentum: the weight of the batch in the running statistics.
        eps: added to the variance.
        activation: "silu", "relu", "leaky_relu", "hardswish" or "identity".
        slope: LeakyReLU's, for negative values.
        residual: of x's shape and dtype, added to the result, or None.

    Returns:
        (N, C, H, W) of x's dtype, under autocast too, in the memory format that x suggests. Gradients reach x, weight, bias and residual;
        there is no second derivative.

    Raises:
        ValueError: a channel has one value (a batch of one and 1x1 maps), in the original words.
        RuntimeError: an argument has another shape, dtype or device than wanted, or a second derivative is asked for.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; ``Conv`` of YOLOv5 and Ultralytics.
    """
    of_batches = running_mean, running_var, num_batches_tracked
    options = momentum, eps, activation, slope, residual
    return torch.ops.torch_fastdet.bn_act(x, weight, bias, *of_batches, *options)[0]


@checked
def bn_act_cat(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor],
    running_mean: list[Tensor],
    running_var: list[Tensor],
    num_batches_tracked: list[Tensor],
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "silu",
    slope: float = 0.01,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``torch.cat([bn_act(x[0], ..., residual=residual), bn_act(x[1], ...), ...], 1)`` without copies.

    Each part is :func:`bn_act`, which explains the options and errors, and writes into its channels of the result. On a GPU this is fast where
    the channels before each part fill whole vectors of 16 bytes.

    Args:
        x: tensors (N, C_i, H, W), one or more, of one dtype on one device; C_i may differ. The next five are lists with an entry for each.
        running_mean: or an empty list, as the next two.
        residual: of the shape and dtype of ``x[0]``, added to the first part, or None.

    Returns:
        (N, sum of C_i, H, W) of x's dtype, channels_last where all of x are, otherwise contiguous, as torch.cat.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; ``C3`` of YOLOv5 and Ultralytics.
    """
    if len(x) == 0:
        raise RuntimeError("bn_act_cat: x is an empty list, but one tensor or more is expected")
    of_batches = running_mean, running_var, num_batches_tracked
    options = momentum, eps, activation, slope, residual
    return torch.ops.torch_fastdet.bn_act_cat(x, weight, bias, *of_batches, *options)[0]


@checked
def bias_act(
    x: Tensor,
    bias: Tensor | None,
    activation: str = "silu",
    slope: float = 0.01,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    weight: Tensor | None = None,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``residual + act(x + bias)`` without a gradient, in one launch that reads x once and writes the result once.

    With ``mean`` and ``variance`` it is ``residual + act(batch_norm(x))`` as in evaluation. A convolution without its
    bias, with this in place behind it, is what a detector's block computes once its norm is fused. Nothing is rounded
    in between. The host does not wait, and a CUDA graph can capture it.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64, contiguous or channels_last. The convolution's output.
        bias: (C,), of any of these dtypes, or None for 0.
        activation: "silu", "relu", "leaky_relu", "hardswish" or "identity".
        slope: LeakyReLU's, for negative values.
        residual: of x's shape and dtype, added to the result, or None.
        out: where the result goes: x itself, channels of a larger tensor in x's memory format, or None for a new tensor.
        weight: (C,), the norm's weight, by which x is multiplied, or None for 1.
        mean: (C,), the norm's running mean, or None for 0.
        variance: (C,), the norm's running variance, or None, where nothing is divided.
        eps: added to the variance.

    Returns:
        ``out``, or (N, C, H, W) of x's dtype in the memory format that x suggests. It requires no grad.

    The CPU has the operator too, for tests and tracing; it is not faster than the original there.

    Raises:
        RuntimeError: an argument has another shape, dtype, layout or device than wanted.
        ValueError: the activation is not known.
        TypeError: an argument is not a tensor, or not None where that is allowed.
    """
    if out is None:
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        out = torch.empty_like(x, memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    torch.ops.torch_fastdet.bias_act(x, out, weight, bias, mean, variance, eps, activation, slope, residual)
    return out
