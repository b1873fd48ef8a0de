"""Test the memory for decoded images: places, budgets, sharing."""

import copy
import hashlib
import mmap
import multiprocessing
import os
import resource
import signal
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from tests.forks import exit_status, fork
from tests.images.leftovers import open_memories
from torch_fastdet.images import fence
from torch_fastdet.images import image_memory as memories
from torch_fastdet.images import shared_by_ranks as ranks
from torch_fastdet.images.image_memory import ImageMemory, JpegFiles
from torch_fastdet.images.jpeg_files import AS_IT_IS, Files
from torch_fastdet.images.shared_by_ranks import shared_by_ranks
from torch_fastdet.memory import host_budget, report


def make_image(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def test_images_come_back():
    shapes = [(5, 7), (1, 1), (13, 3)]
    memory = ImageMemory(shapes, 1 << 20)
    assert memory.places == 3 and not any(memory.has(index) for index in range(3))
    for index, shape in enumerate(shapes):
        assert memory.get(index) is None
        assert memory.put(index, make_image(*shape, index), (100 + index, 200))
    for index, shape in enumerate(shapes):
        assert np.array_equal(memory.get(index), make_image(*shape, index))
        assert memory.shape(index) == shape and memory.original(index) == (100 + index, 200)
        start = int(memory.offsets[index])
        size = int(memory.sizes(np.array([index]))[0])
        assert memory.tensor()[start : start + size].numpy().tobytes() == make_image(*shape, index).tobytes()


def test_a_smaller_image_than_announced_is_kept_and_a_larger_one_is_not():
    memory = ImageMemory([(5, 7), (5, 7), (5, 7)], 1 << 20)
    assert memory.put(0, make_image(4, 7), (4, 7)) and memory.get(0).shape == (4, 7, 3)
    assert not memory.put(1, make_image(6, 7), (6, 7)) and memory.get(1) is None
    assert not memory.put(2, make_image(5, 7)[..., 0], (5, 7)) and not memory.has(2)


@pytest.mark.parametrize("budget", [0, 74, 105, 400, 10_000])
def test_places_stay_within_the_budget(budget):
    memory = ImageMemory([(5, 7)] * 10, budget)
    assert memory.nbytes <= budget
    assert memory.places == sum(memory.put(index, make_image(5, 7), (5, 7)) for index in range(10))
    assert memory.places == (0 if budget < 105 else 10 if budget == 10_000 else 1 + (budget - 105) // 128)


def _write(memory, index):
    memory.put(index, make_image(5, 7, index), (5, 7))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_it(method):
    memory = ImageMemory([(5, 7)] * 2, 1 << 20)
    process = multiprocessing.get_context(method).Process(target=_write, args=(memory, 1))
    process.start()
    process.join()
    assert memory.get(0) is None and np.array_equal(memory.get(1), make_image(5, 7, 1))


def test_what_is_held_is_counted_while_other_processes_decode():
    """``np.flatnonzero`` on the marks themselves raises if one of them is set meanwhile."""
    memory = ImageMemory([(2, 2)] * 20_000, 1 << 30)
    process = os.fork()
    if process == 0:
        while True:
            for begin in range(0, 20_000, 20):
                memory._marks[begin : begin + 20] ^= 1
    try:
        for _ in range(60):
            assert host_budget() >= 0 and report()
            assert memory.used() <= memory.held() == memory.nbytes
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("kind", ["images", "files"])
def test_an_owner_that_another_thread_asks_is_whole(kind, monkeypatch):
    asked = []
    monkeypatch.setattr(memories, "register", lambda owner: asked.append((owner.held(), owner.used())))
    if kind == "images":
        made = ImageMemory([(5, 7)], 1 << 20)
    else:
        made = JpegFiles(Files.of([""], [(5, 7)], [0]), 1 << 20)
    copy.deepcopy(made)
    assert asked == [(made.held(), 0)] * 2


class TestMarks:
    """Fences separate marks from the bytes that they announce: aarch64 may reorder their writes."""

    def look(self):
        return None

    @pytest.fixture
    def at_fences(self, monkeypatch):
        """Return the values of ``look`` at each fence."""
        seen = []

        def note():
            seen.append(self.look())

        monkeypatch.setattr(memories, "fence", note)
        return seen

    def test_images(self, at_fences):
        memory = ImageMemory([(5, 7)], 1 << 20)
        self.look = lambda: (bool(memory.pixels.any()), int(memory._marks[0]))
        assert memory.put(0, make_image(5, 7), (5, 7))
        assert at_fences[-1] == (True, 0), "the mark is set without a fence behind the pixels"
        at_fences.clear()
        assert memory.get(0) is not None and at_fences[0] == (True, 1), (
            "pixels are read without a fence behind the mark"
        )

    def test_files(self, at_fences):
        files = JpegFiles(Files.of(["a.jpg"], [(5, 7)], [0]), 1 << 20, nbytes=1 << 12)
        self.look = lambda: (bool(files.pixels.any()), *files._rows[0, 1::-1].tolist())
        files._write(0, 64, np.ones(8, np.uint8))
        assert at_fences == [(True, 0, 0), (True, 64, 0)]
        at_fences.clear()
        assert files.packed(0).all() and at_fences == [(True, 64, 8)] * 2

    def test_a_fence_releases_a_lock_before_it_takes_one(self, monkeypatch):
        done = []

        class Lock:
            def __enter__(self):
                done.append("acquire")

            def __exit__(self, *_):
                done.append("release")

        monkeypatch.setattr(fence, "_IN_ORDER", False)
        monkeypatch.setattr(fence, "threading", types.SimpleNamespace(Lock=Lock))
        fence.fence()
        assert done == ["acquire", "release"] * 2


def test_a_copy_has_a_memory_of_its_own():
    memory = ImageMemory([(5, 7)], 1 << 20)
    memory.put(0, make_image(5, 7), (5, 7))
    other = copy.deepcopy(memory)
    assert not other.has(0) and memory.has(0) and other.nbytes == memory.nbytes


def test_nothing_is_left_open():
    before = open_memories()
    memory = ImageMemory([(5, 7)], 1 << 20)
    memory.put(0, make_image(5, 7), (5, 7))
    view = memory.get(0)
    assert open_memories() > before
    del memory
    assert np.array_equal(view, make_image(5, 7))  # what somebody holds stays
    del view
    assert open_memories() == before


def test_nobody_writes_to_a_view():
    memory = ImageMemory([(5, 7)], 1 << 20)
    memory.put(0, make_image(5, 7), (5, 7))
    with pytest.raises(ValueError, match="read-only"):
        memory.get(0)[:] = 0
    assert np.array_equal(memory.get(0), make_image(5, 7))


# Ranks ----------------------------------------------------------------------------------------------------------------


def budget():
    return 1 << 20


def _rank(rank, pipe, path):
    """Run a rank as ``mp.spawn`` starts it, with no environment variable about ranks."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    memory = shared_by_ranks([str(path)], [(5, 7)] * 3, lambda: 500 + 1000 * rank)
    memory.put(rank, make_image(5, 7, rank), (5, 7))
    pipe.send(memory.nbytes)
    pipe.recv()  # all have written
    pipe.send(
        [index for index in range(3) if memory.has(index) and (memory.get(index) == make_image(5, 7, index)).all()]
    )
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_share_one_memory(tmp_path):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, theirs, tmp_path / "store"))
        process.start()
        pipes.append(ours)
        processes.append(process)
    assert len({pipe.recv() for pipe in pipes}) == 1  # the budget of the one that came first
    for pipe in pipes:
        pipe.send(None)
    assert [pipe.recv() for pipe in pipes] == [[0, 1, 2]] * 3
    for process in processes:
        process.join()


@pytest.fixture
def two_ranks(tmp_path, monkeypatch):
    """Let this process and a forked one find each other through a store."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(ranks, "group_size", lambda: 2)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks.private, "default_store", lambda: dist.FileStore(str(tmp_path / "store")))


def test_the_other_rank_gets_the_first_ones_files_and_budgets(two_ranks, tmp_path):
    path = str(tmp_path / "caf\udce9.jpg")
    Path(path).write_bytes(bytes(1000))
    files = Files.of([path, path, ""], [(5, 7)] * 3, [AS_IT_IS] * 3)
    first = shared_by_ranks([path], [(5, 7)] * 3, lambda: 4096, files)

    def take():
        memory = shared_by_ranks([path], [(5, 7)] * 3, lambda: 0, files)
        assert (memory.nbytes, memory.files.nbytes) == (0, first.files.nbytes) == (0, 4096)
        memory.files._write(0, 0, np.arange(9, dtype=np.uint8))

    assert exit_status(fork(take)) == 0
    assert first.files.packed(0).tolist() == [*range(9)]


def test_images_that_no_other_rank_asks_for_end_with_their_data_set(two_ranks):
    """Only rank 0 has a validation set, and it may have several, one after the other."""
    before = open_memories()
    for _ in range(3):
        memory = shared_by_ranks(["val"], [(5, 7)], budget)
        memory.put(0, make_image(5, 7), (5, 7))
        assert memory.places == 1 and open_memories() > before
        del memory
    assert open_memories() == before


@pytest.mark.parametrize("ended", ["data set", "process"])
def test_a_memory_that_has_ended_is_followed_by_another(two_ranks, ended, caplog):
    if ended == "process":
        assert exit_status(fork(lambda: shared_by_ranks(["a"], [(5, 7)], budget).places - 1)) == 0
    else:
        shared_by_ranks(["a"], [(5, 7)], budget)
    memory = shared_by_ranks(["a"], [(5, 7)] * 4, budget)
    assert memory.places == 4 and not caplog.records  # the whole budget

    def take():
        assert ranks.shared_by_ranks(["a"], [(5, 7)] * 4, budget).put(2, make_image(5, 7), (5, 7))

    assert exit_status(fork(take)) == 0 and memory.has(2)


@pytest.mark.parametrize("why", ["it may not", "too many open files", "hangs", "has none"])
def test_a_rank_that_does_not_get_the_images_says_so_and_goes_on(two_ranks, monkeypatch, caplog, why):
    monkeypatch.setenv("RANK", "1")

    def first():
        memory = shared_by_ranks(["a"], [(5, 7)] * 4, budget)
        os.write(made, b"x")
        os.read(go_on, 1)
        return int(memory is None)

    (made_here, made), (go_on, end) = os.pipe(), os.pipe()
    errors = {
        "it may not": PermissionError(13, "Permission denied"),  # another user's process, or a sandbox
        "too many open files": OSError(24, "Too many open files"),
    }
    if why in errors:
        process = fork(first)
        os.read(made_here, 1)
        monkeypatch.setattr(os, "open", mock.Mock(side_effect=errors[why]))
    else:
        store, name = ranks.private.default_store(), f"torch_fastdet/images/{ranks._machine()}/decoded/"
        store.add(name + hashlib.sha256(b"a").hexdigest() + "/0/asked", 1)
        monkeypatch.setattr(ranks, "WAIT", 0.1)
        if why == "has none":
            store.set(name + hashlib.sha256(b"a").hexdigest() + "/0", "null")
    with caplog.at_level("WARNING", "torch_fastdet"):
        memory = shared_by_ranks(["a"], [(5, 7)] * 4, lambda: 2 * (105 + 128))
    monkeypatch.undo()
    assert memory is None
    (record,) = caplog.records
    assert record.message.startswith("loader_optim: the original loader runs on rank 1, because there is no memory")
    if why in errors:
        os.write(end, b"x")
        assert exit_status(process) == 0


def test_a_rank_without_files_does_not_take_the_memory_of_one_that_keeps_them(two_ranks, tmp_path):
    """The ranks' images have other places: YOLOv5's ``check_cache_ram`` may decide differently on each rank."""
    files = Files.of([str(tmp_path / "a.jpg"), ""], [(5, 7)] * 2, [AS_IT_IS] * 2)
    first = shared_by_ranks(["a"], [(5, 7)] * 2, budget, files)
    assert first.put(1, make_image(5, 7, 1), (5, 7))

    def other():
        memory = shared_by_ranks(["a"], [(5, 7)] * 2, budget)
        assert memory.get(1) is None and memory.put(0, make_image(5, 7), (5, 7))

    assert exit_status(fork(other)) == 0
    assert first.get(0) is None and np.array_equal(first.get(1), make_image(5, 7, 1))


def test_ranks_without_a_process_group_share_the_budget(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun's
    assert shared_by_ranks(["a"], [(5, 7)] * 4, lambda: 2 * (105 + 128)).places == 2


# Where memory is refused ----------------------------------------------------------------------------------------------


def little_room():
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30),) * 2)
    assert 0 < host_budget() <= 1 << 29  # the half of it


