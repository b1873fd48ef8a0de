"""``python -m tests.fuzz.jpeg --count 50000 --device cuda`` decodes damaged JPEG files and damaged packed JPEGs.

A file is either refused or decoded to OpenCV's pixels. Whatever a packed JPEG contains, nothing is written outside its pixels.
"""

import argparse
import sys

import numpy as np
import torch

from tests.ops.test_jpeg import opencv, random_file, tensor
from torch_fastdet import ops

BATCH = 100
#: The program damages this many files again and again.
SOUND = 500
#: These bytes around each image must stay unwritten.
GAP, UNTOUCHED = 64, 9


def damaged(rng, data):
    """Return a file with one to four bytes changed, inserted or removed, mostly in the scan, or the beginning of it."""
    data = bytearray(data)
    begin = data.index(b"\xff\xda") if rng.random() < 0.8 else 2
    for at in rng.integers(begin, len(data), int(rng.integers(1, 5))).tolist():
        match int(rng.integers(12)):
            case 0:
                data.insert(at, int(rng.integers(256)))
            case 1:
                del data[at : at + 1]
            case 2 if rng.random() < 0.2:
                del data[at:]
            case 3:
                data[at : at + 1] = b"\xff"
            case _:
                data[at : at + 1] = bytes([int(rng.integers(256))])
    return bytes(data)


def run(count, seed, device):
    """Return the number of files that were accepted."""
    rng = np.random.default_rng(seed)
    sound = [random_file(rng) for _ in range(min(SOUND, count))]
    taken = 0
    for begin in range(0, count, BATCH):
        files = [damaged(rng, sound[rng.integers(len(sound))]) for _ in range(min(BATCH, count - begin))]
        storage, images, refusals = ops.jpeg_pack([tensor(data) for data in files])
        files = [data for data, refusal in zip(files, refusals, strict=True) if not refusal]
        offset, _, height, width, _ = images[images[:, 0] >= 0].unbind(1)
        taken += len(files)
        ends = (height * width * 3 + GAP).cumsum(0)
        begins, zero = ends - height * width * 3, torch.zeros_like(offset)
        plan, sizes = ops.jpeg_plan(
            storage, torch.stack((offset, offset, zero, zero, width, height, begins, 3 * width), 1)
        )
        broken = storage.clone()
        at = torch.from_numpy(rng.integers(0, len(broken), 200))
        broken[at] = torch.from_numpy(rng.integers(0, 256, 200).astype(np.uint8))
        written = torch.zeros(int(ends[-1]) + GAP, dtype=torch.bool)
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            written[first:last] = True
        for packed in (storage, broken):
            out = torch.full((len(written),), UNTOUCHED, dtype=torch.uint8, device=device)
            try:
                ops.jpeg_decode_(out, packed.to(device), plan.to(device), sizes)
            except RuntimeError:
                if packed is storage or device.type != "cpu":
                    raise
                continue
            out = out.cpu()
            assert (out[~written] == UNTOUCHED).all(), f"seed {seed}, files from {begin}: written beside an image"
            for data, first, last in (
                zip(files, begins.tolist(), ends.tolist(), strict=True) if packed is storage else ()
            ):
                wanted = opencv(data)
                same = wanted is not None and np.array_equal(out[first:last].numpy().reshape(wanted.shape), wanted)
                assert same, f"seed {seed}, files from {begin}: a wrong pixel in {data.hex()}"
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    taken = run(options.count, options.seed, torch.device(options.device))
    print(f"{options.count} damaged: {options.count - taken} refused, {taken} with OpenCV's pixels")


if __name__ == "__main__":
    sys.exit(main())
