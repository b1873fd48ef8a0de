"""The memory for decoded pictures: places, budgets, sharing."""

import copy
import multiprocessing
import os
import socket
import threading

import numpy as np
import pytest

from tests.images.leftovers import open_memories
from torch_fastdet.images import shared_by_ranks as ranks
from torch_fastdet.images.memory import PictureMemory
from torch_fastdet.images.shared_by_ranks import shared_by_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def test_pictures_come_back():
    shapes = [(5, 7), (1, 1), (13, 3)]
    memory = PictureMemory(shapes, 1 << 20)
    assert memory.places == 3 and not any(memory.has(index) for index in range(3))
    for index, shape in enumerate(shapes):
        assert memory.get(index) is None
        assert memory.put(index, picture(*shape, index), (100 + index, 200))
    for index, shape in enumerate(shapes):
        assert np.array_equal(memory.get(index), picture(*shape, index))
        assert memory.shape(index) == shape and memory.original(index) == (100 + index, 200)
        start = int(memory.offsets[index])
        size = int(memory.sizes(np.array([index]))[0])
        assert memory.tensor()[start : start + size].numpy().tobytes() == picture(*shape, index).tobytes()


def test_a_smaller_picture_than_announced_is_kept_and_a_larger_one_is_not():
    memory = PictureMemory([(5, 7), (5, 7), (5, 7)], 1 << 20)
    assert memory.put(0, picture(4, 7), (4, 7)) and memory.get(0).shape == (4, 7, 3)
    assert not memory.put(1, picture(6, 7), (6, 7)) and memory.get(1) is None
    assert not memory.put(2, picture(5, 7)[..., 0], (5, 7)) and not memory.has(2)


@pytest.mark.parametrize("budget", [0, 74, 105, 400, 10_000])
def test_places_stay_within_the_budget(budget):
    memory = PictureMemory([(5, 7)] * 10, budget)
    assert memory.nbytes <= budget
    assert memory.places == sum(memory.put(index, picture(5, 7), (5, 7)) for index in range(10))
    assert memory.places == (0 if budget < 105 else 10 if budget == 10_000 else 1 + (budget - 105) // 128)


def _write(memory, index):
    memory.put(index, picture(5, 7, index), (5, 7))


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_processes_share_it(method):
    memory = PictureMemory([(5, 7)] * 2, 1 << 20)
    process = multiprocessing.get_context(method).Process(target=_write, args=(memory, 1))
    process.start()
    process.join()
    assert memory.get(0) is None and np.array_equal(memory.get(1), picture(5, 7, 1))


def test_a_copy_has_a_memory_of_its_own():
    memory = PictureMemory([(5, 7)], 1 << 20)
    memory.put(0, picture(5, 7), (5, 7))
    other = copy.deepcopy(memory)
    assert not other.has(0) and memory.has(0) and other.nbytes == memory.nbytes


def test_nothing_is_left_open():
    before = open_memories()
    memory = PictureMemory([(5, 7)], 1 << 20)
    memory.put(0, picture(5, 7), (5, 7))
    view = memory.get(0)
    assert open_memories() > before
    del memory
    assert np.array_equal(view, picture(5, 7))  # what somebody holds stays
    del view
    assert open_memories() == before


def _rank(rank, pipe, path):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3", MASTER_PORT="12345")
    ranks.WAIT = 100.0  # a busy machine may start the first rank last
    memory = shared_by_ranks([path], [(5, 7)] * 3, 1 << 20 if rank == 0 else 500)
    memory.put(rank, picture(5, 7, rank), (5, 7))
    pipe.send(memory.nbytes)
    pipe.recv()  # all have written
    pipe.send([index for index in range(3) if memory.has(index) and (memory.get(index) == picture(5, 7, index)).all()])


def test_ranks_share_one_memory(tmp_path):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, theirs, str(tmp_path)))
        process.start()
        pipes.append(ours)
        processes.append(process)
    assert len({pipe.recv() for pipe in pipes}) == 1  # the first rank's budget
    for pipe in pipes:
        pipe.send(None)
    assert [pipe.recv() for pipe in pipes] == [[0, 1, 2]] * 3
    for process in processes:
        process.join()


def as_rank(monkeypatch, rank):
    for name, value in {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": "12347"}.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_ends_early_does_not_take_the_pictures_of_others(monkeypatch, tmp_path, caplog):
    as_rank(monkeypatch, 0)
    ended = threading.Event()
    monkeypatch.setattr(ranks, "_same_user", lambda connection: ended.wait(10))
    first = shared_by_ranks([str(tmp_path)], [(5, 7)] * 4, 1 << 20)
    gone = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    gone.connect(ranks._name([str(tmp_path)]))
    gone.close()
    ended.set()
    as_rank(monkeypatch, 2)
    with caplog.at_level("WARNING", "torch_fastdet"):
        mine = shared_by_ranks([str(tmp_path)], [(5, 7)] * 4, 1 << 20)
    assert not caplog.records
    first.tensor()[0] = 77
    assert mine.tensor()[0] == 77, "not the same memory"


def test_a_first_rank_that_hangs_is_waited_for_no_longer_than_that(monkeypatch, tmp_path, caplog):
    """It listens, and answers nobody: stopped by SIGSTOP, or by a debugger."""
    monkeypatch.setattr(ranks, "WAIT", 0.2)
    as_rank(monkeypatch, 1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener, caplog.at_level("WARNING", "torch_fastdet"):
        listener.bind(ranks._name([str(tmp_path)]))
        listener.listen(1)
        memory = shared_by_ranks([str(tmp_path)], [(5, 7)] * 4, 1 << 20)
    assert memory.places == 4 and len(caplog.records) == 1


def test_a_rank_without_a_first_rank_says_so_and_goes_on(monkeypatch, tmp_path, caplog):
    """It takes its share of the budget, which all ranks of the machine have together."""
    monkeypatch.setattr(ranks, "WAIT", 0.1)
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "12346"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level("WARNING", "torch_fastdet"):
        memory = shared_by_ranks([str(tmp_path)], [(5, 7)] * 4, 2 * (105 + 128))
    assert memory.places == 2
    (record,) = caplog.records
    assert record.message.startswith(
        "loader_optim: rank 1 did not get the pictures of its machine's first rank within 0.1 s"
    )
