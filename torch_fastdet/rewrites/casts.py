"""Runs autocast's casts of all of a model's weights in a few launches."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet._torch.private import Context, foreach_copy_, foreach_zero_, runs_plainly
from torch_fastdet.nn.forwards import convolutions_of_one_input, is_used
from torch_fastdet.nn.joint import JOINT
from torch_fastdet.nn.stem import has_stem_shape
from torch_fastdet.nn.widened import WIDENED, is_slow
from torch_fastdet.rewrites.rewrite import Changes, Rewrite

_FORWARD = nn.Conv2d.forward
_LINEAR = nn.Linear.forward
Layer = nn.Conv2d | nn.Linear
_GROUP = 8  # channels that cuDNN's kernels take at once
# On these devices, zeros behind the outputs of a convolution were measured to be faster than the copies that cuDNN makes.
PADDED_DEVICES = ("cuda",)
LEAST_PADDED = 64


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``tensor`` with ``other``'s strides where the two lie alike: a dimension of one element has any stride."""
    alike = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), other.stride(), tensor.shape))
    return tensor.as_strided(other.shape, other.stride()) if alike else tensor


@dataclass(frozen=True)
class _Room:
    """Keep a tensor of ``rows`` rows for copies of some tensors, one behind the other, and zeros behind them."""

    members: tuple[Tensor, ...]
    rows: int

    @property
    def used(self) -> int:
        return sum(member.shape[0] for member in self.members)

    def places(self, room: Tensor) -> list[Tensor]:
        """Return each member's rows of ``room``."""
        return list(room[: self.used].split([member.shape[0] for member in self.members]))

    def new(self, dtype: torch.dtype) -> Tensor:
        like = self.members[0]
        if self.rows == like.shape[0]:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        shape = (self.rows, *like.shape[1:])
        if self.used == self.rows:
            return torch.empty_strided(shape, like.stride(), dtype=dtype, device=like.device)
        layout = torch.channels_last if like.dim() == 4 else torch.contiguous_format
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=layout)


_Cast = dict[Tensor, tuple[_Room, Tensor]]  # the room of each parameter, and the tensor that holds its copy


def _cast_into_rooms(rooms: list[_Room], dtype: torch.dtype) -> list[Tensor]:
    made = [room.new(dtype) for room in rooms]
    rests = [tensor[room.used :] for room, tensor in zip(rooms, made) if room.used < room.rows]
    if rests:
        foreach_zero_(rests)
    places = [place for room, tensor in zip(rooms, made) for place in room.places(tensor)]
    members = [member.detach() for room in rooms for member in room.members]
    if places:
        foreach_copy_(places, [_like(tensor, place) for tensor, place in zip(members, places)])
    return made


class _CastAll(torch.autograd.Function):
    """Return all tensors in another dtype, in rooms. Their gradients come back in their own dtype, together, once the last is there."""

    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, rooms: list[_Room], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Only their sizes and strides are needed.
        ctx.rooms = [_Room(tuple(m.detach() for m in room.members), room.rows) for room in rooms]
        return tuple(_cast_into_rooms(rooms, dtype))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(room, grad) for room, grad in zip(ctx.rooms, grads) if grad is not None]
        likes = [member for room, _ in given for member in room.members]
        parts = [part for room, grad in given for part in room.places(grad)]
        made = [torch.empty_like(like, dtype=torch.float32) for like in likes]
        if made:
            foreach_copy_(made, [_like(part, like) for part, like in zip(parts, likes)])
        cast = iter(made)
        result = [None if grad is None else next(cast) for room, grad in zip(ctx.rooms, grads) for _ in room.members]
        return (None, None, *result)


