"""A function of rows as CUDA graphs of forward and backward, with the loop around it left as it is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.graph import Graph
from torch_fastdet._torch.private import foreach_copy_, foreach_zero_
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.baked import BakedModule
from torch_fastdet.graphs.pool import GraphPool
from torch_fastdet.graphs.refusal import first_line, why_not


class _Captured:
    """The graphs for one number of rows, and the static tensors that they read and write."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.forward_graph, self.backward_graph = Graph(stream), Graph(stream)
        self.rows: list[Tensor]
        self.row_gradients: list[Tensor | None]
        self.parameters: list[nn.Parameter]  # that get a gradient
        self.gradients: list[Tensor]
        self.output: Tensor
        self.output_gradient: Tensor


class _Running:
    """A replayed forward pass whose backward pass may come."""

    def __init__(self, captured: _Captured) -> None:
        self.captured = captured


class _Replay(torch.autograd.Function):
    """The graphs as one node of autograd. What it returns are copies: autograd may keep a gradient as ``p.grad``, and adds to it."""

    @staticmethod
    def forward(ctx: Any, graphs: RowGraphs, captured: _Captured, *tensors: Tensor) -> Tensor:
        rows = tensors[: len(captured.rows)]
        ctx.count = len(rows[0])
        foreach_copy_([static[: ctx.count] for static in captured.rows], list(rows))
        foreach_zero_([static[ctx.count :] for static in captured.rows])
        captured.forward_graph.replay()
        ctx.running = _Running(captured)
        graphs.running = weakref.ref(ctx.running)
        return captured.output.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        running, ctx.running = ctx.running, None
        if running is None:
            raise RuntimeError(
                "RowGraphs: this backward pass ran already; call backward() once after each forward pass"
            )
        captured = running.captured
        captured.output_gradient.copy_(gradient)
        captured.backward_graph.replay()
        rows = [None if static is None else static[: ctx.count].clone() for static in captured.row_gradients]
        gradients = [torch.empty_like(static) for static in captured.gradients]
        if gradients:
            foreach_copy_(gradients, captured.gradients)
        return (None, None, *rows, *gradients)


class RowGraphs:
    """CUDA graphs of ``function(*rows)`` and its gradients, for a loss that autograd runs around them.

    The number of rows changes from call to call: zeros fill them up to one of four numbers between a power of two and the next, each of
    which is captured at its second call. ``function`` must give rows of zeros no weight. Eager calls are filled up as well: they have a
    replay's bits.

    All graphs share their memory. So while a forward pass waits for its backward pass, another one runs eagerly, and a second backward
    pass (``retain_graph``) raises RuntimeError. Gradients come back through autograd, those of the parameters too: hooks of
    DistributedDataParallel see them.

    Args:
        what: is captured, for the messages.
        say: takes the line of the first capture.
        warn: takes one line where calls run eagerly.
        max_graphs: how many graphs to keep; what comes later runs eagerly.
    """

    def __init__(
        self, what: str, say: Callable[[str], None], warn: Callable[[str], None], max_graphs: int = 32
    ) -> None:
        self._what, self._say, self._warn = what, say, warn
        self.running: Callable[[], _Running | None] = lambda: None
        self._failed = False
        self._baked = BakedModule()
        self._stream: torch.cuda.Stream | None = None  # of the last replay
        self._pool: GraphPool[_Captured] = GraphPool(max_graphs, 1, warn)

    def __call__(
        self, function: Callable[..., Tensor], module: nn.Module, rows: tuple[Tensor, ...], key: Hashable = None
    ) -> Tensor:
        """``function(*rows)``, a tensor.

        Args:
            function: takes the rows.
            module: of which it uses parameters and buffers.
            rows: tensors with the same number of rows.
            key: what else decides what it does. Tensors that it reads beside these are to be in there: the key keeps them.
        """
        device = rows[0].device
        if self._failed or torch.compiler.is_compiling() or _capture.is_capturing() or not _capture.on_gpu(rows[0]):
            return function(*rows)
        if not (torch.is_grad_enabled() and any(row.requires_grad for row in rows)):
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
                return self._pool.warm_up(full_key, eager)
            if len(self._pool) == self._pool.max_graphs:  # a capture takes longer than an eager call
                return eager()
            captured = self._try_capture(full_key, function, module, rows)
            if captured is None:
                return eager()
        self._stream = _capture.behind(self._stream, device)
        return _Replay.apply(self, captured, *rows, *captured.parameters)

    def _try_capture(
        self, key: tuple, function: Callable[..., Tensor], module: nn.Module, rows: tuple[Tensor, ...]
    ) -> _Captured | None:
        reason = why_not(module, averaged=True)
        captured = None
        if reason is None:
            try:
                captured = self._pool.capture(key, lambda: self._captured(function, module, rows, key[0][0]))
            except Exception as error:
                reason = f"the capture failed, {first_line(error)}"
        if reason is not None:
            self._failed = True
            self._pool.reset()
            self._warn(f"{self._what} cannot be captured in a CUDA graph: {reason}; it runs eagerly")
        elif captured is not None:
            self._say(f"captured forward and backward of {self._what}, for each number of rows")
        return captured

    def _captured(
        self, function: Callable[..., Tensor], module: nn.Module, rows: tuple[Tensor, ...], size: int
    ) -> _Captured:
        stream, pool = self._pool.stream(), self._pool.handle
        captured = _Captured(stream)
        with (
            _capture.aliased_parameters(module) as aliases,
            _capture.capture_into(captured.forward_graph.held, pool, stream),
            _capture.uncached_autocast(_capture.autocast_dtype()),
        ):
            static = [row.new_empty((size, *row.shape[1:])).requires_grad_(row.requires_grad) for row in rows]
            output = function(*static)
        leaves = [row for row in static if row.requires_grad]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # A loop calls backward() outside of its autocast.
        with _capture.capture_into(captured.backward_graph.held, pool, stream), torch.autocast("cuda", enabled=False):
            captured.output_gradient = torch.empty_like(output, requires_grad=False)
            inputs = [*leaves, *(aliases[parameter] for parameter in parameters)]
            found = list(torch.autograd.grad(output, inputs, captured.output_gradient, allow_unused=True))
        captured.row_gradients = [found.pop(0) if row.requires_grad else None for row in static]
        used = [(parameter, gradient) for parameter, gradient in zip(parameters, found) if gradient is not None]
        captured.parameters, captured.gradients = [p for p, _ in used], [g for _, g in used]
        captured.rows, captured.output = [row.detach() for row in static], output.detach()
        return captured


def _filled_up(count: int) -> int:
    step = 1 << max((count - 1).bit_length() - 3, 3)
    return max(-(-count // step), 1) * step


def _eager(function: Callable[..., Tensor], rows: tuple[Tensor, ...], size: int) -> Tensor:
    with _capture.uncached_autocast(_capture.autocast_dtype()):
        return function(*(torch.cat((row, row.new_zeros(size - len(row), *row.shape[1:]))) for row in rows))
