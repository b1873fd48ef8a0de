"""Convolutions of one input and one kind as one convolution, with the norms and activations behind them in one operator.

A C3 block's ``cv1`` and ``cv2`` read the same tensor. As one convolution they read it once, and the gradients that they give it need no
sum. This takes their weights in one tensor, which a captured step makes when it casts them (``graphs/_casts.py``); everywhere else
each module runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: The first of such convolutions -> all of them at once, along the channels; None where autocast is off. Filled during a capture.
JOINED: dict[nn.Module, Callable[[Tensor], Tensor | None]] = {}

#: What norms that share an operator have in common: momentum, eps, activation and slope.
Options = tuple[float, float, str, float]


def _empty(like: Tensor, channels: int) -> Tensor:
    layout = torch.contiguous_format if like.is_contiguous() else torch.channels_last
    shape = (like.shape[0], channels, *like.shape[2:])
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _buffers(norms: list[Any]) -> list[list[Tensor]]:
    return [[getattr(n, name) for n in norms] for name in ("running_mean", "running_var", "num_batches_tracked")]


def _parameters(norms: list[Any]) -> list[Tensor]:
    return [n.weight for n in norms] + [n.bias for n in norms]


class _Parts(torch.autograd.Function):
    """Norms and activations of neighbouring channels of x, each into a tensor of its own, behind ``before[i]`` other channels.

    What these channels hold, and their gradient, is left to :class:`_Into`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, before: list[int], norms: list[Any], options: Options, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(norms)
        results = [_empty(x, first + norm.num_features) for first, norm in zip(before, norms)]
        places = [result[:, first:] for first, result in zip(before, results)]
        weights, biases = list(parameters[:count]), list(parameters[count:])
        statistics = torch.ops.torch_fastdet.bn_act_parts(x, places, weights, biases, *_buffers(norms), *options)
        ctx.save_for_backward(x, *statistics, *parameters)
        ctx.before, ctx.sizes, ctx.activation = before, [norm.num_features for norm in norms], options[2:]
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, mean, invstd, *parameters = ctx.saved_tensors
        count = len(grads)
        given = [grad[:, first:] for first, grad in zip(ctx.before, grads)]
        grad_x, *vectors = torch.ops.torch_fastdet.bn_act_parts_backward(
            given, x, parameters[:count], parameters[count:], mean, invstd, *ctx.activation
        )
        return grad_x, None, None, None, *(part for vector in vectors for part in vector.split(ctx.sizes))


class _Into(torch.autograd.Function):
    """Norm and activation of x, plus ``shortcut``, in the first channels of ``room``, which is the result.

    The gradient goes on to ``room`` as it is: who wrote the other channels reads those alone.
    """

    @staticmethod
    def forward(
        ctx: Any, room: Tensor, x: Tensor, norm: Any, options: Options, shortcut: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        weights, biases = list(parameters[:1]), list(parameters[1:])
        statistics = torch.ops.torch_fastdet.bn_act_parts(
            x, [room[:, : x.shape[1]]], weights, biases, *_buffers([norm]), *options, shortcut
        )
        ctx.save_for_backward(x, *statistics, *parameters)
        ctx.activation, ctx.adds = options[2:], shortcut is not None
        ctx.mark_dirty(room)
        return room

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, mean, invstd, weight, bias = ctx.saved_tensors
        own = grad[:, : x.shape[1]]
        grad_x, *vectors = torch.ops.torch_fastdet.bn_act_parts_backward(
            [own], x, [weight], [bias], mean, invstd, *ctx.activation
        )
        return grad, grad_x, None, None, own if ctx.adds else None, *vectors


def norms_and_activations_of_parts(
    x: Tensor, norms: list[Any], options: Options, before: list[int]
) -> tuple[Tensor, ...]:
    """Each norm with its activation on its channels of x, in the last channels of a tensor with ``before[i]`` channels in front.

    Those are not written: see :func:`norm_and_activation_into`.
    """
    return _Parts.apply(x, before, norms, options, *_parameters(norms))


def norm_and_activation_into(room: Tensor, x: Tensor, norm: Any, options: Options, shortcut: Tensor | None) -> Tensor:
    """``room`` with norm and activation of x, plus ``shortcut``, in its first channels."""
    return _Into.apply(room, x, norm, options, shortcut, *_parameters([norm]))
