"""Runs a function of rows as CUDA graphs of forward and backward, and leaves the loop around it as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import foreach_copy_, foreach_zero_
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.baked import BakedModule
from torch_fastdet.graphs.captured import CapturedPasses, Passes


class RowGraphs(CapturedPasses):
    """Keep CUDA graphs of ``function(*rows)`` and its gradients, for a loss that autograd runs around them.

    Zeros, to which ``function`` must give no weight, fill the rows up to one of four numbers between a power of two and the next, each of which
    is captured at its second call. ``say`` takes the line of the first capture, and ``warn`` one where calls run eagerly. What comes after
    ``max_graphs`` runs eagerly.
    """

    def __init__(
        self, what: str, say: Callable[[str], None], warn: Callable[[str], None], max_graphs: int = 32
    ) -> None:
        super().__init__(what, max_graphs, 1, warn)
        self._say = say
        self._baked = BakedModule()

    def __call__(
        self, function: Callable[..., Tensor], module: nn.Module, rows: tuple[Tensor, ...], key: Hashable = None
    ) -> Tensor:
        """Return ``function(*rows)``, a tensor, where the rows have one number and ``module`` the parameters and buffers.

        ``key`` is what else decides what it does, and holds the tensors that it reads beside these.
        """
        device = rows[0].device
        if (
            self.reason is not None
            or torch.compiler.is_compiling()
            or _capture.is_capturing()
            or not _capture.on_gpu(rows[0])
            or not (torch.is_grad_enabled() and any(row.requires_grad for row in rows))
        ):
            return function(*rows)
        if self._baked.moved(module):
            self._pool.reset()
        size = _filled_up(len(rows[0]))
        kinds = tuple((row.shape[1:], row.dtype, row.requires_grad) for row in rows)
        full_key = ((size, *rows[0].shape[1:]), kinds, *self._baked.key(rows[0])[3:], key)
        captured = self._pool.get(full_key, device)
        eager = functools.partial(_eager, function, rows, size)
        if self.running() is not None:
            return eager()
        if captured is None:
            if not self._pool.is_warm(full_key):
                return self._pool.warm_up(full_key, eager, module.buffers())
            if len(self._pool) == self._pool.max_graphs:  # a capture takes longer than an eager call
                return eager()
            captured = self._try_capture(full_key, module, lambda: self._captured(function, module, rows, size))
            if captured is None:
                return eager()
            self._say(f"captured forward and backward of {self.what}, for each number of rows")
        return self._replay(captured, *rows, *(parameter for parameter, _ in captured.gradients))[0]

    def _captured(
        self, function: Callable[..., Tensor], module: nn.Module, rows: tuple[Tensor, ...], size: int
    ) -> Passes:
        def static() -> list[Tensor]:
            return [row.new_empty((size, *row.shape[1:])).requires_grad_(row.requires_grad) for row in rows]

        return self._capture_passes(module, static, function)

    def _replay_forward(self, captured: Passes, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows, count = list(tensors[: len(captured.inputs)]), len(tensors[0])
        foreach_copy_([static[:count] for static in captured.inputs], rows)
        foreach_zero_([static[count:] for static in captured.inputs])
        captured.forward_graph.replay()
        return tuple(output.clone() for output in captured.outputs)

    def _replay_backward(self, captured: Passes, count: int) -> tuple[Tensor | None, ...]:
        """Return copies: autograd may keep a gradient as ``p.grad``, and adds to it."""
        captured.backward_graph.replay()
        rows = [None if static is None else static[:count].clone() for static in captured.input_gradients]
        gradients = [torch.empty_like(static) for _, static in captured.gradients]
        if gradients:
            foreach_copy_(gradients, [static for _, static in captured.gradients])
        return *rows, *gradients


def _filled_up(count: int) -> int:
    step = 1 << max((count - 1).bit_length() - 3, 3)
    return max(-(-count // step), 1) * step


def _eager(function: Callable[..., Tensor], rows: tuple[Tensor, ...], size: int) -> Tensor:
    with _capture.uncached_autocast(_capture.autocast_dtype()):
        return function(*(torch.cat((row, row.new_zeros(size - len(row), *row.shape[1:]))) for row in rows))
