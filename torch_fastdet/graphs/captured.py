"""Implements every captured callable: graphs by what decides their kernels, one pool, and what a failed capture does."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from torch_fastdet._torch.graph import Graph
from torch_fastdet._torch.private import Context, tree_flatten
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.graph_pool import GraphPool, Memory
from torch_fastdet.graphs.refusal import first_line, location_of, why_not

G = TypeVar("G")


class CapturedCallable(Generic[G]):
    """Keep at most ``max_graphs`` graphs of type ``G``, which a subclass captures after ``warmup`` eager calls of a key, and replays.

    ``what`` is captured, for the lines that ``say`` takes.
    """

    def __init__(self, what: str, max_graphs: int, warmup: int, say: Callable[[str], None]) -> None:
        for name, number in (("max_graphs", max_graphs), ("warmup", warmup)):
            if not isinstance(number, Integral):
                raise TypeError(f"{type(self).__name__}: {name} is {number!r}, but an integer is expected")
            if number < 1:
                raise ValueError(f"{type(self).__name__}: {name} is {number}, but 1 or more is expected")
        self.what, self.say = what, say
        #: The reason why nothing is captured any more, or None.
        self.reason: str | None = None
        self._say_once = functools.cache(say)
        # The reference is weak, because a cycle would outlive its last user until the cycle collector runs.
        own = weakref.ref(self)

        # The pool may outlive its owner while another thread frees memory.
        def tell(line: str) -> None:
            if (owner := own()) is not None:
                owner.say(line)

        def forget() -> None:
            if (owner := own()) is not None:
                owner._forget()

        self._pool: GraphPool[G] = GraphPool(max_graphs, warmup, tell, forget)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the input shapes that are captured, the most recently used last."""
        return [key[0] for key in self._pool]

    def memory(self) -> Any:
        """Return the bytes of device memory that the graphs hold."""
        return self._pool.held()

    def reset(self) -> None:
        """Forget all graphs; the next calls capture again."""
        self._pool.reset()

    def _forget(self) -> None:
        """Drop what was made for graphs that are dropped."""

    def _try_capture(
        self, key: tuple, module: nn.Module, make: Callable[[], G], averaged: bool = True, lent: Memory | None = None
    ) -> G | None:
        """Return what ``make()`` captures; None where there is no memory for it, or where it fails (:meth:`_refuse`)."""
        cause, reason = None, why_not(module, averaged)
        if reason is None:
            try:
                return self._pool.capture(key, make, lent)
            except Exception as error:
                cause, reason = error, f"{location_of(error, module)} failed during the capture, {first_line(error)}"
        self._refuse(reason, cause)
        return None

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.reset()
        self.reason = reason
        self._say_once(f"{self.what} cannot be captured in a CUDA graph: {reason}; it runs eagerly")


