"""Run train.py with default options on a data set of COCO's size: first and later epochs, stock and with torch_fastdet.

    python -m benchmarks.bench_dataset [--batches 64 16] [--images 118287] [--quality 90] [--epochs 3] [--budget 24G] [--workers 8] [--gpus 1] [--out FOLDER]

The images are photographs of 640x480 with camera noise, made once; the set consists of hard links, which take no disk.
``--quality 90`` makes files of about 83 kB, ``--quality 95`` of 126 kB. ``--budget`` is ``TORCH_FASTDET_CACHE``, the
host memory for torch_fastdet; with 0 the GPU keeps nothing either. YOLOv5 keeps nothing between iterations, so its time
does not depend on the number of images: it runs on ``--stock-images`` of them for as many epochs. With ``--gpus 2``
train.py runs under torchrun, with this batch size, and as many loader processes, for each GPU.

A row is the mean time of an iteration over an epoch without its first batch. The lines below it show the peak of shared
memory and how evenly batches come: the median time between two of them beside the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import shutil
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.bench_distributed import NVLS, torchrun
from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, missing
from benchmarks.report import COCO
from examples.demo.training import STOCK, Run, Variant, run_train, yolov5_folder
from examples.yolov5_env import environment

SIZE = (640, 480)
#: These are widths and heights mixed about as in COCO.
COCO_SIZES = (SIZE, SIZE, (640, 427), (640, 426), (480, 640), (427, 640), (500, 375), (640, 360))
BOXES = 7
CLASSES = 80
PHOTOGRAPHS = 2048  # images that differ; the set has hard links to them
VALIDATED = 64
WORKERS = 8  # train.py's default


@functools.cache
def photographs() -> list[Any]:
    """Return the photographs that scikit-learn and ultralytics ship, as uint8 BGR."""
    import cv2
    import ultralytics
    from sklearn.datasets import load_sample_images

    found = [np.ascontiguousarray(image[..., ::-1]) for image in load_sample_images().images]
    assets = Path(ultralytics.__file__).parent / "assets"
    return found + [cv2.imread(str(path)) for path in sorted(assets.glob("*.jpg"))]


def make_photograph(root: Path, number: int, quality: int, size: tuple[int, int]) -> None:
    """Write an enlarged part of a photograph with camera noise, and labels for it."""
    import cv2

    generator = np.random.default_rng(number)
    sources = photographs()
    source = sources[number % len(sources)]
    height, width = source.shape[:2]
    ratio = size[0] / size[1]
    part_height = int(min(height, width / ratio) * generator.uniform(0.5, 0.95))
    part_width = int(part_height * ratio)
    y, x = generator.integers(0, height - part_height), generator.integers(0, width - part_width)
    image = cv2.resize(source[y : y + part_height, x : x + part_width], size, interpolation=cv2.INTER_CUBIC)
    image = np.clip(image + generator.normal(0, 3, image.shape), 0, 255).astype(np.uint8)
    cv2.imwrite(str(root / f"{number:05}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    boxes = np.concatenate([generator.uniform(0.25, 0.75, (BOXES, 2)), generator.uniform(0.05, 0.4, (BOXES, 2))], 1)
    rows = [f"{generator.integers(0, CLASSES)} " + " ".join(f"{value:.5f}" for value in box) for box in boxes]
    (root / f"{number:05}.txt").write_text("\n".join(rows))


def make_data(count: int, quality: int, sizes: tuple[tuple[int, int], ...] = (SIZE,)) -> Path:
    """Return the yaml of a data set with ``count`` images, the first of which are for validation."""
    different = min(PHOTOGRAPHS, count)
    kind = "x".join(map(str, SIZE)) if sizes == (SIZE,) else f"{len(sizes)}-sizes"
    seeds = WORK / f"photographs-{kind}-{different}-q{quality}"
    if not (seeds / "done").exists():
        seeds.mkdir(parents=True, exist_ok=True)
        wanted = [(seeds, number, quality, sizes[number % len(sizes)]) for number in range(different)]
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.starmap(make_photograph, wanted, chunksize=16)
        (seeds / "done").touch()
    root = WORK / f"dataset-{kind}-{count}-q{quality}"
    if not (root / "done").exists():
        for folder, suffix in (("images", "jpg"), ("labels", "txt")):
            (root / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                link = root / folder / f"{number:06}.{suffix}"
                if not link.exists():
                    os.link(seeds / f"{number % different:05}.{suffix}", link)
        (root / "done").touch()
    validated = (str(root / "images" / f"{number:06}.jpg") for number in range(min(VALIDATED, count)))
    (root / "validated.txt").write_text("\n".join(validated))
    names = "".join(f"  {number}: class{number}\n" for number in range(CLASSES))
    data = root / "data.yaml"
    data.write_text(f"path: {root}\ntrain: images\nval: validated.txt\nnames:\n{names}")
    return data


def mean_file_size(data: Path) -> float:
    # Neighboring images come from different photographs, whose files differ in size.
    sizes = [path.stat().st_size for path in sorted((data.parent / "images").glob("*.jpg"))[:512]]
    return sum(sizes) / len(sizes)


class SharedMemory:
    """Record the most bytes that the processes' anonymous files held. Another benchmark may run meanwhile."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @staticmethod
    def _now() -> int:
        found = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):  # it has ended
                for file in Path(f"/proc/{process.pid}/fd").iterdir():
                    if os.readlink(file).startswith("/memfd:torch_fastdet"):
                        status = file.stat()
                        found[status.st_ino] = 512 * status.st_blocks
        return sum(found.values())

    def _watch(self) -> None:
        while not self._stop.wait(1):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> SharedMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def train(report: Report, options: argparse.Namespace, batch: int, data: Path, variant: Variant) -> tuple[Run, int]:
    model, gpus = options.model, options.gpus
    folder = WORK / "dataset-runs" / f"{model}-{batch}-{options.images}" / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["--data", str(data), "--weights", "", "--cfg", str(yolov5_folder() / f"models/{model}.yaml")]
    arguments += ["--epochs", str(options.epochs), "--batch-size", str(batch * gpus), "--noplots"]
    arguments += ["--workers", str(options.workers)]
    arguments += ["--project", str(folder.parent), "--name", variant.name, "--exist-ok"]
    arguments += [] if report.device.type == "cuda" else ["--imgsz", "128"]
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore", "TORCH_FASTDET_CACHE": options.budget}
    if options.budget == "0":
        env["TORCH_FASTDET_GPU_CACHE"] = "0"
    if gpus > 1:
        arguments += ["--device", ",".join(map(str, range(gpus)))]
        env |= NVLS | {"OMP_NUM_THREADS": "1"}
        variant = dataclasses.replace(variant, launcher=(*torchrun(gpus), *variant.launcher))
    with SharedMemory() as memory:
        run = run_train(variant, arguments, folder, env, show=False)
    return run, memory.peak


