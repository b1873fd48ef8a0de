"""Compare images without pixels with the same operations on arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")

from torch_fastdet.images.image_memory import ImageMemory  # noqa: E402
from torch_fastdet.images.recorder import CannotRecord, Recorder  # noqa: E402


def make_image(height, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def recorder():
    memory = ImageMemory([(40, 60), (30, 50)], 1 << 20)
    for index, (height, width) in enumerate(memory.shapes.tolist()):
        assert memory.put(index, make_image(height, width, index), (height, width))
    return Recorder(memory, "The host")


def pair(recorder):
    return recorder.of_memory(0), recorder.of_memory(1)


def arrays():
    return make_image(40, 60, 0), make_image(30, 50, 1)


def canvas(a, b):
    out = np.full((70, 80, 3), 114, dtype=np.uint8)
    out[:40, 20:] = a
    out[-30:, 5:55] = b
    out[30:40, 0:10] = b[3:13, 7:17]
    return out


OPERATIONS = {
    "whole": lambda a, b: a,
    "canvas": canvas,
    "part of a canvas": lambda a, b: canvas(a, b)[25:60, 3:44],
    "many placements": lambda a, b: many(canvas(a, b), b),
    "flips": lambda a, b: np.flipud(np.fliplr(a)),
    "part of a flip": lambda a, b: np.fliplr(canvas(a, b))[3:40, 2:50],
    "flip on a canvas": lambda a, b: canvas(a, np.flipud(b)),
    "mixup": lambda a, b: (a * 0.3 + np.fliplr(a) * (1 - 0.3)).astype(np.uint8),
    "mixup of a changed part": lambda a, b: (
        (brighter(a * 0.3) + np.fliplr(a) * (1 - 0.3)).clip(0, 255).astype(np.uint8)
    ),
    "three parts": lambda a, b: (a * 0.25 + np.fliplr(a) * 0.75 + np.flipud(a) * 0.5).astype(np.float32),
    "one part": lambda a, b: (a * 0.3).astype(np.uint8, copy=False),
    "sum": lambda a, b: a * 0.3 + np.fliplr(a) * 0.5,
    "mean": lambda a, b: np.array([a.mean(), np.asarray(b).max()]),
    "negative": lambda a, b: 255 - a,
    "elements": lambda a, b: a[::2, 3],
    "channels": lambda a, b: a[..., ::-1],
    "planes": lambda a, b: canvas(a, b).transpose((2, 0, 1))[::-1],
    "copy": lambda a, b: changed(a.copy(), a),
    "stack": lambda a, b: np.stack([a, np.flipud(a)]),
    "in place": lambda a, b: added(canvas(a, b)),
}


def many(out, b):
    for step in range(20):
        out[step : step + 3, step : step + 5] = b[2 * step % 20 : 2 * step % 20 + 3, step : step + 5]
    return out


def changed(copy, original):
    copy[3:9, 4:10] = (1, 2, 3)
    return np.stack([copy, original])


def brighter(weighted):
    weighted[:9] *= 2
    return weighted


def added(out):
    out += 7
    return out


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_pixels(recorder, name):
    operation = OPERATIONS[name]
    want = operation(*arrays())
    recorded = recorder.copies.of(operation)
    got = recorded(*pair(recorder))
    assert got.shape == want.shape and got.dtype == want.dtype and got.ndim == want.ndim and len(got) == len(want)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(recorder.memory.get(0), make_image(40, 60, 0))  # nobody has written to it


SEEN = None


def remembering(image):
    global SEEN
    SEEN = np.float32(len(image))


def test_a_function_that_sets_a_global_sets_its_own_modules(recorder):
    """A copy of a function has its own globals."""
    assert recorder.copies.of(remembering) is remembering
    assert recorder.copies.of(brighter_by_numpy) is not brighter_by_numpy


def brighter_by_numpy(image):
    return np.add(image, 1)


def test_a_view_that_is_in_use_is_not_written_past(recorder):
    a, _ = pair(recorder)
    part = a[3:20, 4:30]
    with pytest.raises(CannotRecord, match="of which a view is in use"):
        a[0:5, 0:5] = recorder.of_memory(1)[0:5, 0:5]
    assert not np.asarray(part).flags.writeable
    del part
    a[0:5, 0:5] = recorder.of_memory(1)[0:5, 0:5]
    want, b = arrays()
    want[0:5, 0:5] = b[0:5, 0:5]
    np.testing.assert_array_equal(np.asarray(a), want)


def test_where_the_host_fails_stock_makes_the_items_from_the_same_states(recorder):
    def fails():
        np.random.rand(), torch.rand(1)
        raise ValueError("a stand-in")

    torch.manual_seed(3), np.random.seed(3)
    want = [np.random.rand(), torch.rand(1).item()]
    torch.manual_seed(3), np.random.seed(3)
    assert recorder.items(fails, lambda: [np.random.rand(), torch.rand(1).item()]) == want
    assert recorder.refusal == "ValueError: a stand-in"
    assert recorder.items(fails, lambda: [1]) == [1]


def test_an_error_of_the_host_is_the_hosts(recorder):
    def fails():
        raise FileNotFoundError("7.jpg")

    with pytest.raises(FileNotFoundError, match=r"7\.jpg") as error:
        recorder.items(fails, fails)
    assert error.value.__context__ is None and recorder.refusal is None