class _FirstChannels(torch.autograd.Function):
    """Return the first channels of a channels_last tensor, in its memory. Backward, one pass writes the gradient of all its channels."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, channels: int) -> Tensor:
        ctx.channels = y.shape[1]
        return y[:, :channels].data  # to autograd no view, which an activation in place could not change

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.torch_fastdet.pad_and_sum(grad, ctx.channels)[0], None


@contextlib.contextmanager
def _parts_added_in_float32() -> Iterator[None]:
    """Let cuBLAS add the parts of a half-precision product in float32 while inside, as cuDNN does in a convolution."""
    settings: Any = torch.backends.cuda.matmul
    fp16, bf16 = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    fp16_split = settings.allow_fp16_reduced_precision_reduction_split_k
    bf16_split = settings.allow_bf16_reduced_precision_reduction_split_k
    try:
        settings.allow_fp16_reduced_precision_reduction = False, fp16_split
        settings.allow_bf16_reduced_precision_reduction = False, bf16_split
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = fp16, fp16_split
        settings.allow_bf16_reduced_precision_reduction = bf16, bf16_split


class _Pointwise(torch.autograd.Function):
    """Return the first ``channels`` channels of a 1x1 convolution with a bias, of channels_last tensors.

    This is a matrix product that adds the bias before it rounds: torch's convolution adds it in a pass of its own. Backward, the pass that
    lays out the gradient for the convolution's two gradients makes the bias' gradient too.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor, channels: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.permute(0, 2, 3, 1).flatten(0, 2)
        with _parts_added_in_float32():
            y = torch.addmm(bias, rows, weight.flatten(1).t())
        y = y.view(x.shape[0], x.shape[2], x.shape[3], weight.shape[0]).permute(0, 3, 1, 2)
        return y[:, :channels].data  # to autograd no view, which an activation in place could not change

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[object, ...]:
        x, weight = ctx.saved_tensors
        whole, bias = torch.ops.torch_fastdet.pad_and_sum(grad, weight.shape[0])
        wanted = [*ctx.needs_input_grad[:2], False]
        shape = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(whole, x, weight, None, *shape, wanted)
        return grad_x, grad_weight, bias, None


class _Linear(torch.autograd.Function):
    """Return ``F.linear(x, weight, bias)``, whose bias' gradient is one operator's: torch's reduction of rows takes three times as long."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad.view(1, -1)
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad
        return (
            (rows @ weight).view(x.shape) if x_wanted else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if weight_wanted else None,
            torch.ops.torch_fastdet.sum_rows(rows) if bias_wanted else None,
        )


def _takes_rows(conv: nn.Conv2d) -> bool:
    """Return whether rows of zeros behind the weights of this convolution spare cuDNN copies.

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