def measure(report: Report, options: argparse.Namespace, batch: int) -> None:
    ours = Variant(OURS, OURS, ("-m", "torch_fastdet.yolov5", "--fastdet"))
    data = make_data(options.images, options.quality)
    kilobytes = round(mean_file_size(data) / 1000)
    each = " a GPU" if options.gpus > 1 else ""
    case = f"{options.model}, batch {batch}{each}, train.py, {options.images:,} JPEGs of 640x480, {kilobytes} kB"
    case += "" if options.workers == WORKERS else f", {options.workers} workers"
    case += ", nothing kept" if options.budget == "0" else ""
    case += f", {options.gpus} GPUs" if options.gpus > 1 else ""
    for variant in (STOCK, ours) if options.stock_images else (ours,):
        of = min(options.stock_images, options.images) if variant is STOCK else options.images
        place = data if of == options.images else make_data(of, options.quality)
        run, peak = train(report, options, batch, place, variant)
        every = run.progress.epoch_seconds()
        if len(every) < 2:
            raise SystemExit(
                f"bench_dataset: {variant.title} printed no two whole epochs; its output is in {run.folder}"
            )
        for line in run.replaced:
            if " -> " not in line:
                print(f"  {line}", flush=True)
        rows = {f"{case}, first epoch": every[:1], case: every[1:]}
        for title, seconds in rows.items():
            report.drop(title, variant.title)
            report.add(title, variant.title, "call", [1e6 * value for value in seconds])
        print(
            f"  shared memory at most {peak / 1e9:.2f} GB; an epoch of {options.images:,} images: "
            + ", ".join(f"{value * options.images / (batch * options.gpus):.0f} s" for value in every),
            flush=True,
        )
        for epoch, done in sorted(run.progress.done.items()):
            ends = [1e3 * done[number] for number in range(run.progress.batches) if number in done]
            steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
            print(
                f"  epoch {epoch + 1}: {statistics.median(steps):.1f} ms from batch to batch (median), {statistics.mean(steps):.1f} ms (mean)",
                flush=True,
            )
        report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--batches", nargs="+", type=at_least(1), help="default: 64 on a GPU, 16 on the CPU")
    parser.add_argument("--model", default="yolov5s", help="default: yolov5s")
    parser.add_argument("--images", type=at_least(1), help=f"default: {COCO} on a GPU, 64 on the CPU")
    parser.add_argument(
        "--stock-images", type=at_least(0), help="0: leave stock out; default: 4096 on a GPU, 64 on the CPU"
    )
    parser.add_argument("--quality", type=at_least(1), default=90, help="of the JPEGs; default: 90")
    parser.add_argument("--epochs", type=at_least(2), default=3, help="default: 3")
    parser.add_argument("--workers", type=at_least(1), default=WORKERS, help=f"loader processes; default: {WORKERS}")
    parser.add_argument("--gpus", type=at_least(1), default=1, help="how many train together; default: 1")
    parser.add_argument("--budget", default="24G", help="host memory for images; default: 24G")
    options = parser.parse_args()
    if reason := missing("dataset"):
        print(f"nothing to do: {reason}")
        return
    cuda = options.device == "cuda"
    if options.gpus > 1 and torch.cuda.device_count() < options.gpus:
        print(f"nothing to do: {options.gpus} GPUs are needed, and there are {torch.cuda.device_count()}")
        return
    options.images = options.images or (COCO if cuda else 64)
    if options.stock_images is None:
        options.stock_images = 4096 if cuda else 64
    make_data(options.images, options.quality)
    if options.prepare:
        return
    report = Report("dataset", torch.device(options.device), options.out)
    report.resume()
    for batch in options.batches or ([64] if cuda else [16]):
        measure(report, options, batch)
    report.plot()


if __name__ == "__main__":
    main()
