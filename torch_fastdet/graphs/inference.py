"""Runs the forward pass of a module in eval mode as CUDA graphs, one for each input shape."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._say import note_fallback
from torch_fastdet._say import say as print_line
from torch_fastdet._torch.graph import Graph
from torch_fastdet._torch.private import (
    every_module_has_hooks,
    foreach_copy_,
    is_recorded,
    tree_flatten,
    tree_unflatten,
)
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.baked import BakedForward
from torch_fastdet.graphs.captured import CapturedCallable, CapturedPasses
from torch_fastdet.graphs.graph_pool import Memory
from torch_fastdet.nn import forwards

# A capture costs as much time as about 30 calls save, so that many calls pay for one. The first few are free.
_CALLS_FOR_A_CAPTURE = 32
_MOST_SAVED = 4


class _Captured:
    """Hold one input shape's graph, and where it reads and writes: places in the pool that other graphs use for something else."""

    def __init__(self, stream: torch.cuda.Stream, held: list[Tensor]) -> None:
        self.graph = Graph(stream)
        self.held = held  # what the graph reads and a module may let go of
        self._streams: set[torch.cuda.Stream] = set()  # that have read it
        self.input: Tensor
        self.outputs: list[Tensor]
        self.leaves: list[object]  # the numbers of outputs, and values that are not tensors
        self.structure: Any

    def launch(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        if stream not in self._streams:
            self._streams.add(stream)
            _capture.read_on(self.held, stream)
        self.input.copy_(x)
        self.graph.replay(stream)

    def result(self) -> object:
        """Return a copy of what the last launch gives."""
        fresh = [torch.empty_like(output) for output in self.outputs]
        foreach_copy_(fresh, self.outputs)
        leaves = [fresh[leaf] if type(leaf) is _Output else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


class _Output(int):
    """Stand for the output of this number."""


class InferenceGraphs(CapturedCallable[_Captured]):
    """Keep CUDA graphs of one module's forward passes in eval mode and without gradients, by input shape.

    The first ``warmup`` calls of a shape run eagerly, and the last of them also captures; later calls replay. Their results have
    those calls' bits and are copies that nothing writes to any more. All graphs share their memory, as large as the largest
    needs; at most ``max_graphs`` are kept, the least recently used goes first. A module whose shapes never repeat for long is captured
    once in 32 calls at most.

    Tensors of the module that change in place are seen; after other tensors, or other settings, take their place, graphs are
    captured again. With gradients, hooks or parts in training mode a call runs eagerly. Several threads may call.

    Args:
        module: what to run.
        max_graphs: how many graphs to keep.
        warmup: eager calls of a shape before it is replayed.
        settings: what else the module's forward depends on, beside its parameters and buffers; compared at each call.
        capturing: a context to be in while forward is captured, and at the first calls.
        beside: returns the graphs of training whose memory these and the calls before them use, too, if there are any. Calls from another
            thread, and those between a forward pass of training and its backward pass, run eagerly then.
        say: takes the line of the first capture, and why the module runs eagerly, once each; by default they are printed.

    Raises:
        TypeError: ``module`` is no module, or ``max_graphs`` or ``warmup`` no integer.
        ValueError: ``max_graphs`` or ``warmup`` is below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_graphs: int = 48,
        warmup: int = 2,
        settings: Callable[[nn.Module], Iterable[object]] = lambda module: (),
        capturing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        beside: Callable[[], CapturedPasses | None] = lambda: None,
        say: Callable[[str], None] = print_line,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"InferenceGraphs: module is {type(module).__name__}, but a torch.nn.Module is expected")
        super().__init__(type(module).__name__, max_graphs, warmup, say)
        self._module = weakref.ref(module)
        self.capturing, self._beside = capturing, beside
        self._lender: Callable[[], CapturedPasses | None] = lambda: None
        self._baked = BakedForward(settings)
        self._lock = threading.RLock()
        self._saved = float(_MOST_SAVED)  # captures that calls have paid for

    def reset(self) -> None:
        """Forget all graphs; the next calls capture again."""
        with self._lock:
            super().reset()

    def __call__(self, x: Tensor, forward: Callable[[Tensor], object] | None = None) -> Any:
        """Return the module's answer.

        Args:
            x: the input.
            forward: how to run the module; the same at each call. Default: ``module.forward``.
        """
        module = self._module()
        assert module is not None
        run = forward or module.forward
        if not self._takes(x):
            return run(x)
        with self._lock:
            lender = self._lender()  # which must not go during this call
            if lender is not None and not lender.lends():
                return run(x)
            if self._pool.is_orphaned():
                self._pool.drop()
            key = (tuple(x.shape), x.dtype, x.stride(), x.device, *_flags())
            captured = self._pool.get(key, x.device)
            if module.training or self._baked.has_hooks() or every_module_has_hooks():
                captured = None
            if captured is not None:  # The GPU runs it while the host finds out whether it is still valid.
                captured.launch(x, self._pool.behind())
            if self._baked.moved(module):
                self._pool.reset()
                captured = None
            if self._baked.has_hooks() or every_module_has_hooks():
                self._say_once(line := f"{self.what} has hooks, which a replay would not call; it runs eagerly")
                note_fallback(line)
                return run(x)
            if self._baked.trains(module):
                return run(x)
            self._saved = min(self._saved + 1 / _CALLS_FOR_A_CAPTURE, _MOST_SAVED)
            if captured is not None:
                return captured.result()
            result = self._pool.warm_up(key, lambda: self._first(key, x, module, run))
            if self._pool.is_warm(key) and self._saved >= 1:
                self._saved -= 1
                make = partial(self._captured, x, module, run)
                if self._try_capture(key, module, make, lent=self._lent(x.device)) is not None:
                    self._say_once(f"{self.what} answers by CUDA graphs from now on, one for each input shape")
            return result

    def _lent(self, device: torch.device) -> Memory | None:
        lender = self._lender() if len(self._pool) else self._beside()
        lent = None if lender is None else lender.lent(device)
        self._lender = (lambda: None) if lent is None else weakref.ref(lender)
        return lent

    def _first(self, key: tuple, x: Tensor, module: nn.Module, run: Callable[[Tensor], object]) -> object:
        """Return an eager call of what would be captured, or a copy of it where the graphs of training lend their memory."""

        def call() -> object:
            with self.capturing(), forwards.captured():
                return run(x)

        # Lending takes some milliseconds, so shapes that will not be captured soon do not borrow.
        lent = self._lent(x.device) if self._saved >= 1 and self._pool.has_room_for(key) else None
        return call() if lent is None else lent.run(call, module)

    def _takes(self, x: Tensor) -> bool:
        return (
            self.reason is None
            and type(x) is Tensor
            and _capture.on_gpu(x)
            and not torch.is_grad_enabled()
            and not (_capture.is_capturing() or is_recorded())
        )

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        super()._refuse(reason, cause)
        note_fallback(f"{self.what} cannot be captured in a CUDA graph: {reason}; it runs eagerly")

    def _captured(self, x: Tensor, module: nn.Module, run: Callable[[Tensor], object]) -> _Captured:
        stream = self._pool.stream()
        # These aliases keep memory that a parameter no longer uses until no replay reads it.
        aliases = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        captured = _Captured(stream, [*_capture.attribute_tensors(module), *aliases])
        # Replays may write to the input outside inference mode, which only a normal tensor allows.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _capture.attributes_kept(module),
            _capture.capture_into(captured.graph.held, self._pool.handle, stream, random_numbers=False, collect=False),
            _capture.uncached_autocast(_capture.autocast_dtype()),
            self.capturing(),
            forwards.captured(),
        ):
            static = torch.empty_like(x)
            result = run(static)
        with torch.inference_mode(False), torch.no_grad():
            leaves, captured.structure = tree_flatten(result)
            captured.input = _capture.unowned(static)
            captured.outputs, captured.leaves = _places(leaves)
        return captured


def _places(leaves: list[object]) -> tuple[list[Tensor], list[object]]:
    """Return each different tensor of a result once, and the result's leaves with numbers in their places."""
    found: dict[tuple, _Output] = {}
    outputs: list[Tensor] = []
    numbered: list[object] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, (int, float, str, type(None))):
                raise TypeError(f"its output holds a {type(leaf).__name__}, which a replay would not renew")
            numbered.append(leaf)
            continue
        key = (leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
        if key not in found:
            found[key] = _Output(len(outputs))
            outputs.append(_capture.unowned(leaf) if leaf.numel() else leaf)
        numbered.append(found[key])
    return outputs, numbered


def _flags() -> tuple[object, ...]:
    """Return settings of torch that choose kernels."""
    cudnn: Any = torch.backends.cudnn
    return (
        _capture.autocast_dtype(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        cudnn.conv.fp32_precision,  # TF32 or not
        torch.backends.cuda.matmul.fp32_precision,
    )
