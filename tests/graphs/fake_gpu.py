"""Replace CUDA graphs on the CPU: a capture records operators, and a replay runs them again on the same tensors.

As with a real graph, captured operators have no effect, reading a number back fails the capture, host numbers are baked
in, and a replay writes the tensors of the capture. There is no real pool (static memory that the graph uses for
something else afterwards), and there are no streams and no autocast.
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fastdet._torch import graph as _graph
from torch_fastdet._torch import private
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.optim import FusedStep

FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

UNDECLARED = {"native_batch_norm": (3, 4)}  # arguments that an operator writes although its schema does not say so


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for tensor in _left_in(self.pool):
                tensor.data.zero_()
            for call in self.calls:
                call()


class Recorder(TorchDispatchMode):
    """Record the operators that run, and undo their writes to tensors that are older than the capture."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph
        self.made: set[int] = set()
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[-1]
        if name == "_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(function._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    self._before_write(tensor)
        for argument in function._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._before_write(kwargs[argument.name])
        for position in UNDECLARED.get(name, ()):
            self._before_write(args[position])
        outputs = function(*args, **kwargs)
        results = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        returns = function._schema.returns
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not views:
            self.made.update(t.untyped_storage().data_ptr() for t in results)
        if views or name in FACTORIES:
            self._keep(results)
            return outputs
        fresh = not any(r.alias_info is not None for r in returns)

        def again() -> None:
            new = function(*args, **kwargs)
            if fresh:
                for old, now in zip(results, (t for t in tree_leaves(new) if isinstance(t, torch.Tensor))):
                    old.data.copy_(now)

        self.graph.calls.append(again)
        return outputs

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        self.graph.calls.append(lambda: tensors and None)

    def _before_write(self, tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self.made and storage not in self.written:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            self.written[storage] = (whole, whole.clone())

    def take_back(self) -> None:
        for whole, before in self.written.values():
            whole.data.copy_(before)


_made: list[tuple[object, weakref.ref[torch.Tensor]]] = []


# These are the pools that graphs were captured into, and these graphs while they live.
_pools: set[object] = set()
_graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()


def _enter(pool) -> None:
    if pool in _pools and not any(graph.pool is pool for graph in _graphs):
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool has ended with its last graph")


class Lent(TorchDispatchMode):
    """Put tensors that are made inside into a pool: a replay of its graphs overwrites those that are left."""

    def __init__(self, pool, stream) -> None:
        super().__init__()
        self.pool = pool
        _enter(pool)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if not any(r.alias_info is not None and r.alias_info.is_write for r in function._schema.returns):
            _made.extend((self.pool, weakref.ref(t)) for t in tree_leaves(outputs) if isinstance(t, torch.Tensor))
        return outputs


def _left_in(pool) -> list[torch.Tensor]:
    return [tensor for of, made in _made if of is pool and (tensor := made()) is not None]


def _pool_bytes(pool, which="total_size") -> int:
    return 0 if pool is None else len(_left_in(pool)) if which == "allocated_size" else 1


class FakeStream:
    def __init__(self, device) -> None:
        self.device = device


class FakeEvent:
    """Call ``then`` in each replay of the graph that recorded this event."""

    def __init__(self) -> None:
        self.then = lambda: None

    def record(self, stream) -> None:
        assert stream is _current[-1]
        _recorders[-1].graph.calls.append(lambda: self.then())


_recorders: list[Recorder] = []
# These are pools of failed captures, into which torch captures no more.
_failed_pools: set[object] = set()
STREAM = FakeStream(torch.device("cpu"))
_current = [STREAM]
# These are the streams of the last replays of dropped graphs.
awaited: list[FakeStream] = []
# These are pairs of a stream and the one that it waited for to replay in the same memory.
ordered: list[tuple[FakeStream, FakeStream]] = []


@contextlib.contextmanager
def on(stream: FakeStream):
    """Make ``stream`` the current stream in all threads."""
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def _behind(last: FakeStream | None, device) -> FakeStream:
    if last is not None and last is not _current[-1]:
        ordered.append((_current[-1], last))
    return _current[-1]


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    with private.without_dispatch_modes():
        return tensor.data


_stock_step = FusedStep.step


@contextlib.contextmanager
def _capture_into(graph, pool, stream, random_numbers=True, collect=True):
    assert pool is not None and stream is not None
    if pool in _failed_pools:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    _enter(pool)
    recorder, graph.pool = Recorder(graph), pool
    _pools.add(pool)
    _graphs.add(graph)
    _recorders.append(recorder)
    try:
        with recorder:
            yield
    except BaseException:
        _failed_pools.add(pool)
        graph.calls.clear()
        raise
    finally:
        _recorders.pop()
        with torch.no_grad():
            recorder.take_back()


def _fused_step(fused: FusedStep, model=None) -> None:
    """Record the step as one call with the capture's gradients: a recorder sees no operator in it."""
    if not _recorders:
        _stock_step(fused, model)
        return
    params = [p for group in fused.optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in params]

    def again() -> None:
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        updates = None if fused.ema is None else fused.ema.updates
        _stock_step(fused, model)
        if fused.ema is not None:
            fused.ema.updates = updates  # after_replay() counts

    fused._numbers.capture(*_numbers(fused))
    _recorders[-1].graph.calls.append(again)


def _numbers(fused: FusedStep):
    return fused._kind.numbers(fused.optimizer, fused.device)[:2]


def install(monkeypatch) -> None:
    """Make the CPU look like a GPU to the graphs."""
    for name, fake in {
        "on_gpu": lambda tensor: True,
        "is_capturing": lambda: bool(_recorders),
        "new_pool": object,
        "new_stream": lambda device, owner: FakeStream(device),
        "make_backward_wait": lambda device: None,
        "read_on": lambda tensors, stream: None,
        "behind": _behind,
        "capture_into": _capture_into,
        "running_in": Lent,
        "unowned": _unowned,
    }.items():
        monkeypatch.setattr(_capture, name, fake)
    monkeypatch.setattr(_graph, "new_cuda_graph", FakeGraph)
    monkeypatch.setattr(_graph, "new_event", FakeEvent)
    monkeypatch.setattr(_graph, "current_stream", lambda device: _current[-1])
    monkeypatch.setattr(_graph, "let_wait", lambda streams, stream: awaited.append(stream))
    monkeypatch.setattr(private, "pool_bytes", _pool_bytes)
    monkeypatch.setattr(FusedStep, "step", _fused_step)


GPU = SimpleNamespace(device=torch.device("cpu"))
