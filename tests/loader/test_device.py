"""The pictures that a GPU keeps."""

from types import SimpleNamespace

import numpy as np
import torch

from torch_fastdet.loader.device import DevicePictures
from torch_fastdet.loader.memory import PictureMemory
from torch_fastdet.loader.plan import Layer, Picture, Source, pack


def test_pictures_first_asked_for_in_inference_mode_are_filled_outside_of_it(cuda):
    """YOLOv5 validates in inference mode, which is the thread's own: the thread that fills the pictures has none."""
    memory = PictureMemory([(4, 6)], 1 << 20)
    memory.put(0, np.full((4, 6, 3), 7, dtype=np.uint8), (4, 6))
    with torch.inference_mode():
        pictures = DevicePictures(memory, torch.device("cuda", torch.cuda.current_device()))
    pictures._cache[:72].copy_(memory.tensor()[:72])
    assert (pictures._cache[:72] == 7).all()


def test_pictures_wait_for_what_had_their_memory(cuda):
    """The cache is made on the loop's stream, which may have work to do, and is filled on the loader's."""
    size = 512
    memory = PictureMemory([(size, size)], 1 << 20)
    memory.put(0, np.full((size, size, 3), 7, dtype=np.uint8), (size, size))
    source = Source(0, size, size)
    plan = pack([Picture(size, size, [Layer(size, size, [(source, 0, 0, 0, 0, size, size)])])], memory)
    before = torch.empty(memory.nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)
    before.fill_(1)
    del before
    pictures = DevicePictures(memory, torch.device("cuda", torch.cuda.current_device()))
    with torch.cuda.stream(torch.cuda.Stream()):
        batch = pictures(plan)
    torch.cuda.synchronize()
    assert (batch == 7).all() and (pictures._cache == 7).all()


def test_pages_are_unlocked_behind_the_copies_from_there(monkeypatch):
    done: list = []
    cudart = SimpleNamespace(cudaHostUnregister=lambda address: done.append(address))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    pictures = object.__new__(DevicePictures)
    pictures._size, pictures._pinned = 0, {0: True, 1: False}
    pictures._host = torch.zeros(8, dtype=torch.uint8)
    pictures._ready = SimpleNamespace(synchronize=lambda: done.append("waited"))
    wanted = ["waited", pictures._host.data_ptr()]
    del pictures
    assert done == wanted


def test_ends_while_pictures_are_uploaded(cuda, monkeypatch):
    """Without a cache each batch reads page-locked memory of the host, which goes with the loader."""
    monkeypatch.setenv("TORCH_FASTDET_GPU_CACHE", "0")
    size = 1024
    memory = PictureMemory([(size, size)], 1 << 23)
    memory.put(0, np.full((size, size, 3), 7, dtype=np.uint8), (size, size))
    layer = Layer(size, size, [(Source(0, size, size), 0, 0, 0, 0, size, size)])
    pictures = DevicePictures(memory, torch.device("cuda", torch.cuda.current_device()))
    assert (pictures(pack([Picture(size, size, [layer])], memory)) == 7).all()  # which locks the pages
    torch.cuda._sleep(200_000_000)
    batch = pictures(pack([Picture(size, size, [layer])], memory))
    assert pictures._pinned == {0: True}
    del pictures, memory
    assert (batch == 7).all()
