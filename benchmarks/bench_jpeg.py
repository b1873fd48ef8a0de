"""Time JPEG files to pixels: whole images, parts that mosaics show, one image from its bytes, and beside a step.

The files are parts of photographs with camera noise, 640x480 or 480x640, 4:2:0, quality 90 (about 95 kB), 95 (150 kB),
and 90 with optimized tables. torch_fastdet decodes packed JPEGs in the GPU's memory, as its loader does. OpenCV, on one
core or with a thread for each, and nvJPEG begin with the files' bytes and are timed by the host's clock.
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
SHORT = 480
NVJPEG = "torchvision nvJPEG"
Rectangle = tuple[int, int, int, int]  # x, y, width, height


def photograph(number: int) -> np.ndarray:
    """Return an enlarged part of one of scikit-learn's photographs, with camera noise; every third stands upright."""
    import cv2
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(number)
    source = load_sample_images().images[number % 2][:, :: 1 - 2 * int(rng.integers(2)), ::-1]
    height, width = (SIDE, SHORT) if number % 3 == 2 else (SHORT, SIDE)
    scale = max(width / source.shape[1], height / source.shape[0]) * rng.uniform(1, 1.5)
    large = cv2.resize(np.ascontiguousarray(source), None, fx=scale, fy=scale, interpolation=cv2.INTER_LANCZOS4)
    y, x = (int(rng.integers(large.shape[i] - side + 1)) for i, side in enumerate((height, width)))
    noise = rng.normal(0, 3, (height, width, 1)) + rng.normal(0, 1.5, (height, width, 3))
    return np.clip(large[y : y + height, x : x + width] + noise, 0, 255).astype(np.uint8)


def encode(images: list[np.ndarray], quality: int, optimize: bool = False) -> list[torch.Tensor]:
    import cv2

    flags = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, int(optimize)]
    return [torch.from_numpy(cv2.imencode(".jpg", image, flags)[1]) for image in images]


def visible(sizes: list[tuple[int, int]]) -> list[Rectangle]:
    """Return what mosaics of four with hyp.scratch-low (scale .5, translate .1) show of each (height, width)."""
    rng = np.random.default_rng(5)
    rectangles = []
    for n, (height, width) in enumerate(sizes):
        if n % 4 == 0:
            yc, xc = (int(v) for v in rng.uniform(SIDE / 2, SIDE * 1.5, 2))
            scale, (tx, ty) = rng.uniform(0.5, 1.5), rng.uniform(0.4, 0.6, 2) * SIDE
        # Find the image's place on the canvas of 2 x 2, and the part of the canvas that the output shows.
        left, top = (xc if n % 2 else xc - width), (yc if n % 4 >= 2 else yc - height)
        low = [max(p, 0, int(np.floor(SIDE - t / scale))) for p, t in ((left, tx), (top, ty))]
        high = [
            min(p + size, 2 * SIDE, int(np.floor(SIDE + (SIDE - 1 - t) / scale)) + 2)
            for p, size, t in ((left, width, tx), (top, height, ty))
        ]
        w, h = max(high[0] - low[0], 0), max(high[1] - low[1], 0)
        rectangles.append((low[0] - left, low[1] - top, w, h) if w and h else (0, 0, 0, 0))
    return rectangles


def opencv(file: torch.Tensor) -> np.ndarray:
    import cv2

    pixels = cv2.imdecode(file.numpy(), cv2.IMREAD_COLOR)
    assert pixels is not None
    return pixels


