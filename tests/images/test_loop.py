"""Test how far batches are made ahead, their order, and their end, with stand-ins for CUDA streams and events."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.forks import exit_status, fork
from tests.images import pretended
from torch_fastdet.images import loop
from torch_fastdet.images.loop import DEPTH, Ahead


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(loop, "torch", pretended.cuda())
    monkeypatch.setattr(loop, "_stream", lambda device: None)


class Source:
    """Count what is taken from it."""

    def __init__(self, end: int = 1 << 30) -> None:
        self.taken = 0
        self.end = end

    def __next__(self) -> int:
        if self.taken == self.end:
            raise StopIteration
        self.taken += 1
        return self.taken

    def settles_at(self, count: int) -> bool:
        end = time.monotonic() + 60
        while self.taken < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.taken == count


def made(source: Source, limited: bool) -> Ahead:
    return Ahead(source, lambda number: {"number": number}, torch.device("cpu"), limited)


def numbers(batches: Ahead, count: int) -> list[int]:
    return [next(batches)["number"] for _ in range(count)]


def test_works_ahead_and_no_further_than_its_depth():
    source = Source()
    batches = made(source, limited=False)
    assert source.settles_at(DEPTH + 1)  # the last one waits for room
    assert numbers(batches, 3) == [1, 2, 3] and source.settles_at(DEPTH + 4)
    batches.close()


def test_takes_no_more_than_it_is_allowed_to():
    source = Source()
    batches = made(source, limited=True)
    assert source.settles_at(0)
    batches.allow(4)
    assert numbers(batches, 4) == [1, 2, 3, 4] and source.settles_at(4)
    batches.allow(2)
    assert numbers(batches, 1) == [5]  # a loop that is left early
    batches.allow(2)  # the one that was made is among them
    assert numbers(batches, 2) == [6, 7] and source.settles_at(7)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_thread_that_may_not_go_on_ends_at_once(monkeypatch):
    """The thread does not poll for its end, because a validation would wait for that."""

    class Patient(threading.Semaphore().__class__):
        def acquire(self, blocking=True, timeout=None):
            return super().acquire(blocking)

    monkeypatch.setattr(loop.threading, "Semaphore", Patient)
    source = Source()
    batches = made(source, limited=True)
    batches.allow(1)
    assert numbers(batches, 1) == [1] and source.settles_at(1)
    batches.close()
    assert not batches._thread.is_alive() and source.taken == 1


@pytest.mark.parametrize("limited", [False, True])
def test_ends_as_its_source_does(limited):
    batches = made(Source(end=2), limited)
    if limited:
        batches.allow(5)
    assert list(batches) == [{"number": 1}, {"number": 2}]

    def fails(number: int) -> dict:
        raise ValueError(f"batch {number}")

    failing = Ahead(Source(), fails, torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(ValueError, match="batch 1"):
            next(failing)
    failing.close()


def test_memory_that_ran_out_is_asked_for_again_when_the_loop_waits():
    tries = []

    def finish(number: int) -> dict:
        tries.append(number)
        if number >= 2 and tries.count(number) < number:  # the third is never made
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"number": number}

    source = Source()
    batches = Ahead(source, finish, torch.device("cpu"))
    assert source.settles_at(2) and tries == [1, 2], "it tries once while a step runs"
    assert numbers(batches, 2) == [1, 2] and source.settles_at(3)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
    assert tries == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("ends", ["close", "source"])
def test_all_threads_that_wait_for_a_batch_end(ends):
    """The batch never comes because another thread closes the loader or the source ends."""
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def source():
        begun.set()
        go_on.wait(60)
        return
        yield

    def read():
        with pytest.raises(StopIteration):
            next(batches)
        ended.append(threading.current_thread())

    batches = Ahead(source(), lambda number: {}, torch.device("cpu"))
    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert begun.wait(60)
    time.sleep(0.05)
    if ends == "close":
        threading.Timer(0.1, go_on.set).start()
        batches.close()
    go_on.set()
    for reader in readers:
        reader.join(10)
    assert set(ended) == set(readers)


def test_its_own_thread_ends_it_inside_of_the_queue():
    """The garbage collector may close it in any thread, at any point."""
    begun, ended = threading.Event(), threading.Event()

    def finish(number: int) -> dict:
        begun.wait(60)
        with batches._ready.mutex:
            batches.close()
        ended.set()
        return {}

    batches = Ahead(Source(), finish, torch.device("cpu"))
    begun.set()
    assert ended.wait(10)


def test_a_forked_process_leaves_its_batches_to_the_other():
    """A loader process has no thread to end, and the batches that are ready are not its own."""
    batches = made(Source(), limited=False)
    next(batches)

    def close():
        batches._thread = SimpleNamespace(join=lambda timeout: pytest.fail("it waits for a thread of its parent"))
        batches.close()

    assert exit_status(fork(close)) == 0
    assert numbers(batches, 2) == [2, 3]
    batches.close()
