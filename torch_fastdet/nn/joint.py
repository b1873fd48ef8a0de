"""Runs convolutions of one input and one kind as one, with the norms and activations behind them in one operator.

A C3 block's ``cv1`` and ``cv2`` read the same tensor, and so do the first blocks for boxes and classes in a level of YOLOv8's head. As one
convolution they read it once, and the gradients that they give it need no sum. This takes their weights in one tensor, which a captured
step makes when it casts them (``rewrites/casts.py``); everywhere else each module runs by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import Context

#: Each joined convolution has this attribute while it is captured: a function that runs all of them on their input. Its result has their
#: channels in a row, or is None if autocast is off.
JOINT = "torch_fastdet_joint"
#: A head has this attribute while it is captured: lists of blocks that read one input.
OF_ONE_INPUT = "torch_fastdet_one_input"

#: Norms that share an operator have these in common: momentum, eps, activation and slope.
Options = tuple[float, float, str, float]


def room_like(like: Tensor, channels: int) -> Tensor:
    """Return an empty tensor of ``channels`` in the memory format of ``like``, and otherwise like it."""
    layout = torch.contiguous_format if like.is_contiguous() else torch.channels_last
    shape = (like.shape[0], channels, *like.shape[2:])
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def buffers_of(norms: list[nn.BatchNorm2d]) -> list[list[Tensor]]:
    """Return the running means and variances of the norms, and the counts of their batches."""
    return [[getattr(n, name) for n in norms] for name in ("running_mean", "running_var", "num_batches_tracked")]


class NormsOfParts(torch.autograd.Function):
    """Compute norms and activations of neighboring channels of x, each into a tensor of its own, behind ``before[i]`` other channels.

    What these channels hold, and their gradient, is left to :class:`NormInto`.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, before: list[int], norms: list[nn.BatchNorm2d], options: Options, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(norms)
        results = [room_like(x, first + norm.num_features) for first, norm in zip(before, norms)]
        places = [result[:, first:] for first, result in zip(before, results)]
        weights, biases = list(parameters[:count]), list(parameters[count:])
        statistics = torch.ops.torch_fastdet.bn_act_parts(x, places, weights, biases, *buffers_of(norms), *options)
        ctx.save_for_backward(x, *statistics, *parameters)
        ctx.before, ctx.sizes, ctx.activation = before, [norm.num_features for norm in norms], options[2:]
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[object, ...]:
        x, mean, invstd, *parameters = ctx.saved_tensors
        count = len(grads)
        given = [grad[:, first:] for first, grad in zip(ctx.before, grads)]
        grad_x, *vectors = torch.ops.torch_fastdet.bn_act_parts_backward(
            given, x, parameters[:count], parameters[count:], mean, invstd, *ctx.activation
        )
        return grad_x, None, None, None, *(part for vector in vectors for part in vector.split(ctx.sizes))


class NormInto(torch.autograd.Function):
    """Compute norm and activation of x, plus ``shortcut``, in the channels of ``room`` from ``first`` on; ``room`` is the result.

    The gradient goes on to ``room`` as it is: who wrote the other channels reads those alone.
    """

    @staticmethod
    def forward(
        ctx: Context,
        room: Tensor,
        first: int,
        x: Tensor,
        norm: nn.BatchNorm2d,
        options: Options,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        place = room.narrow(1, first, x.shape[1])
        statistics = torch.ops.torch_fastdet.bn_act_parts(
            x, [place], [weight], [bias], *buffers_of([norm]), *options, shortcut
        )
        ctx.save_for_backward(x, *statistics, weight, bias)
        ctx.first, ctx.activation, ctx.adds = first, options[2:], shortcut is not None
        ctx.mark_dirty(room)
        return room

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[object, ...]:
        x, mean, invstd, weight, bias = ctx.saved_tensors
        own = grad.narrow(1, ctx.first, x.shape[1])
        grad_x, *vectors = torch.ops.torch_fastdet.bn_act_parts_backward(
            [own], x, [weight], [bias], mean, invstd, *ctx.activation
        )
        return grad, None, grad_x, None, None, own if ctx.adds else None, *vectors


def _sum(parts: tuple[Tensor | None, ...]) -> Tensor:
    """Return the sum of the parts that are there, in this order and in one pass. A part may be a slice of another tensor."""
    given = [part for part in parts if part is not None]
    total = torch.empty_like(given[0])
    torch.ops.torch_fastdet.sum_slices(given, total)
    return total


class NormSplit(torch.autograd.Function):
    """Compute norm and activation of x in the first channels of a tensor of ``channels``, and a copy of their second half, twice.

    Twice, for a shortcut and for what else reads it: the backward pass adds the three gradients at once, in the order in which autograd
    would add them. What the other channels hold is left to :class:`NormInto` and :class:`Keep`.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, channels: int, norm: nn.BatchNorm2d, options: Options, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        room, half = room_like(x, channels), x.shape[1] // 2
        place = room[:, : x.shape[1]]
        statistics = torch.ops.torch_fastdet.bn_act_parts(x, [place], [weight], [bias], *buffers_of([norm]), *options)
        ctx.save_for_backward(x, *statistics, weight, bias)
        ctx.activation = options[2:]
        read = _sum((place[:, half:],))
        return room, read.data, read

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor, *readers: Tensor | None) -> tuple[object, ...]:
        x, mean, invstd, weight, bias = ctx.saved_tensors
        half = x.shape[1] // 2
        given = [grad[:, :half], _sum((grad[:, half : 2 * half], *readers))]
        grad_x, *vectors = torch.ops.torch_fastdet.bn_act_parts_backward(
            given, x, weight.chunk(2), bias.chunk(2), mean, invstd, *ctx.activation
        )
        return grad_x, None, None, None, *vectors


class Keep(torch.autograd.Function):
    """Return ``room`` with a copy of x in its channels from ``first`` on, and x, twice: see :class:`NormSplit`."""

    @staticmethod
    def forward(ctx: Context, room: Tensor, first: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        torch.ops.torch_fastdet.sum_slices([x], room.narrow(1, first, x.shape[1]))
        ctx.place = first, x.shape[1]
        ctx.mark_dirty(room)
        return room, x.data, x.data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor, *readers: Tensor | None) -> tuple[object, ...]:
        return grad, None, _sum((grad.narrow(1, *ctx.place), *readers))


class Twice(torch.autograd.Function):
    """Return x for a shortcut, and for what else reads it: their gradients are added where one of them is a slice, too."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.data, x.data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *readers: Tensor | None) -> Tensor:
        return _sum(readers)