def _rooms(layers: list[Layer], joined: list[list[nn.Conv2d]], dtype: torch.dtype, widens: bool) -> list[_Room]:
    """Return a room for each parameter, and one for the weights of each group of ``joined``.

    ``widens`` is whether convolutions may add in another order, as those of :func:`is_slow` do.
    """
    uses = Counter(p for layer in layers for p in layer._parameters.values() if p is not None)
    rows = {parameter: parameter.shape[0] for parameter in uses}
    for conv in (layer for layer in layers if type(layer) is nn.Conv2d):
        parameters = [p for p in conv._parameters.values() if p is not None]
        slow = widens and is_slow(conv, dtype)
        if (slow or _takes_rows(conv)) and all(uses[p] == 1 for p in parameters):
            rows.update(dict.fromkeys(parameters, WIDENED if slow else -(-conv.out_channels // _GROUP) * _GROUP))
    together = [
        _Room(weights, sum(w.shape[0] for w in weights)) for weights in (tuple(c.weight for c in g) for g in joined)
    ]
    taken = {weight for room in together for weight in room.members}
    return together + [_Room((parameter,), count) for parameter, count in rows.items() if parameter not in taken]


def _kind(conv: nn.Conv2d) -> tuple[object, ...]:
    """Return what convolutions without groups and biases have in common that can be one; but for the number of outputs."""
    weight = conv.weight
    return conv.stride, conv.padding, conv.dilation, weight.shape[1:], weight.stride()


def _joined(model: nn.Module, convs: list[nn.Conv2d]) -> Iterator[list[nn.Conv2d]]:
    """Yield groups of those of these convolutions that always read one input and can be one convolution."""
    uses = Counter(conv.weight for conv in convs)
    pairs = list(convolutions_of_one_input(model))
    blocks = Counter(conv for group in pairs for conv in group)  # a convolution may be part of several
    for group in pairs:
        able = [
            conv
            for conv in group
            if conv in convs
            and uses[conv.weight] == blocks[conv] == 1
            and conv.out_channels % _GROUP == 0
            and conv.bias is None
            and conv.groups == 1
            and conv.weight.requires_grad
            and conv.weight.stride(0) == conv.weight[0].numel()
        ]
        alike = max(([conv for conv in able if _kind(conv) == _kind(one)] for one in able), key=len, default=[])
        if len(alike) > 1:
            yield alike


def _takes_cast(layer: nn.Module) -> TypeGuard[Layer]:
    """Return whether ``layer`` is one of torch's own with float32 parameters, so that autocast casts them and nothing sees it."""
    if type(layer) is nn.Conv2d:
        if not runs_plainly(layer, _FORWARD) or layer.padding_mode != "zeros" or has_stem_shape(layer):
            return False
    elif type(layer) is not nn.Linear or not runs_plainly(layer, _LINEAR):
        return False
    weight, parameters = layer._parameters.get("weight"), layer._parameters.values()
    return weight is not None and all(  # somebody may keep it elsewhere
        p is None or (p.dtype == torch.float32 and p.device == weight.device) for p in parameters
    )


@partial(Rewrite, "autocast's casts of all weights are one launch, and convolutions of one input are one", ())
def weight_casts(model: nn.Module, dtype: torch.dtype | None = None) -> Changes:
    """Let convolutions and linear layers take copies of their parameters in autocast's dtype, which one function made at the start.

    Autocast casts each weight and each gradient by itself, in two launches a layer, of a microsecond of work each. The
    values are those of autocast with its cache. Only what the layer itself reads is replaced: ``conv.weight`` stays the parameter. The stem,
    which has a cast of its own, is left alone. Copies of weights with 255 rows get another one of zeros (:func:`_takes_rows`); the
    result is the first 255 channels.

    With ``bn_act_optim``, copies of 48 rows may get 16 more (:mod:`torch_fastdet.nn.widened`), 1x1 convolutions with a bias are matrix
    products (:class:`_Pointwise`), linear layers sum their biases' gradients by an operator (:class:`_Linear`), and convolutions that
    always read one input have their copies in one tensor, so that blocks can run them as one (:data:`torch_fastdet.nn.joint.JOINT`).
    ``dtype`` is that of autocast; None where it is off.
    """
    layers = [module for module in model.modules() if _takes_cast(module)]
    if dtype is None or not layers:
        return
    convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    joined = list(_joined(model, convs))
    products = is_used(model)
    rooms = _rooms(layers, joined, dtype, products)
    trained, frozen = ([r for r in rooms if r.members[0].requires_grad is wanted] for wanted in (True, False))
    made = [
        *_CastAll.apply(dtype, trained, *[p for room in trained for p in room.members]),
        *_cast_into_rooms(frozen, dtype),
    ]
    cast = {p: (room, tensor) for room, tensor in zip(trained + frozen, made) for p in room.members}
    for layer in layers:
        if isinstance(layer, nn.Linear):
            yield layer, "forward", _linear(layer, cast, dtype, products)
        else:
            yield layer, "forward", _forward_of(layer, cast, dtype, products and _is_pointwise(layer))
    for group in joined:
        joint = partial(_run_joint, group[0], cast[group[0].weight][1])
        yield from ((conv, JOINT, joint) for conv in group)


def _is_cast(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether autocast casts x to dtype. The model may have switched it off, or to another dtype, around this layer."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype and x.dtype != torch.float64


def _run_joint(first: nn.Conv2d, weight: Tensor, x: Tensor) -> Tensor | None:
    return F.conv2d(x, weight, None, first.stride, first.padding, first.dilation) if _is_cast(x, weight.dtype) else None


def _is_pointwise(conv: nn.Conv2d) -> bool:
    return (
        conv.bias is not None
        and conv.kernel_size == conv.stride == (1, 1)
        and conv.padding == (0, 0)
        and conv.groups == 1
        and conv.weight.device.type in PADDED_DEVICES
        and conv.weight.is_contiguous(memory_format=torch.channels_last)
    )


def _takes_products() -> bool:
    """Return whether torch takes matrix products on a GPU: its deterministic algorithms want a setting of cuBLAS for them."""
    return not torch.are_deterministic_algorithms_enabled() or "CUBLAS_WORKSPACE_CONFIG" in os.environ


def _linear(layer: nn.Linear, cast: _Cast, dtype: torch.dtype, sums: bool) -> Callable[[Tensor], Tensor]:
    weight, bias = cast[layer.weight][1], None if layer.bias is None else cast[layer.bias][1]
    sums = sums and weight.device.type in PADDED_DEVICES

    def forward(x: Tensor) -> Tensor:
        if not _is_cast(x, dtype):
            return _LINEAR(layer, x)
        if sums and bias is not None and torch.is_grad_enabled():
            return _Linear.apply(x.to(dtype), weight, bias)
        return F.linear(x, weight, bias)

    return forward


def _forward_of(conv: nn.Conv2d, cast: _Cast, dtype: torch.dtype, pointwise: bool) -> Callable[[Tensor], Tensor]:
    room, weights = cast[conv.weight]
    bias = None if conv.bias is None else cast[conv.bias][1]
    place = next(i for i, member in enumerate(room.members) if member is conv.weight)

    def forward(x: Tensor) -> Tensor:
        if not _is_cast(x, dtype):
            return _FORWARD(conv, x)
        if pointwise and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and _takes_products():
            return _Pointwise.apply(x.to(dtype), weights, bias, conv.out_channels)
        weight = weights if len(room.members) == 1 else room.places(weights)[place]
        y = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        return y if y.shape[1] == conv.out_channels else _FirstChannels.apply(y, conv.out_channels)

    return forward
