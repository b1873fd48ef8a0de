"""Runs Ultralytics' attention blocks in a captured step: the original results with fewer copies."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import Context
from torch_fastdet.nn.forwards import OPENS, Block, Opened, added, closed, opened
from torch_fastdet.patching.protocols import Function
from torch_fastdet.rewrites.rewrite import ADDS_FREELY, IN_NHWC, Changes, Rewrite, is_read, plain_modules

MODULE = "ultralytics.nn.modules.block"
MOST_POSITIONS = 1024  # of the operator, core::kMostSoftmaxColumns


class _Softmax(torch.autograd.Function):
    """Compute ``x.softmax(-1).to(dtype)``, whose gradient comes transposed from the product behind: one launch, where torch needs several."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.torch_fastdet.softmax_backward(grad.flatten(0, 1), y.flatten(0, 1)).view_as(y), None


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.softmax(-1).to(dtype)``, x of this dtype."""
    # Autocast runs softmax in float32 only on a GPU.
    in_float32 = x.dtype in (torch.float32, torch.float64) or (x.is_cuda and torch.is_autocast_enabled("cuda"))
    ours = in_float32 and torch.is_grad_enabled() and x.shape[-1] <= MOST_POSITIONS
    return _Softmax.apply(x, dtype) if ours else x.softmax(-1).to(dtype)


def _attended(block: Block, x: Tensor, areas: int, key: int, scale: float) -> Opened:
    """Attend within each of ``areas`` horizontal parts of x, up to the block's last ``Conv``; queries and keys have ``key`` channels a head.

    The matrix products have the original's operands, and so its bits. Images are channels_last on the way.
    """
    n, _, h, w = x.shape
    heads, width = block.num_heads, block.head_dim
    rows = block.qkv(x).permute(0, 2, 3, 1).reshape(n * areas, h * w // areas, heads, 2 * key + width)
    q, k, v = rows.permute(0, 2, 3, 1).split([key, key, width], 2)  # of each head: channels, positions

    def image(t: Tensor) -> Tensor:
        return t.permute(0, 3, 1, 2).reshape(n, h, w, heads * width).contiguous().permute(0, 3, 1, 2)

    weights = softmax((q * scale).transpose(-2, -1) @ k, v.dtype)
    y = v @ weights.transpose(-2, -1)
    return opened(block.proj, added(image(y), block.pe, image(v)))


def _forward(attended: Function, block: Block, x: Tensor) -> Tensor:
    return closed(*attended(block, x))


# Maps classes to the fingerprint of their forward, and to what :func:`opened` does with them.
_KNOWN: dict[str, tuple[str, Function]] = {
    "Attention": ("198319cd", lambda block, x: _attended(block, x, 1, block.key_dim, block.scale)),
    "AAttn": (
        "bfbb8dec",
        lambda block, x: _attended(block, x, max(block.area, 1), block.head_dim, block.head_dim**-0.5),
    ),
}


@functools.partial(Rewrite, "attention blocks read channels_last images without copying them", (ADDS_FREELY, IN_NHWC))
def attention_in_rows(model: nn.Module) -> Changes:
    """Let Ultralytics' ``Attention`` and ``AAttn`` run as :func:`_attended`, and the sum behind it join its last ``Conv``."""
    for block in plain_modules(model, *((MODULE, name) for name in _KNOWN)):
        known, attended = _KNOWN[type(block).__name__]
        if is_read(type(block).forward, known):
            yield block, "forward", functools.partial(_forward, attended, block)
            yield block, OPENS, functools.partial(attended, block)
