"""JPEG files in place of decoded pictures: what a data set's take, reading one, and decoding one on the CPU.

A decoded picture takes ten times the memory of its file. So where batches are made on a GPU, a loader process reads a file once,
checks it and packs it (:func:`torch_fastdet.ops.jpeg_pack`), and the GPU decodes what a batch shows of it
(:func:`torch_fastdet.ops.jpeg_decode_`), each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from torch_fastdet import ops

SUFFIXES = (".jpg", ".jpeg")
#: Bytes beside a file, at most: its header and tables, and an index of 10 bytes for 256 pixels of a file without subsampling.
BESIDE = 2048
INDEX = 10 / 256


def is_jpeg(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def packed_size(files: Sequence[str], shapes: np.ndarray) -> int:
    """Bytes that files will take when they are packed, or somewhat more. "", and what is not there, takes none."""
    total = 0
    for path, pixels in zip(files, shapes.prod(1).tolist(), strict=True):
        if path:
            try:
                total += os.stat(path).st_size + BESIDE + int(pixels * INDEX)
            except OSError:
                continue  # stock says what is wrong when it reads it
    return total


def read_jpeg(path: str) -> tuple[np.ndarray, tuple[int, int]] | str:
    """A file, packed, and its picture's (height, width); or why OpenCV has to decode it."""
    try:
        file = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        return str(error)
    storage, pictures, refusals = ops.jpeg_pack([torch.from_numpy(file)])
    if refusals[0]:
        return refusals[0]
    offset, size, height, width = pictures[0].tolist()
    return storage[offset : offset + size].numpy(), (height, width)


def decode_packed(packed: np.ndarray, height: int, width: int) -> np.ndarray:
    """The picture, uint8 (height, width, 3), B G R."""
    storage = torch.from_numpy(packed)
    out = torch.empty(height * width * 3, dtype=torch.uint8)
    plan, sizes = ops.jpeg_plan(storage, torch.tensor([[0, 0, 0, 0, width, height, 0, 3 * width]]))
    ops.jpeg_decode_(out, storage, plan, sizes)
    return out.numpy().reshape(height, width, 3)
