"""Test the images that a GPU keeps."""

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torch_fastdet import memory
from torch_fastdet.images import finish, loop
from torch_fastdet.images.finish import DeviceImages, Turns
from torch_fastdet.images.image_memory import ImageMemory, JpegFiles
from torch_fastdet.images.jpeg_files import AS_IT_IS, Files
from torch_fastdet.images.plan import Source, pack, whole


@pytest.fixture(autouse=True)
def budget(monkeypatch):
    """Keep images from the first batch on."""
    monkeypatch.setenv("TORCH_FASTDET_GPU_CACHE", "1G")


def filled(*shape, values=(7,)):
    """Return a memory of images of one shape, each filled with one value."""
    memory = ImageMemory([shape] * len(values), 1 << 23)
    for index, value in enumerate(values):
        memory.put(index, np.full((*shape, 3), value, dtype=np.uint8), shape)
    return memory


def images_of(memory):
    return DeviceImages(memory, torch.device("cuda", torch.cuda.current_device()))


def plan_of(memory, index=0):
    """Return a batch of this image as it is."""
    return pack([whole(Source(index, *memory.shape(index)))], memory)


def test_images_first_asked_for_in_inference_mode_are_filled_outside_of_it(cuda):
    """Inference mode is per thread: YOLOv5 validates in it, but the thread that fills the images does not."""
    memory = filled(4, 6)
    with torch.inference_mode():
        images = images_of(memory)
    images._cache[:72].copy_(memory.tensor()[:72])
    assert (images._cache[:72] == 7).all()


def test_images_wait_for_what_had_their_memory(cuda):
    """The loop's stream, which may still be busy, makes the cache, and the loader's stream fills it."""
    memory = filled(512, 512)
    plan = plan_of(memory)
    before = torch.empty(memory.nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    before.fill_(1)
    del before
    images = images_of(memory)
    with torch.cuda.stream(torch.cuda.Stream()):
        batch = images(plan)
    torch.cuda.synchronize()
    assert (batch == 7).all() and (images._cache == 7).all()


@pytest.fixture
def pretended_stream(monkeypatch):
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda event: None))


def test_no_memory_waits_for_images_that_never_stay(pretended_stream):
    """Images without a place in host memory travel as pixels; files are decoded on the GPU wherever they are read."""
    shapes, gpu = [(4, 6)] * 3, torch.device("cpu")
    images = DeviceImages(ImageMemory(shapes, budget=72), gpu)
    assert images.held() == 72 and images._fits.tolist() == [True, False, False]
    files = JpegFiles(Files.of(["", "", "a.jpg"], shapes, [AS_IT_IS] * 3), budget=0)
    images = DeviceImages(ImageMemory(shapes, budget=72, jpegs=files), gpu)
    assert images.held() == 128 + 72 and images._fits.tolist() == [True, False, True]


@pytest.mark.parametrize(
    "total, free, kept",
    [(80 << 30, 70 << 30, 3), (8 << 20, 2 << 20, 2), (8 << 20, (1 << 20) + 4000, 0), (8 << 20, 1 << 19, 0)],
    ids=["a large card", "a sixteenth of a small one", "little room for one", "a card that the batch fills"],
)
def test_images_take_what_the_first_steps_leave_free(pretended_stream, monkeypatch, caplog, total, free, kept):
    monkeypatch.delenv("TORCH_FASTDET_GPU_CACHE")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    host, size = ImageMemory([(256, 256)] * 3, 1 << 20), 256 * 256 * 3
    images = DeviceImages(host, torch.device("cpu"))
    assert images.held() == 0 and "as far as the first steps leave memory free" in images.how_many()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))  # behind the first steps
    with caplog.at_level("INFO", "torch_fastdet"):
        for _batch in range(finish.FIRST_BATCHES):
            assert images.held() == 0 and not images._fits.any()
            images._count()
    assert images._fits.tolist() == [True] * kept + [False] * (3 - kept) and images.held() == kept * size
    assert total - free + images.held() <= max(total - free, total * 7 / 8), "an eighth stays free"
    (line,) = (record.message for record in caplog.records)
    assert line == f"loader_optim: the GPU keeps {memory.words(kept * size)} of decoded images"