class Passes:
    """Hold the graphs of one forward and backward pass, and the static tensors that they read and write.

    Inputs and the outputs' gradients are written before a replay; after their last use the graph uses their memory for something else.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.forward_graph, self.backward_graph = Graph(stream), Graph(stream)
        self.held: list[Tensor]  # that only an attribute of a module holds, and that the graph may read
        self.inputs: list[Tensor]
        self.input_gradients: list[Tensor | None]
        self.outputs: list[Tensor]
        self.output_gradients: list[Tensor | None]
        self.structure: Any
        self.gradients: list[tuple[nn.Parameter, Tensor]]


class _Running:
    """Stand for a replayed forward pass whose backward pass may come."""

    def __init__(self, captured: Passes, count: int) -> None:
        self.captured, self.count = captured, count


class _Replay(torch.autograd.Function):
    """Replay the graphs as one node of autograd."""

    @staticmethod
    def forward(ctx: Context, graphs: CapturedPasses, captured: Passes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs = graphs._replay_forward(captured, tensors)
        ctx.graphs, ctx.running = graphs, _Running(captured, tensors[0].shape[:1].numel())
        graphs.running = weakref.ref(ctx.running)
        ctx.mark_non_differentiable(*[o for o, g in zip(outputs, captured.output_gradients) if g is None])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The loss of this pass may stay alive, but if memory runs out in the next one, the graphs must be freed.
        running, ctx.running = ctx.running, None
        if running is None:
            raise RuntimeError(
                f"{type(ctx.graphs).__name__}: this backward pass ran already, so its activations are gone; call backward() once "
                "after each forward pass, or use the module without graphs"
            )
        for static, gradient in zip(running.captured.output_gradients, gradients):
            if static is not None and gradient is None:
                static.zero_()
            elif static is not None and gradient is not None and gradient.data_ptr() != static.data_ptr():
                static.copy_(gradient)
        return None, None, *ctx.graphs._replay_backward(running.captured, running.count)


class CapturedPasses(CapturedCallable[Passes]):
    """Keep graphs of forward and backward passes, as one node of autograd, in one memory.

    While a forward pass waits for its backward pass, another one runs eagerly; a second backward pass raises RuntimeError.
    """

    def __init__(self, what: str, max_graphs: int, warmup: int, say: Callable[[str], None]) -> None:
        super().__init__(what, max_graphs, warmup, say)
        self.running: Callable[[], _Running | None] = lambda: None

    def lends(self) -> bool:
        """Return whether graphs that share the memory may be replayed now: in the thread that trains, and between two of its steps."""
        return self._pool.is_of_this_thread() and self.running() is None

    def lent(self, device: torch.device) -> Memory | None:
        """Return the memory, which graphs of evaluation may share; None where there is none."""
        return self._pool.memory if self.lends() and len(self._pool) and self._pool.device == device else None

    def _replay_forward(self, captured: Passes, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Write the inputs, replay, and return the outputs."""
        raise NotImplementedError

    def _replay_backward(self, captured: Passes, count: int) -> tuple[Tensor | None, ...]:
        """Replay, and return the gradients of the tensors that ``_replay_forward`` was given, of ``count`` rows."""
        raise NotImplementedError

    def _replay(self, captured: Passes, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._pool.behind()
        return _Replay.apply(self, captured, *tensors)

    def _leave(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> list[tuple[nn.Parameter, Tensor]]:
        """Put the parameters' gradients where a replay leaves them; called inside of the backward pass' capture."""
        return gradients

    def _capture_passes(
        self,
        module: nn.Module,
        make_inputs: Callable[[], list[Tensor]],
        run: Callable[..., object],
        inside: AbstractContextManager[None] | None = None,
    ) -> Passes:
        """Capture ``run(*make_inputs())``, inside of a context, and its gradients by inputs that require one and by the module's parameters."""
        stream, pool = self._pool.stream(), self._pool.handle
        captured = Passes(stream)
        captured.held = _capture.attribute_tensors(module)
        with (
            _capture.aliased_parameters(module) as aliases,
            _capture.attributes_kept(module),
            _capture.capture_into(captured.forward_graph.held, pool, stream),
            _capture.uncached_autocast(_capture.autocast_dtype()),
            inside or contextlib.nullcontext(),
        ):
            static = make_inputs()
            result = run(*static)
        captured.inputs = [_capture.unowned(tensor.detach()) for tensor in static]
        wanted = [tensor.requires_grad for tensor in static]
        leaves = [tensor for tensor in static if tensor.requires_grad]
        del static
        outputs, captured.structure = tree_flatten(result)
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(f"its output holds a {type(output).__name__}, which a replay would not renew")
        parameters = [p for p in module.parameters() if p.requires_grad]
        outside = torch.autocast("cuda", enabled=False)  # where a training loop calls backward()
        with _capture.capture_into(captured.backward_graph.held, pool, stream), outside:
            incoming = [torch.empty_like(o, requires_grad=False) if o.requires_grad else None for o in outputs]
            found = torch.autograd.grad(
                [o for o in outputs if o.requires_grad],
                [*leaves, *(aliases[p] for p in parameters)],
                [g for g in incoming if g is not None],
                allow_unused=True,
            )
            of_leaves, of_parameters = iter(found[: len(leaves)]), found[len(leaves) :]
            captured.gradients = self._leave([(p, g) for p, g in zip(parameters, of_parameters) if g is not None])
        captured.input_gradients = [next(of_leaves) if want else None for want in wanted]
        captured.output_gradients = [None if g is None else _capture.unowned(g) for g in incoming]
        captured.outputs = [output.detach() for output in outputs]
        return captured
