"""Keeps captured graphs and their memory, and decides which goes first when memory runs out."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torch_fastdet._say import note_fallback
from torch_fastdet._torch import private
from torch_fastdet._torch.private import tree_map
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.memory import CAPTURE, Owner, is_out_of_memory, owners, register, with_room

G = TypeVar("G")
T = TypeVar("T")

# Graphs are taken, or released. Pools share the lock, because a lock of their own could not be copied with a model that holds them.
_taking = threading.RLock()


class Memory:
    """Hold the memory pool of some graphs, and the stream to capture them on: the allocator gives free blocks to the same stream alone.

    Graphs of several owners may share one. Each of them assumes nothing of what it finds there: it writes its inputs before a replay, and
    whoever needs an output copies it before the next replay of any of them. So replays must be ordered, by :meth:`behind`, and nothing
    may be replayed between a forward pass and its backward pass (:meth:`CapturedPasses.lent`).
    """

    def __init__(self, owner: GraphPool[Any], device: torch.device) -> None:
        self.owner = weakref.ref(owner)
        self.stream = _capture.new_stream(device, self)
        self.handle = _capture.new_pool()
        # If a borrower's capture fails, ``handle`` becomes another pool, which the owner's graphs do not keep.
        self.failed = False
        self._ran_on: torch.cuda.Stream | None = None

    def behind(self) -> torch.cuda.Stream:
        """Return the current stream, to run something here behind what ran here last, on whichever stream."""
        self._ran_on = stream = _capture.behind(self._ran_on, self.stream.device)
        return stream

    def keeper(self) -> GraphPool[Any] | None:
        """Return whose graphs keep the memory while the result is held; None if they are gone, and the allocator refuses it, therefore."""
        owner = self.owner()
        return owner if owner is not None and owner.memory is self and len(owner) and not self.failed else None

    def run(self, run: Callable[[], object], module: nn.Module) -> object:
        """Return a copy of ``run()``, which runs ``module``, here. If that leaves a tensor, which replays would overwrite, all graphs go."""
        keeper = self.keeper()  # a trainer is often in a cycle, which may be collected at any time
        if keeper is None:
            return run()
        self.behind()  # copies of the result are made on the current stream
        used = partial(private.pool_bytes, self.handle, "allocated_size")
        before, autocast = used(), _capture.uncached_autocast(_capture.autocast_dtype())
        with _capture.attributes_copied(module), _capture.running_in(self.handle, self.stream), autocast:
            result = run()
        result = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
        if used() > before:
            gc.collect()  # a cycle of references may hold it
        if used() > before:
            for pool in owners():
                if isinstance(pool, GraphPool) and pool.memory is self:
                    pool.reset()
        return result


class GraphPool(Owner, Generic[G]):
    """Keep at most ``max_graphs`` captured graphs by key, in one memory pool; the least recently used goes first.

    Where an eager call or a capture runs out of memory, cheaper owners and then all graphs of this thread are dropped, and it runs again. A
    key that there is no memory to capture runs eagerly until :meth:`reset`. ``say`` takes a line each time, and ``forget`` is called when
    graphs are dropped.
    """

    what, cost = "CUDA graphs", CAPTURE

    def __init__(
        self, max_graphs: int, warmup: int, say: Callable[[str], None], forget: Callable[[], None] = lambda: None
    ) -> None:
        self.max_graphs, self.warmup = max_graphs, warmup
        self._say, self._forget = say, forget
        self._graphs: OrderedDict[tuple, G] = OrderedDict()
        self._calls: Counter[Hashable] = Counter()
        self._too_large: set[Hashable] = set()
        self._thread = 0  # which uses the graphs, and may release them
        self.device = None
        self.memory: Memory | None = None
        register(self)

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[tuple]:
        """Return the keys, the most recently used last."""
        return iter(self._graphs)

    def items(self) -> Iterator[tuple[tuple, G]]:
        return iter(self._graphs.items())

    def get(self, key: tuple, device: torch.device) -> G | None:
        """Return the graph of this key, which is now the most recently used; ``device`` is that of all that follows."""
        with _taking:
            self._thread, self.device = threading.get_ident(), device
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    @property
    def handle(self) -> Any:
        return None if self.memory is None else self.memory.handle

    def stream(self) -> torch.cuda.Stream:
        """Return the stream to capture on, within :meth:`capture`."""
        assert self.memory is not None
        return self.memory.stream

    def behind(self) -> torch.cuda.Stream:
        """Return the current stream, to replay one of the graphs behind what ran in their memory last."""
        assert self.memory is not None
        return self.memory.behind()

    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def held(self) -> int:
        """Return the device memory that the allocator holds for the graphs, unless another owner counts it."""
        owner = None if self.memory is None else self.memory.owner()
        counted = owner is not None and owner is not self and owner.memory is self.memory
        return 0 if counted else private.pool_bytes(self.handle)

    def is_orphaned(self) -> bool:
        """Return whether another pool has lent the memory and is gone. Its other borrowers may run there in any thread."""
        return self.memory is not None and self.memory.owner() is None

    def offer(self) -> str:
        # Another thread may be replaying.
        return f"{len(self)} graphs" if len(self) and self.is_of_this_thread() else ""

    def release(self) -> None:
        """Drop all graphs, unless another thread has taken them since; each key begins with its warm-up again."""
        with _taking:
            if self.is_of_this_thread():
                self._begin_again()

    def _begin_again(self) -> None:
        self.drop()
        self._calls.clear()

    def drop(self) -> None:
        """Drop all graphs. Keys that were warmed up stay warm."""
        self._graphs.clear()
        self.memory = None
        self._forget()

    def reset(self) -> None:
        """Reset, also for keys that there was no memory to capture."""
        self._begin_again()
        self._too_large.clear()

    def is_warm(self, key: Hashable) -> bool:
        """Return whether the key is to be captured now."""
        return self._calls[key] >= self.warmup and self.has_room_for(key)

    def has_room_for(self, key: Hashable) -> bool:
        """Return whether there was memory to capture the key, as far as that is known."""
        return key not in self._too_large

    def warm_up(self, key: Hashable, run: Callable[[], T], written: Iterable[torch.Tensor] | None = None) -> T:
        """Run eagerly, and count it, unless it raises.

        ``written`` is what a training pass may change: where it runs again, it begins with the same values and random numbers.
        """
        run = run if written is None else _from_the_same(run, list(written), self.device)
        result = with_room(run, self.device, self._say)
        self._calls[key] += 1
        return result

    def capture(self, key: tuple, make: Callable[[], G], lent: Memory | None = None) -> G | None:
        """Keep what ``make()`` captures on ``stream()`` and into ``handle``; None, and no graph is left, where there is no memory for it.

        The first graph may be captured into ``lent``, the memory of another pool.
        """
        while len(self._graphs) >= self.max_graphs:
            self._graphs.popitem(last=False)

        def captured() -> G:
            assert self.device is not None
            keeper = None if lent is None else lent.keeper()
            if not self._graphs:  # a pool ends with its last graph
                self.memory = Memory(self, self.device) if keeper is None else lent
            memory = self.memory
            assert memory is not None
            try:
                return make()
            except BaseException:
                # Torch's pinned memory allocator refuses another capture there.
                memory.handle, memory.failed = _capture.new_pool(), memory.owner() is not self
                raise

        try:
            graph = self._graphs[key] = with_room(captured, self.device, self._say, Exception)
        except BaseException as error:
            self.drop()
            if not is_out_of_memory(error):
                raise
        else:
            return graph
        self._too_large.add(key)
        line = f"there is no memory to capture input {key[0]}, which runs eagerly"
        self._say(line)
        note_fallback(line)
        return None


def _from_the_same(run: Callable[[], T], written: list[torch.Tensor], device: torch.device | None) -> Callable[[], T]:
    """Return ``run``, which draws the same random numbers and finds the same values in ``written`` each time it is called."""
    values: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    gpus = [device] if device is not None and device.type == "cuda" else []

    def call() -> T:
        if states:
            with torch.no_grad():
                for tensor, value in zip(written, values):
                    tensor.copy_(value)
            torch.set_rng_state(states[0])
            for gpu in gpus:
                torch.cuda.set_rng_state(states[1], gpu)
        else:
            values[:] = [tensor.detach().clone() for tensor in written]
            states[:] = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        return run()

    return call
