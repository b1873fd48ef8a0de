"""Runs in the training process: asks for plans, and a thread makes the next batches while the loop works on one."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_fastdet._say import count, say
from torch_fastdet.images.finish import Finisher
from torch_fastdet.images.image_memory import ImageMemory
from torch_fastdet.images.plan import Indices
from torch_fastdet.images.worker import Collate, PlannedBatch, Sent
from torch_fastdet.memory import is_out_of_memory, words

#: So many batches are ready before the loop asks for them.
DEPTH = 2

_running: weakref.WeakSet[Ahead] = weakref.WeakSet()
_one_at_a_time = threading.RLock()  # the garbage collector may end another loader inside


class PlanBatches:
    """Sample batches that ask for plans; with ``repeat`` start again at its end, for ever."""

    def __init__(self, batches: Any, repeat: bool = False) -> None:
        self.sampler = batches  # where InfiniteDataLoader looks for its length
        self.repeat = repeat

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Indices]:
        while True:
            for batch in self.sampler:
                yield Indices(batch)
            if not self.repeat:
                return


class PlannedLoading:
    """Choose where the batches of a ``DataLoader`` are made: by a thread on the GPU, else by the loader processes."""

    def __init__(self, memory: ImageMemory, workers: int, on_gpu: bool, device: torch.device | None = None) -> None:
        self.memory, self.workers, self.on_gpu = memory, workers, on_gpu
        self._device = device  # by default the current GPU, when the first batch is made
        self._finisher: Finisher | None = None
        if not on_gpu:
            self._say("made on the CPU")

    def collate(self, stock: Callable[[list], Sent]) -> Collate:
        """Return what loader processes call instead of the framework's own ``collate_fn``."""
        return Collate(stock, self.memory, self.on_gpu)

    @property
    def finisher(self) -> Finisher:
        with _one_at_a_time:  # two threads may begin a loop each
            if self._finisher is None:
                self._finisher = Finisher(self.memory, self._device or current_gpu())
                self._say(f"made on the GPU, which keeps {self._finisher.images.how_many()}")
            return self._finisher

    def batches(self, source: Iterator[Sent | PlannedBatch], limited: bool = False) -> Iterator[Any]:
        """Return the finished batches of a ``DataLoader``'s iterator; with ``limited`` no further ahead than the :class:`Ahead` may go."""
        if not self.on_gpu:
            return source
        if not self.workers:
            return map(self.finisher, source)
        return Ahead(source, self.finisher, self.finisher.device, limited)

    def count_batch(self) -> None:
        count("loader_optim", "batches")
        if self.memory.jpegs is not None:
            count("loader_optim", "JPEG files decoded by OpenCV", self.memory.jpegs.newly_refused())

    def _say(self, how: str) -> None:
        memory, images = self.memory, len(self.memory)
        files = 0 if memory.jpegs is None else int(memory.jpegs.may_keep.sum())
        parts = []
        if files:
            room = words(memory.files.nbytes)
            parts.append(
                f"{files:,} of {images:,} images are JPEG files, of which {room} are kept, decoded for each batch"
            )
        if files < images:
            places = memory.places if memory.jpegs is None else images - files
            parts.append(
                f"{places:,} of {images:,} images are decoded once, into {words(memory.held())} for all processes"
            )
        say(f"loader_optim: {'; '.join(parts)}; batches are {how}")


def current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Ahead:
    """Iterate over ``finish(batch)`` for the batches of ``source``, made in a thread of its own, on a stream of such threads.

    CUDA tensors are given to the stream that is current when the loop takes them. Errors are raised there too. A batch that gets no memory
    is made again when the loop waits for it. With ``limited``, nothing is taken from ``source`` but what :meth:`allow` permits.
    """

    def __init__(
        self, source: Iterator[Any], finish: Callable[[Any], Any], device: torch.device, limited: bool = False
    ) -> None:
        self._ready: queue.Queue[tuple] = queue.Queue(maxsize=DEPTH)
        self._stop = threading.Event()
        self._asked = [0]  # batches that the loop has asked for
        self._permits = threading.Semaphore(0) if limited else None
        self._allowed = 0
        arguments = (source, finish, device, self._ready, self._stop, self._asked, self._permits)
        self._thread = threading.Thread(target=_work, args=arguments, name="torch_fastdet_loader", daemon=True)
        self._device = device
        self._ended: BaseException | None = None
        self._process = os.getpid()
        _running.add(self)
        self._thread.start()

    def __iter__(self) -> Ahead:
        return self

    def allow(self, count: int) -> None:
        """Let ``count`` batches be ready or in the making, those included that were made and not taken."""
        assert self._permits is not None
        for _ in range(self._allowed, count):
            self._permits.release()
        self._allowed = max(self._allowed, count)

    def __next__(self) -> Any:
        if self._ended is not None:
            raise self._ended
        if self._permits is not None:
            self.allow(1)  # two loops at once take more than each of them permitted
        self._asked[0] += 1
        batch, event, error = self._ready.get()
        if error is not None:
            self._ended = error
            self._ready.put((None, None, error))  # for another thread that waits
            raise error
        self._allowed -= 1
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for value in batch.values() if isinstance(batch, dict) else batch:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread. Batches that were made and not taken are lost."""
        if self._process != os.getpid():
            return  # a loader process, which has no such thread
        self._stop.set()
        if self._permits is not None:
            self._permits.release()  # a thread that waits for one ends
        if self._thread is threading.current_thread():
            return  # the garbage collector runs in it, perhaps inside of the queue, whose lock it then holds
        self._drop_ready()  # a thread that waits for room goes on
        self._thread.join(timeout=10)
        if self._ended is None:
            self._ended = StopIteration()
        self._drop_ready()
        self._ready.put((None, None, self._ended))  # for another thread that waits

    def _drop_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def __del__(self) -> None:
        self.close()


def _work(
    source: Iterator[object],
    finish: Callable[[object], object],
    device: torch.device,
    ready: queue.Queue,
    stop: threading.Event,
    asked: list[int],
    permits: threading.Semaphore | None,
) -> None:
    def may_go_on() -> bool:
        if permits is not None:
            permits.acquire()
        return not stop.is_set()

    def put(item: tuple) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def made(number: int) -> object:
        planned = next(source)
        while True:
            waits = asked[0] >= number
            try:
                return finish(planned)
            except RuntimeError as error:
                if waits or stop.is_set() or not is_out_of_memory(error):
                    raise
            while asked[0] < number and not stop.wait(0.01):
                continue

    try:
        torch.cuda.set_device(device)
        stream, number = _stream(device), 0
        with torch.cuda.stream(stream):
            while may_go_on():
                number += 1
                batch = made(number)
                event = torch.cuda.Event()
                event.record(stream)
                put((batch, event, None))
                del batch
    except StopIteration:  # a new one, which holds no frames
        put((None, None, StopIteration()))
    except BaseException as error:  # the loop raises it
        put((None, None, error))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all such threads: the allocator caches memory for each stream, and torch has few of them."""
    return torch.cuda.Stream(device)


@atexit.register
def _close_all() -> None:
    for ahead in list(_running):
        ahead.close()