def test_images_are_given_back(pretended_stream, monkeypatch):
    """When memory runs out, batches upload the images that they show, and the budget is free again."""
    monkeypatch.setenv("TORCH_FASTDET_GPU_CACHE", "200")
    host, gpu = ImageMemory([(4, 6)] * 2, 1 << 20), torch.device("cpu")
    gc.collect()
    before = memory.gpu_budget(gpu)
    images = DeviceImages(host, gpu)
    assert images.held() == host.nbytes and images._fits.all() and memory.gpu_budget(gpu) == before - host.nbytes
    images._here[0] = True
    assert images.offer() == "0.0 MiB of images"
    images.release()
    assert not images.held() and not images.offer() and not (images._fits | images._here).any()
    assert memory.gpu_budget(gpu) == before


def test_batches_are_right_behind_images_that_were_given_back(cuda):
    host = filled(64, 64, values=(7, 8))
    images = images_of(host)
    before = images(plan_of(host, 0))
    memory.release(images.device)
    assert images.held() == 0
    for index in (0, 1):
        assert (images(plan_of(host, index)) == 7 + index).all()
    assert (before == 7).all()


def test_a_batch_that_finds_no_memory_gives_the_images_back(cuda, monkeypatch):
    host = filled(64, 64)
    images = images_of(host)
    augment = finish.ops.image_augment

    def full(sources, *args, **kwargs):
        if sources[0].numel():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return augment(sources, *args, **kwargs)

    monkeypatch.setattr(finish.ops, "image_augment", full)
    batch = images(plan_of(host))
    assert (batch == 7).all() and images.held() == 0


def test_two_threads_take_turns():
    """What one thread notes as uploaded is recorded before another thread waits for it."""
    events, inside, go_on = [], threading.Event(), threading.Event()
    turns = Turns(SimpleNamespace(record=lambda stream: events.append("record")))

    def bring():
        with turns.turn(SimpleNamespace(wait_event=lambda event: events.append("wait"))):
            events.append("bring")
            inside.set()
            go_on.wait(10)

    threads = [threading.Thread(target=bring) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert events == ["wait", "bring", "record"] * 2


def test_the_next_turn_waits_for_one_that_failed():
    """Memory may run out after the first uploads, which have been noted."""
    events = []
    turns = Turns(SimpleNamespace(record=events.append))
    stream = SimpleNamespace(wait_event=lambda event: None)
    with pytest.raises(RuntimeError, match="no memory"), turns.turn(stream):
        raise RuntimeError("no memory")
    assert events == [stream]
    with turns.turn(stream):
        pass
    assert events == [stream, stream]


def test_two_threads_make_one_finisher(monkeypatch):
    made, begun = [], threading.Barrier(2)

    class Finisher:
        images = SimpleNamespace(how_many=lambda: "nothing")

        def __init__(self, *_):
            made.append(self)
            threading.Event().wait(0.1)

    loading = loop.PlannedLoading(ImageMemory([(4, 6)], 1 << 20), 0, on_gpu=True, device=torch.device("cpu"))
    monkeypatch.setattr(loop, "Finisher", Finisher)
    found = []

    def ask():
        begun.wait(10)
        found.append(loading.finisher)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1 and found == made * 2


def test_ends_while_images_are_uploaded(cuda, monkeypatch):
    """Without a cache each batch reads pinned memory, which may be freed with the loader."""
    monkeypatch.setenv("TORCH_FASTDET_GPU_CACHE", "0")
    memory = filled(1024, 1024)
    images = images_of(memory)
    assert (images(plan_of(memory)) == 7).all()
    torch.cuda._sleep(200_000_000)
    batch = images(plan_of(memory))
    del images, memory
    assert (batch == 7).all()