def no_memfd():
    mock.patch.object(os, "memfd_create", side_effect=PermissionError(1, "Operation not permitted")).start()


REFUSALS = {
    "ulimit -v": (little_room, "Cannot allocate memory"),
    "ulimit -f": (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2), "File too large"),
    "seccomp": (no_memfd, "Operation not permitted"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_system_that_refuses_memory_is_one_line(how, caplog):
    refuse, why = REFUSALS[how]

    def ask():
        refuse()
        assert shared_by_ranks(["a"], [(640, 640)] * 2000, lambda: 1 << 40) is None
        (record,) = caplog.records
        assert record.message.startswith(
            "loader_optim: the original loader runs, because there is no memory to share: "
        )
        assert why in record.message

    with caplog.at_level("WARNING", "torch_fastdet"):
        assert exit_status(fork(ask)) == 0


def test_data_sets_that_are_refused_memory_are_one_line(monkeypatch, caplog):
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with caplog.at_level("WARNING", "torch_fastdet"):
        assert [shared_by_ranks([name], [(5, 7)], budget) for name in ("train", "val")] == [None, None]
    assert len(caplog.records) == 1


def test_each_rank_that_is_refused_memory_says_so(two_ranks, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    with caplog.at_level("WARNING", "torch_fastdet"):
        assert shared_by_ranks(["a"], [(5, 7)], budget) is None
    (record,) = caplog.records
    assert record.message.startswith("loader_optim: the original loader runs on rank 1, because there is no memory")
