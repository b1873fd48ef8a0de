"""Autocast's casts of a model's weights, all of them in a few launches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet._torch.private import foreach_copy_, runs_plainly
from torch_fastdet.layers.stem import has_stem_shape

_FORWARD = nn.Conv2d.forward
_GROUP = 8  # channels that cuDNN's kernels take at once
# Where zeros behind the outputs of a convolution were measured to be faster than what cuDNN does by itself.
PADDED_DEVICES = ("cuda",)
LEAST_PADDED = 64


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` with ``other``'s strides where the two lie alike: a dimension of one element has any stride."""
    alike = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), other.stride(), tensor.shape))
    return tensor.as_strided(other.shape, other.stride()) if alike else tensor


def _cast(tensors: list[Tensor], likes: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    targets = [torch.empty_like(like, dtype=dtype, requires_grad=False) for like in likes]
    if targets:
        foreach_copy_(targets, [_like(tensor, like) for tensor, like in zip(tensors, likes)])
    return targets


def _room(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Like ``like`` in another dtype, with ``rows`` rows, of which those behind ``like``'s own are zeros."""
    if rows == like.shape[0]:
        return torch.empty_like(like, dtype=dtype)
    layout = torch.channels_last if like.dim() == 4 else torch.contiguous_format
    shape = (rows, *like.shape[1:])
    room = torch.empty(shape, dtype=dtype, device=like.device, memory_format=layout)
    room[like.shape[0] :].zero_()
    return room


def _cast_into_rooms(tensors: list[Tensor], rows: list[int], dtype: torch.dtype) -> list[Tensor]:
    rooms = [_room(tensor, count, dtype) for tensor, count in zip(tensors, rows)]
    if rooms:
        places = [room[: tensor.shape[0]] for room, tensor in zip(rooms, tensors)]
        foreach_copy_(places, [_like(tensor, place) for tensor, place in zip(tensors, places)])
    return rooms


class _CastAll(torch.autograd.Function):
    """All tensors in another dtype, some with rows of zeros behind theirs. Their gradients come back in their own dtype,
    together, once the last is there."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, rows: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.likes = [tensor.detach() for tensor in tensors]  # sizes and strides; the parameters are there anyway
        return tuple(_cast_into_rooms(ctx.likes, rows, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [i for i, grad in enumerate(grads) if grad is not None]
        likes = [ctx.likes[i] for i in given]
        cast = _cast([grads[i][: ctx.likes[i].shape[0]] for i in given], likes, torch.float32)  # type: ignore[index]
        result: list[Tensor | None] = [None] * len(grads)
        for i, grad in zip(given, cast):
            result[i] = grad
        return (None, None, *result)


class _FirstChannels(torch.autograd.Function):
    """The first channels of a channels_last tensor, in its memory. Backward, one pass writes the gradient of all its channels."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, channels: int) -> Tensor:
        ctx.shape = y.shape
        return y[:, :channels].data  # to autograd no view, which an activation in place could not change

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        channels = grad.shape[1]
        whole = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        whole[:, :channels].copy_(grad)
        whole[:, channels:].zero_()
        return whole, None


def _takes_rows(conv: Any) -> bool:
    """Whether rows of zeros behind the weights of this convolution spare cuDNN copies.

    Its tensor-core kernels write channels_last results in groups of eight channels. YOLOv5's heads have 255: cuDNN copies their
    results once and their gradients twice. With 256 one copy of the gradients is left.
    """
    return (
        conv.weight.device.type in PADDED_DEVICES
        and conv.out_channels > LEAST_PADDED
        and conv.out_channels % _GROUP != 0
        and conv.in_channels % _GROUP == 0
        and conv.groups == 1
        and conv.weight.is_contiguous(memory_format=torch.channels_last)
    )


def _rows(convs: list[Any]) -> dict[nn.Parameter, int]:
    """Each parameter's number of rows in its copy."""
    uses = Counter(p for conv in convs for p in conv._parameters.values() if p is not None)
    rows = {parameter: parameter.shape[0] for parameter in uses}
    for conv in filter(_takes_rows, convs):
        parameters = [p for p in conv._parameters.values() if p is not None]
        if all(uses[p] == 1 for p in parameters):
            rows.update(dict.fromkeys(parameters, -(-conv.out_channels // _GROUP) * _GROUP))
    return rows


def _takes_cast(conv: nn.Module) -> bool:
    """Whether ``conv`` is torch's own convolution with float32 parameters, so that autocast casts them and nothing sees it."""
    if type(conv) is not nn.Conv2d or not runs_plainly(conv, _FORWARD):
        return False
    if conv.padding_mode != "zeros" or has_stem_shape(conv):
        return False
    if conv._parameters.get("weight") is None:  # somebody keeps the weight elsewhere
        return False
    parameters = list(conv._parameters.values())
    return all(p is None or (p.dtype == torch.float32 and p.device == conv.weight.device) for p in parameters)


@contextlib.contextmanager
def weights_cast_once(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """While inside, convolutions take copies of their parameters in autocast's dtype, which one function made at the start.

    Autocast casts each weight and each gradient by itself, in two launches a layer, of a microsecond of work each. The
    values are those of autocast with its cache. Only what the convolution itself reads is replaced: ``conv.weight`` stays the parameter. The stem,
    which has a cast of its own, is left alone. Copies of weights with 255 rows get another one of zeros (:func:`_takes_rows`); the
    result is the first 255 channels.
    """
    convs = [module for module in model.modules() if _takes_cast(module)] if dtype is not None else []
    if dtype is None or not convs:
        yield
        return
    rows = _rows(convs)
    trained, frozen = ([p for p in rows if p.requires_grad is wanted] for wanted in (True, False))
    cast = dict(zip(trained, _CastAll.apply(dtype, [rows[p] for p in trained], *trained)))
    cast.update(zip(frozen, _cast_into_rooms([p.detach() for p in frozen], [rows[p] for p in frozen], dtype)))
    try:
        for conv in convs:
            conv.forward = _forward_of(conv, cast, dtype)
        yield
    finally:
        for conv in convs:
            conv.__dict__.pop("forward", None)


def _forward_of(conv: Any, cast: dict[nn.Parameter, Tensor], dtype: torch.dtype) -> Any:
    weight, bias = cast[conv.weight], None if conv.bias is None else cast[conv.bias]

    def forward(x: Tensor) -> Tensor:
        device = x.device.type
        # The model may have switched autocast off, or to another dtype, around this layer.
        if (
            not torch.is_autocast_enabled(device)
            or torch.get_autocast_dtype(device) != dtype
            or x.dtype == torch.float64
        ):
            return _FORWARD(conv, x)
        y = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        return y if y.shape[1] == conv.out_channels else _FirstChannels.apply(y, conv.out_channels)

    return forward
