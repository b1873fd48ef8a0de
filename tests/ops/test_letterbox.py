"""Compare the letterbox formula with the letterboxes and scale_boxes of both frameworks, over random sizes."""

import numpy as np
import pytest
import torch

from torch_fastdet import ops
from torch_fastdet.ops.letterbox import place

pytestmark = pytest.mark.cpu
SCRIPTED = torch.jit.script(place)
GREY = 114


def sizes(count: int):
    """Yield sizes of images and inputs: some fit exactly, some leave half a pixel, some shrink a side to nothing."""
    random = np.random.default_rng(0)
    for _ in range(count):
        yield tuple(random.integers(1, 130, 2).tolist()), tuple((random.integers(1, 9, 2) * 16).tolist())
    yield from [((64, 96), (64, 96)), ((128, 192), (64, 96)), ((1, 129), (64, 64)), ((65, 64), (64, 64))]


def rectangle(image: np.ndarray) -> tuple[int, int, int, int]:
    """Return the height, width, top and left of the area inside the border."""
    rows, columns = (np.flatnonzero((image != GREY).any((2, 1 - axis))) for axis in (0, 1))
    return len(rows), len(columns), int(rows[0]), int(columns[0])


def test_places_as_ultralytics():
    LetterBox = pytest.importorskip("ultralytics.data.augment", exc_type=ImportError).LetterBox
    for shape, size in sizes(100):
        image = LetterBox(size)(image=np.zeros((*shape, 3), np.uint8))
        placed = place(shape, size)
        assert rectangle(image) == placed[:4] and image.shape[:2] == placed.size, (shape, size)
        assert SCRIPTED(list(shape), list(size)) == placed


def test_places_as_yolov5():
    cv2 = pytest.importorskip("cv2", exc_type=ImportError)
    letterbox = pytest.importorskip("yolov5.utils.augmentations", exc_type=ImportError).letterbox
    for shape, size in sizes(100):
        image = np.zeros((*shape, 3), np.uint8)
        gain = min(size[0] / shape[0], size[1] / shape[1])
        if min(round(side * gain) for side in shape) == 0:
            with pytest.raises(cv2.error):
                letterbox(image, size, auto=False)
            continue
        boxed, _, _ = letterbox(image, size, auto=False)
        placed = place(shape, size)
        assert rectangle(boxed) == placed[:4] and boxed.shape[:2] == placed.size, (shape, size)


@pytest.mark.parametrize("host", ["yolov5", "ultralytics"])
def test_boxes_come_back_as_the_host_brings_them(host):
    """Boxes equal the framework's in float64, up to rounding."""
    module = {"yolov5": "yolov5.utils.general", "ultralytics": "ultralytics.utils.ops"}[host]
    scale_boxes = pytest.importorskip(module, exc_type=ImportError).scale_boxes
    boxes = torch.rand(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 140
    for shape, size in sizes(100):
        want = scale_boxes(size, boxes.clone(), shape)
        got = ops.scale_boxes(list(size), boxes, list(shape), rounding=host)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-9)
