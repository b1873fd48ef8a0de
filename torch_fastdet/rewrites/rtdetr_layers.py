"""Runs RT-DETR's attention and pooling by operators in a captured pass, and makes its constants on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as functional_of_torch

from torch_fastdet import ops
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.forwards import window_of
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import with_names
from torch_fastdet.rewrites.rewrite import ADDS_FREELY, Changes, Rewrite, is_read, plain_modules

_MODULE, _HEADS = "ultralytics.nn.modules.transformer", "ultralytics.nn.modules.head"
_SAMPLED = "multi_scale_deformable_attn_pytorch"
# Maps a layer to its attention, of whose results the layer reads only the first.
_SELF_ATTENTION = {"TransformerEncoderLayer": "ma", "AIFI": "ma", "DeformableTransformerDecoderLayer": "self_attn"}


def attend(value: Tensor, shapes: list[list[int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Return what Ultralytics samples with ``grid_sample``; points of all levels are in one dimension."""
    levels = len(shapes)
    sizes = [(int(height), int(width)) for height, width in shapes]
    return ops.deformable_attention(
        value, sizes, locations.unflatten(3, (levels, -1)), weights.unflatten(3, (levels, -1))
    )


@functools.cache
def _forward_of(stock: Stock) -> Callable[..., Tensor] | None:
    """Return ``MSDeformAttn.forward`` with :func:`attend` in the place of the function that samples; None where it is not as known."""
    if not isinstance(stock, FunctionType) or not is_read(stock.__globals__.get(_SAMPLED), "5a3f264b"):
        return None
    return with_names(stock, **{_SAMPLED: attend})


@functools.partial(Rewrite, "RT-DETR's deformable attention is one operator", (ADDS_FREELY,))
def deformable_attention(model: nn.Module) -> Changes:
    """Let ``MSDeformAttn`` run :func:`torch_fastdet.ops.deformable_attention`."""
    for module in plain_modules(model, (_MODULE, "MSDeformAttn")):
        if (forward := _forward_of(type(module).forward)) is not None:
            yield module, "forward", functools.partial(forward, module)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    with torch.autocast(scores.device.type, enabled=False):
        return scores.softmax(dim)  # computed in float32: forward, the bits of a float32 softmax


@functools.cache
def _attention_by_scores() -> Function:
    """Return ``nn.MultiheadAttention.forward`` with scores in memory, whose softmax keeps their dtype under autocast.

    Its gradients are deterministic; those of cuDNN's attention are not.
    """
    functional = SimpleNamespace(**vars(functional_of_torch))
    functional.multi_head_attention_forward = with_names(functional.multi_head_attention_forward, softmax=_softmax)
    return functools.partial(with_names(nn.MultiheadAttention.forward, F=functional), average_attn_weights=False)


def _attend_self(attention: nn.MultiheadAttention, *args: object, **kwargs: object) -> object:
    fused: Function = functools.partial(nn.MultiheadAttention.forward, need_weights=False)
    repeats = torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()
    return (_attention_by_scores() if repeats else fused)(attention, *args, **kwargs)


@functools.partial(Rewrite, "RT-DETR's self-attention averages no weights", (ADDS_FREELY,))
def without_averaged_weights(model: nn.Module) -> Changes:
    """Let self-attention of RT-DETR's layers compute no averaged weights, which nothing reads.

    It is fused then, unless a training is to be deterministic; benchmarks/NOTES.md has what that costs.
    """
    for layer in model.modules():
        name = _SELF_ATTENTION.get(type(layer).__name__) if type(layer).__module__ == _MODULE else None
        attention = getattr(layer, name) if name else None
        if type(attention) is nn.MultiheadAttention and runs_plainly(attention, nn.MultiheadAttention.forward):
            yield attention, "forward", functools.partial(_attend_self, attention)


def _on_its_device(module: nn.Module, *args: object, **kwargs: object) -> object:
    with torch.device(next(module.parameters()).device):
        return type(module).forward(module, *args, **kwargs)


@functools.partial(Rewrite, "RT-DETR makes its constants on the GPU", ())
def constants_on_device(model: nn.Module) -> Changes:
    """Make tensors for which no device is named on the model's: a capture cannot copy from the CPU.

    These are the grid of AIFI's position embedding and the number of each query's image. Denoising queries are drawn before the pass.
    """
    for module in plain_modules(model, (_MODULE, "AIFI"), (_HEADS, "RTDETRDecoder")):
        yield module, "forward", functools.partial(_on_its_device, module)


def _pooled(kernel_size: int, x: Tensor) -> Tensor:
    return torch.ops.torch_fastdet.max_pool(x, kernel_size)[0]


@functools.partial(Rewrite, "max pooling of stride 1 and without padding keeps bytes as indices", (ADDS_FREELY,))
def max_pools(model: nn.Module) -> Changes:
    """Let ``nn.MaxPool2d`` of stride 1 and without padding, as in the backbone's stem, run an operator that keeps a byte for each window."""
    for module in model.modules():
        if (size := window_of(module)) and module.padding == 0:
            yield module, "forward", functools.partial(_pooled, size)
