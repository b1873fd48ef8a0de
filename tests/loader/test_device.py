"""The pictures that a GPU keeps."""

import numpy as np
import torch

from torch_fastdet.loader.device import DevicePictures
from torch_fastdet.loader.memory import PictureMemory


def test_pictures_first_asked_for_in_inference_mode_are_filled_outside_of_it(cuda):
    """YOLOv5 validates in inference mode, which is the thread's own: the thread that fills the pictures has none."""
    memory = PictureMemory([(4, 6)], 1 << 20)
    memory.put(0, np.full((4, 6, 3), 7, dtype=np.uint8), (4, 6))
    with torch.inference_mode():
        pictures = DevicePictures(memory, torch.device("cuda", torch.cuda.current_device()))
    pictures._cache[:72].copy_(memory.tensor()[:72])
    assert (pictures._cache[:72] == 7).all()
