"""Autocast's casts of a model's weights, all of them in a few launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet._private import foreach_copy_, runs_plainly
from torch_fastdet.stem import has_stem_shape

_FORWARD = nn.Conv2d.forward


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` with ``other``'s strides where the two lie alike: a dimension of one element has any stride."""
    alike = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), other.stride(), tensor.shape))
    return tensor.as_strided(other.shape, other.stride()) if alike else tensor


def _cast(tensors: list[Tensor], likes: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    targets = [torch.empty_like(like, dtype=dtype, requires_grad=False) for like in likes]
    if targets:
        foreach_copy_(targets, [_like(tensor, like) for tensor, like in zip(tensors, likes)])
    return targets


class _CastAll(torch.autograd.Function):
    """All tensors in another dtype. Their gradients come back in theirs, together, once the last is there."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.likes = [tensor.detach() for tensor in tensors]  # sizes and strides; the parameters are there anyway
        return tuple(_cast(ctx.likes, ctx.likes, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [i for i, grad in enumerate(grads) if grad is not None]
        likes = [ctx.likes[i] for i in given]
        cast = _cast([grads[i] for i in given], likes, torch.float32)  # type: ignore[misc]
        result: list[Tensor | None] = [None] * len(grads)
        for i, grad in zip(given, cast):
            result[i] = grad
        return (None, *result)


def _takes_cast(conv: nn.Module) -> bool:
    """Whether ``conv`` is torch's own convolution with float32 parameters, so that autocast casts them and nothing sees it."""
    if type(conv) is not nn.Conv2d or not runs_plainly(conv, _FORWARD):
        return False
    if conv.padding_mode != "zeros" or has_stem_shape(conv):
        return False
    parameters = list(conv._parameters.values())
    return all(p is None or (p.dtype == torch.float32 and p.device == conv.weight.device) for p in parameters)


@contextlib.contextmanager
def weights_cast_once(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """While inside, convolutions take copies of their parameters in autocast's dtype, which one function made at the start.

    Autocast casts each weight and each gradient by itself, in two launches a layer, of a microsecond of work each. The
    values are those of autocast with its cache. Only what the convolution itself reads is replaced: ``conv.weight`` stays the parameter. The stem,
    which has a cast of its own, is left alone.
    """
    convs = [module for module in model.modules() if _takes_cast(module)] if dtype is not None else []
    if dtype is None or not convs:
        yield
        return
    parameters = list(dict.fromkeys(p for conv in convs for p in conv._parameters.values() if p is not None))
    trained = [p for p in parameters if p.requires_grad]
    frozen = [p.detach() for p in parameters if not p.requires_grad]
    cast: dict[nn.Parameter, Tensor] = dict(zip(trained, _CastAll.apply(dtype, *trained)))
    cast.update(zip([p for p in parameters if not p.requires_grad], _cast(frozen, frozen, dtype)))
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
        return F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)

    return forward
