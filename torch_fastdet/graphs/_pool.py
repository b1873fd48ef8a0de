"""Captured graphs and their memory: what is kept, what goes first, and what happens when memory runs out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch

from torch_fastdet._torch import private
from torch_fastdet.graphs import _capture
from torch_fastdet.graphs._refusal import is_out_of_memory

G = TypeVar("G")
T = TypeVar("T")


class GraphPool(Generic[G]):
    """Captured graphs by key, in one memory pool.

    Only one graph runs at a time, so all of them share one pool. At most ``max_graphs`` are kept; the least recently used
    goes first. A key's first ``warmup`` calls run eagerly. Where an eager call or a capture runs out of memory beside
    graphs, all graphs are dropped and it runs once more.

    Args:
        max_graphs: how many graphs to keep.
        warmup: eager calls of a key before it is captured.
        say: takes one line each time the graphs are dropped because memory ran out.
        forget: called when graphs are dropped, so that their owner drops what it made for them.
    """

    def __init__(
        self,
        max_graphs: int,
        warmup: int,
        say: Callable[[str], None],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_graphs, self.warmup = max_graphs, warmup
        self._say, self._forget = say, forget
        self._graphs: OrderedDict[Hashable, G] = OrderedDict()
        self._calls: Counter[Hashable] = Counter()
        self._stream: torch.cuda.Stream | None = None
        self.handle: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Any]:
        """The keys, the most recently used last."""
        return iter(self._graphs)

    def items(self) -> Iterator[tuple[Any, G]]:
        return iter(self._graphs.items())

    def get(self, key: Hashable) -> G | None:
        """The graph of this key, which is now the most recently used."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream to capture on."""
        if self._stream is None or self._stream.device != device:
            self._stream = _capture.new_stream(device)
        return self._stream

    def bytes(self) -> int:
        """Device memory that the allocator holds for the graphs."""
        return private.pool_bytes(self.handle)

    def drop(self) -> None:
        """Drop all graphs. Keys that were warmed up stay warm."""
        self._graphs.clear()
        self.handle = None
        self._forget()

    def reset(self) -> None:
        """Drop all graphs; each key begins with its warm-up again."""
        self.drop()
        self._calls.clear()

    def is_warm(self, key: Hashable) -> bool:
        return self._calls[key] >= self.warmup

    def warm_up(self, key: Hashable, run: Callable[[], T]) -> T:
        """Run eagerly, and count it. A call that raises does not count."""
        result = self._with_room(run, torch.OutOfMemoryError)
        self._calls[key] += 1
        return result

    def capture(self, key: Hashable, make: Callable[[], G]) -> G:
        """Keep what ``make()`` captures, with its memory from ``handle``. Where that fails, all graphs are dropped."""
        while len(self._graphs) >= self.max_graphs:
            self._graphs.popitem(last=False)

        def captured() -> G:
            if not self._graphs:  # a pool ends with its last graph
                self.handle = _capture.new_pool()
            return make()

        try:
            graph = self._graphs[key] = self._with_room(captured, Exception)
        except BaseException:
            self.drop()  # torch's allocator of pinned memory refuses to capture into this pool again
            raise
        return graph

    def _with_room(self, run: Callable[[], T], kind: type[Exception]) -> T:
        try:
            return run()
        except kind as error:
            if not (self._graphs and is_out_of_memory(error)):
                raise
        # Outside of the except block, whose traceback holds what the failed call made.
        self._say(f"out of memory beside {len(self._graphs)} graphs, which are dropped; capturing again")
        self.reset()
        torch.cuda.empty_cache()
        return run()
