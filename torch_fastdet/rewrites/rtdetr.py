"""Runs RT-DETR's attention in a captured pass: deformable attention as one operator, and no averaged weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.patching.evidence import alike
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import with_names
from torch_fastdet.rewrites.rewrite import Forwards, obstacle_to_other_sums

_MODULE = "ultralytics.nn.modules.transformer"
_SAMPLED = "multi_scale_deformable_attn_pytorch"
# Layer -> its attention, of whose results it reads the first alone.
_SELF_ATTENTION = {"TransformerEncoderLayer": "ma", "AIFI": "ma", "DeformableTransformerDecoderLayer": "self_attn"}


def attend(value: Tensor, shapes: list[list[int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Return what Ultralytics samples with ``grid_sample``; points of all levels are in one dimension."""
    levels = len(shapes)
    sizes = [(int(height), int(width)) for height, width in shapes]
    return ops.deformable_attention(
        value, sizes, locations.unflatten(3, (levels, -1)), weights.unflatten(3, (levels, -1))
    )


def _samples(function: Any) -> bool:
    wave = (torch.arange(2 * 10 * 2 * 4, device="cpu") * 0.7).sin()
    value, shapes = wave.view(2, 10, 2, 4), [[2, 3], [2, 2]]
    locations, weights = wave[:96].view(2, 3, 2, 4, 2) * 0.7 + 0.5, wave[:48].view(2, 3, 2, 4)
    return alike(function, attend, lambda each: each(value, shapes, locations, weights), 1e-5)


@functools.cache
def _forward_of(stock: Stock) -> Callable[..., Tensor] | None:
    """Return ``MSDeformAttn.forward`` with :func:`attend` in the place of the function that samples; None where it is not as known."""
    if not isinstance(stock, FunctionType) or not _samples(stock.__globals__.get(_SAMPLED)):
        return None
    return with_names(stock, **{_SAMPLED: attend})


class DeformableAttention(Forwards):
    """Let ``MSDeformAttn`` run :func:`torch_fastdet.ops.deformable_attention`."""

    about = "RT-DETR's deformable attention is one operator"
    without = "it has no deformable attention of Ultralytics'."
    obstacles = (obstacle_to_other_sums,)

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Function]]:
        for module in model.modules():
            kind = type(module)
            if (kind.__module__, kind.__name__) == (_MODULE, "MSDeformAttn") and runs_plainly(module, kind.forward):
                forward = _forward_of(kind.forward)
                if forward is not None:
                    yield module, functools.partial(forward, module)


class WithoutAveragedWeights(Forwards):
    """Let self-attention of RT-DETR's layers compute no averaged weights, which nothing reads, and so may be fused."""

    about = "RT-DETR's self-attention averages no weights"
    without = "it has no self-attention of RT-DETR's."
    obstacles = (obstacle_to_other_sums,)

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Function]]:
        forward: Any = functools.partial(nn.MultiheadAttention.forward, need_weights=False)
        for layer in model.modules():
            name = _SELF_ATTENTION.get(type(layer).__name__) if type(layer).__module__ == _MODULE else None
            attention = getattr(layer, name) if name else None
            if type(attention) is nn.MultiheadAttention and runs_plainly(attention, nn.MultiheadAttention.forward):
                yield attention, functools.partial(forward, attention)
