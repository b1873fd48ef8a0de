"""Compare the image operators with OpenCV's own calls: augmentation of a training batch, letterbox and resize.

The baseline is what YOLOv5 does to an image in memory, written with cv2 and numpy, in one process: mosaic, warpAffine,
HSV, flip and HWC to CHW. Beside a GPU it also runs on the host, without the copy to the device. The letterbox is also
timed with images spread over threads, one for each core.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks import harness, work
from torch_fastdet import ops

SIDE = 640


def photographs(count: int, height: int, width: int) -> np.ndarray:
    """Return smooth shapes with some noise, uint8 HWC: neighboring pixels are alike, as in images, and none is gray."""
    import cv2

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 20, 20, 3)).astype(np.float32)
    smooth = np.stack([cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC) for image in coarse])
    return np.clip(smooth + rng.normal(0, 4, (1, height, width, 3)), 0, 255).astype(np.uint8)


def scratch_low(batch: int, images: int, perspective: float = 0.0) -> dict[str, np.ndarray]:
    """Return tables of hyp.scratch-low: mosaics, translation and scale, HSV and left-right flips."""
    rng = np.random.default_rng(0)
    placements, layers, matrices, rows = [], [], [], []
    for n in range(batch):
        xc, yc = (int(v) for v in rng.uniform(SIDE / 2, SIDE * 1.5, 2))
        for i in range(4):
            x, y = (xc if i % 2 else max(xc - SIDE, 0)), (yc if i // 2 else max(yc - SIDE, 0))
            w, h = (min(SIDE, 2 * SIDE - xc) if i % 2 else xc - x), (min(SIDE, 2 * SIDE - yc) if i // 2 else yc - y)
            source = 0 if i % 2 else SIDE - w, 0 if i // 2 else SIDE - h
            placements.append((0, int(rng.integers(images)) * SIDE * SIDE * 3, SIDE, SIDE, *source, x, y, w, h))
        scale, (tx, ty) = rng.uniform(0.5, 1.5), rng.uniform(0.4, 0.6, 2) * SIDE
        # Perspective and scale act on a mosaic whose center is the origin.
        px, py = rng.uniform(-perspective, perspective, 2)
        warp = np.array([[scale, 0, 0], [0, scale, 0], [px, py, 1]]) @ [[1, 0, -SIDE], [0, 1, -SIDE], [0, 0, 1]]
        matrices.append((np.array([[1, 0, tx], [0, 1, ty], [0, 0, 1]]) @ warp).reshape(-1))
        layers.append((4 * n, 4, 2 * SIDE, 2 * SIDE, 2 if perspective else 1, -1))
        rows.append((n, -1, int(rng.integers(2)), n))
    gains = rng.uniform(-1, 1, (batch, 3)) * (0.015, 0.7, 0.4) + 1
    level = np.arange(256)
    tables = [[level * r[0] % 180, *(np.clip(level * r[i], 0, 255) for i in (1, 2))] for r in gains]
    return {
        "placements": np.array(placements, np.int64),
        "layers": np.array(layers, np.int64),
        "matrices": np.array(matrices, np.float64),
        "images": np.array(rows, np.int64),
        "tables": np.array(tables).astype(np.uint8),
    }


def with_opencv(sources: np.ndarray, plan: dict[str, np.ndarray]) -> torch.Tensor:
    """Make the batch with the calls that YOLOv5 makes."""
    import cv2

    batch = []
    for layer, _, flags, table in plan["images"]:
        first, count, height, width, _, _ = plan["layers"][layer]
        canvas = np.full((height, width, 3), 114, np.uint8)
        for _, offset, _, _, sx, sy, x, y, w, h in plan["placements"][first : first + count]:
            canvas[y : y + h, x : x + w] = sources[offset // (SIDE * SIDE * 3)][sy : sy + h, sx : sx + w]
        matrix = plan["matrices"][layer].reshape(3, 3)
        border: dict[str, Any] = {"dsize": (SIDE, SIDE), "borderValue": (114, 114, 114)}
        affine = plan["layers"][layer][4] == 1
        im = cv2.warpAffine(canvas, matrix[:2], **border) if affine else cv2.warpPerspective(canvas, matrix, **border)
        planes = zip(cv2.split(cv2.cvtColor(im, cv2.COLOR_BGR2HSV)), plan["tables"][table])
        im = cv2.cvtColor(cv2.merge([cv2.LUT(plane, levels) for plane, levels in planes]), cv2.COLOR_HSV2BGR)
        im = np.fliplr(im) if flags & 1 else im
        batch.append(torch.from_numpy(np.ascontiguousarray(im.transpose(2, 0, 1)[::-1])))
    return torch.stack(batch)


def letterbox_with_opencv(images: np.ndarray, height: int, width: int, pool: ThreadPoolExecutor | None) -> torch.Tensor:
    """Letterbox in a loop, or spread over the threads of a pool."""
    import cv2

    top = (SIDE - height) // 2
    batch = np.empty((len(images), 3, SIDE, SIDE), np.uint8)

    def one(index: int) -> None:
        im = cv2.resize(images[index], (width, height), interpolation=cv2.INTER_LINEAR)
        im = cv2.copyMakeBorder(im, top, SIDE - height - top, 0, 0, cv2.BORDER_CONSTANT, value=(114, 114, 114))
        batch[index] = im.transpose(2, 0, 1)[::-1]

    for _ in map(one, range(len(images))) if pool is None else pool.map(one, range(len(images))):
        pass
    return torch.from_numpy(batch)


def compare_letterbox(
    report: harness.Report, case: str, ours: Callable[[], Any], images: np.ndarray, height: int, **options: Any
) -> None:
    """Compare letterboxes without OpenCV's threads. Beside a GPU stock uses the host's clock and ends with uint8."""
    import cv2

    cores, threads = len(os.sched_getaffinity(0)), cv2.getNumThreads()
    cv2.setNumThreads(0)
    with ThreadPoolExecutor(cores) as pool:
        stock = {
            "cv2 and numpy": lambda: letterbox_with_opencv(images, height, SIDE, None),
            f"cv2 and numpy, {cores} threads": lambda: letterbox_with_opencv(images, height, SIDE, pool),
        }
        cuda = report.device.type == "cuda"
        report.compare(case, {"torch_fastdet": ours} | ({} if cuda else stock), **options)
        if cuda and not report.prepare:
            for name, times in harness.time_cpu(stock, 11).items():
                report.add(case, name, "call", times[1:], options["bytes"])
            report.write()
    cv2.setNumThreads(threads)


def compare_augmentation(report: harness.Report, perspective: float, options: dict[str, Any]) -> None:
    cuda = report.device.type == "cuda"
    warp, lanes = ops.opencv_rules()
    batch, kept = (64, 256) if cuda else (8, 16)
    images = photographs(kept, SIDE, SIDE)
    plan = scratch_low(batch, kept, perspective)
    storage = torch.from_numpy(images.reshape(-1)).to(report.device)
    tables = {name: torch.from_numpy(table).to(report.device) for name, table in plan.items()}
    first = (tables["placements"], tables["layers"], tables["matrices"], tables["images"])
    out = torch.empty(batch, 3, SIDE, SIDE, dtype=torch.uint8, device=report.device)

    def ours() -> None:
        ops.image_augment_(out, [storage], *first, None, tables["tables"], None, warp, lanes)

    if not report.prepare:
        ours()
        assert warp == "float" or torch.equal(out.cpu(), with_opencv(images, plan))
    variants: dict[str, Callable[[], Any]] = {"torch_fastdet": ours}
    if not cuda:
        variants["cv2 and numpy"] = lambda: with_opencv(images, plan)
    report.compare(
        f"mosaic, {'perspective' if perspective else 'affine'}, HSV, flip, batch {batch} of {SIDE}x{SIDE}",
        variants,
        bytes=work.augmented_images(batch, SIDE).bytes,
        **options,
    )


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    options: dict[str, Any] = {"repetitions": 30 if cuda else 10, "inner": 5 if cuda else 1}
    for perspective in (0.0, 0.0005):
        compare_augmentation(report, perspective, options)

    height, width, count = 1080, 1920, 32 if cuda else 8
    new_height = height * SIDE // width
    large = photographs(count, height, width)
    storage = torch.from_numpy(large.reshape(-1)).to(report.device)
    rows = [
        (0, i * height * width * 3, height, width, width * 3, new_height, SIDE, (SIDE - new_height) // 2, 0, 0)
        for i in range(count)
    ]
    letterboxes = torch.tensor(rows, device=report.device)
    dtype = torch.float16 if cuda else torch.uint8
    boxed = torch.empty(count, 3, SIDE, SIDE, dtype=dtype, device=report.device)
    compare_letterbox(
        report,
        f"letterbox, batch {count} of 1080p to {SIDE}x{SIDE}",
        lambda: ops.image_letterbox_(boxed, [storage], letterboxes),
        large,
        new_height,
        bytes=work.letterboxed_images(count, SIDE, boxed.element_size()).bytes,
        **options,
    )


if __name__ == "__main__":
    harness.run("image", measure)