class Batch:
    """Hold packed JPEGs on the device and the plan that decodes a rectangle of each, in rows of 8n pixels."""

    def __init__(self, files: list[torch.Tensor], rectangles: list[Rectangle] | None, device: torch.device):
        storage, images, _ = ops.jpeg_pack(files)
        self.rows, end = [], 0
        for i, (offset, _, height, width, _) in enumerate(images.tolist()):
            x, y, w, h = rectangles[i] if rectangles else (0, 0, width, height)
            right, x = min(width, -(-(x + w) // 8) * 8), x // 8 * 8
            w = right - x if w else 0
            self.rows.append([offset, offset, x, y, w, h, end, 3 * w])
            end += 3 * w * h
        plan, self.sizes = ops.jpeg_plan(storage, torch.tensor(self.rows))
        self.storage, self.plan = storage.to(device), plan.to(device)
        self.out = torch.zeros(end, dtype=torch.uint8, device=device)
        self.bytes = work.decoded_jpegs(storage.numel(), end).bytes

    def __call__(self) -> None:
        ops.jpeg_decode_(self.out, self.storage, self.plan, self.sizes)

    def check(self, files: list[torch.Tensor]) -> None:
        self()
        pixels = self.out.cpu().numpy()
        for file, (_, _, x, y, w, h, begin, _) in zip(files, self.rows, strict=True):
            wanted = opencv(file)[y : y + h, x : x + w]
            assert np.array_equal(pixels[begin : begin + wanted.size].reshape(wanted.shape), wanted)


def peers(files: list[torch.Tensor], device: torch.device, pool: ThreadPoolExecutor) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"cv2": lambda: [opencv(file) for file in files]}
    if len(files) > 1:
        found[f"cv2, {pool._max_workers} threads"] = lambda: list(pool.map(opencv, files))
    if device.type == "cuda":
        try:
            from torchvision.io import decode_jpeg
        except ImportError:
            return found

        def nvjpeg() -> None:
            decode_jpeg(files, device=device)
            torch.cuda.synchronize()

        found[NVJPEG] = nvjpeg
    return found


def compare(report: harness.Report, case: str, batch: Batch, others: dict[str, Callable[[], Any]]) -> None:
    cuda = report.device.type == "cuda"
    options: dict[str, Any] = {"bytes": batch.bytes, "repetitions": 30 if cuda else 5, "inner": 5 if cuda else 1}
    report.compare(case, {"torch_fastdet": batch} | ({} if cuda else others), **options)
    if cuda and others and not report.prepare:
        for name, times in harness.time_cpu(others, 6).items():
            report.add(case, name, "call", times[1:], batch.bytes)
        report.write()


def beside_a_step(report: harness.Report, batch: Batch, nvjpeg: Callable[[], Any] | None) -> None:
    """Time a graph of convolutions, BatchNorm and SiLU of about 20 ms alone, and while another stream decodes 256
    images; nvJPEG decodes whole ones."""
    layers = [torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.SiLU()]
    model = torch.nn.Sequential(*layers).to(report.device, torch.float16)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(32, 64, 160, 160, device=report.device, dtype=torch.float16).to(memory_format=torch.channels_last)

    def layer() -> None:
        with torch.no_grad():
            model(x)

    one = harness.graph(layer)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        one()
    stop.record()
    stop.synchronize()
    repeats = max(1, round(20 / (start.elapsed_time(stop) / 20)))

    def layers_in_turn() -> None:
        for _ in range(repeats):
            layer()

    step = harness.graph(layers_in_turn)
    decode, side = harness.graph(batch), torch.cuda.Stream()

    def both(other: Callable[[], Any]) -> None:
        side.wait_stream(torch.cuda.current_stream())
        step()  # first: nvJPEG makes the host wait
        with torch.cuda.stream(side):
            other()
        torch.cuda.current_stream().wait_stream(side)

    variants = {"network alone": step, "torch_fastdet beside it": lambda: both(decode)}
    if nvjpeg is not None:
        variants[f"{NVJPEG} beside it"] = lambda: both(nvjpeg)
    report.compare("a step of 20 ms, a batch as mosaics show it", variants, views=("call",), repetitions=30, inner=5)


def measure(report: harness.Report) -> None:
    import cv2

    cuda = report.device.type == "cuda"
    count, cores = 256 if cuda else 8, len(os.sched_getaffinity(0))
    threads = cv2.getNumThreads()
    cv2.setNumThreads(0)
    with ThreadPoolExecutor(cores) as pool:
        images = list(pool.map(photograph, range(count)))
        kinds = {"quality 90": (90, False), "quality 95": (95, False), "quality 90, optimised tables": (90, True)}
        for number, name in [*((count, name) for name in kinds), (count // 4, "quality 90")]:
            files = encode(images[:number], *kinds[name])
            kilobytes = round(sum(file.numel() for file in files) / number / 1000)
            others = peers(files, report.device, pool) if name == "quality 90" else {}
            for part in (False, True):
                rectangles = visible([image.shape[:2] for image in images[:number]]) if part else None
                batch = Batch(files, rectangles, report.device)
                batch.check(files)
                what = "as mosaics show them" if part else "whole"
                case = f"{number} JPEGs of 640x480, {kilobytes} kB, {name}, {what}"
                compare(report, case, batch, {} if part else others)
                if cuda and part and others and number == count and not report.prepare:
                    beside_a_step(report, batch, others.get(NVJPEG))
        file = encode(images[:1], 90)
        variants: dict[str, Callable[[], Any]] = {"torch_fastdet": lambda: ops.decode_jpeg(file, report.device)}
        variants |= {} if cuda else peers(file, report.device, pool)
        case = "one JPEG of 640x480 from its bytes"
        report.compare(case, variants, views=("call",), repetitions=50, inner=1)
        if cuda and not report.prepare:
            for name, times in harness.time_cpu(peers(file, report.device, pool), 20).items():
                report.add(case, name, "call", times[1:])
            report.write()
        packing = {"torch_fastdet": lambda: ops.jpeg_pack(file)} | peers(file, torch.device("cpu"), pool)
        if not report.prepare:
            for name, times in harness.time_cpu(packing, 30).items():
                report.add("a file's index, beside its decoding by cv2", name, "call", times[1:])
            report.write()
    cv2.setNumThreads(threads)


if __name__ == "__main__":
    harness.run("jpeg", measure)
