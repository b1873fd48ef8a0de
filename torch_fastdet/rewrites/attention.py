"""Ultralytics' attention blocks in a captured step: stock's results with fewer copies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import is_channels_last, own_attributes
from torch_fastdet._torch.private import every_module_has_hooks, runs_plainly
from torch_fastdet.patching.evidence import agree, pictures

MODULE = "ultralytics.nn.modules.block"
MOST_POSITIONS = 1024  # of the operator, core::kMostSoftmaxColumns


class _Softmax(torch.autograd.Function):
    """``x.softmax(-1).to(dtype)``. Its gradient comes transposed from the matrix product behind; torch's backward pass would convert it,
    multiply it by the result and copy it before it begins. Here one launch does it all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.torch_fastdet.softmax_backward(grad.flatten(0, 1), y.flatten(0, 1)).view_as(y), None


def _softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.softmax(-1).to(dtype)``, x of this dtype."""
    # Autocast's softmax is in float32 on a GPU alone.
    in_float32 = x.dtype in (torch.float32, torch.float64) or (x.is_cuda and torch.is_autocast_enabled("cuda"))
    ours = in_float32 and torch.is_grad_enabled() and x.shape[-1] <= MOST_POSITIONS
    return _Softmax.apply(x, dtype) if ours else x.softmax(-1).to(dtype)


def _attend(block: Any, x: Tensor, areas: int, key: int, scale: float) -> Tensor:
    """Attention within each of ``areas`` horizontal parts of x; queries and keys have ``key`` channels a head.

    The matrix products have the operands that stock gives them, and so its bits. Images are channels_last on the way.
    """
    n, _, h, w = x.shape
    heads, width = block.num_heads, block.head_dim
    rows = block.qkv(x).permute(0, 2, 3, 1).reshape(n * areas, h * w // areas, heads, 2 * key + width)
    q, k, v = rows.permute(0, 2, 3, 1).split([key, key, width], 2)  # of each head: channels, positions

    def image(t: Tensor) -> Tensor:
        return t.permute(0, 3, 1, 2).reshape(n, h, w, heads * width).contiguous().permute(0, 3, 1, 2)

    weights = _softmax((q * scale).transpose(-2, -1) @ k, v.dtype)
    y = v @ weights.transpose(-2, -1)
    return block.proj(image(y) + block.pe(image(v)))


def _with_channels(*parts: Any) -> Any:
    return lambda t: torch.cat([part(t) for part in parts], 1)


# Class -> its forward here, and attributes of small cases. Stock's forward has to give the same bits in them. The scale is one for each
# position, so that other values come where it is behind the product.
_SAME, _SQUARE, _NEXT = (lambda t: t), (lambda t: t * t), (lambda t: t + 1)
_SCALES = pictures().flatten() + 1
_PARTS = {"proj": lambda t: t * t + 1, "pe": lambda t: t * t + 2, "num_heads": 2, "head_dim": 2}
_KNOWN: dict[str, tuple[Any, tuple[dict[str, Any], ...]]] = {
    "Attention": (
        lambda block, x: _attend(block, x, 1, block.key_dim, block.scale),
        ({**_PARTS, "qkv": _with_channels(_SAME, _SQUARE), "key_dim": 1, "scale": _SCALES, "format": None},),
    ),
    "AAttn": (
        lambda block, x: _attend(block, x, max(block.area, 1), block.head_dim, block.head_dim**-0.5),
        tuple(
            {**_PARTS, "qkv": _with_channels(_SAME, _SQUARE, _NEXT), "area": area, "all_head_dim": 4} for area in (1, 2)
        ),
    ),
}


@functools.cache
def _is_stocks(name: str, forward: Any) -> bool:
    ours, cases = _KNOWN[name]
    return all(agree(forward, ours, case, pictures(4)) for case in cases)


@contextlib.contextmanager
def attention_in_rows(model: nn.Module) -> Iterator[None]:
    """While inside, the model's ``Attention`` and ``AAttn`` run as :func:`_attend` where the model is channels_last."""
    known = []
    if not every_module_has_hooks() and any(map(is_channels_last, model.parameters())):
        known = [
            module
            for module in model.modules()
            if type(module).__module__ == MODULE
            and type(module).__name__ in _KNOWN
            and runs_plainly(module, type(module).forward)
            and _is_stocks(type(module).__name__, type(module).forward)
        ]
    with own_attributes([(m, "forward", functools.partial(_KNOWN[type(m).__name__][0], m)) for m in known]):
        yield
