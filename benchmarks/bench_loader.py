"""Time YOLOv5's training loader alone, stock and with loader_optim, augmentation of hyp.scratch-low included.

    python -m benchmarks.bench_loader [--workers 8 2] [--cores 2] [--images 1536] [--epochs 4] [--out FOLDER]

--cores: use so many CPU cores and as many workers, without a GPU and with --cache ram, on a quarter of the images,
noisy JPEGs of 640x640 of 120 KB. A row is the mean over the epochs after the first; "first epoch" rows are of that one,
in which torch_fastdet decodes. Each variant is a process and ends where train.py has the batch on its device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, missing
from examples.yolov5_env import environment

SIZE, BATCH, BOXES = 640, 64, 8
HYP = "data/hyps/hyp.scratch-low.yaml"


def make_image(root: Path, number: int) -> None:
    """Write an image that JPEG does not make small: a coarse pattern with noise."""
    import cv2

    generator = np.random.default_rng(number)
    coarse = generator.integers(0, 255, (SIZE // 8, SIZE // 8, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    image = np.clip(image + generator.normal(0, 9, image.shape), 0, 255).astype(np.uint8)
    cv2.imwrite(str(root / "images" / f"{number:05}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 85])
    boxes = np.concatenate([generator.uniform(0.25, 0.75, (BOXES, 2)), generator.uniform(0.05, 0.4, (BOXES, 2))], 1)
    rows = [f"{generator.integers(0, 80)} " + " ".join(f"{value:.5f}" for value in box) for box in boxes]
    (root / "labels" / f"{number:05}.txt").write_text("\n".join(rows))


def make_data(count: int, validated: int = 0) -> Path:
    """Return a folder with ``count`` images and their labels; validated.txt lists some of them."""
    root = WORK / f"jpegs-{SIZE}-{count}"
    done = root / "done"
    if not done.exists():
        for folder in ("images", "labels"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.starmap(make_image, [(root, number) for number in range(count)], chunksize=16)
        done.touch()
    files = [str(root / "images" / f"{number:05}.jpg") for number in range(validated)]
    (root / "validated.txt").write_text("\n".join(files))
    return root


def measure(images: Path, ours: bool, workers: int, epochs: int, cache: str | None, device: str) -> list[float]:
    """Return the seconds of each epoch, measured in a process of its own."""
    import yaml
    import yolov5
    from yolov5.utils.dataloaders import create_dataloader  # patched below, where it looks its classes up

    if ours:
        from torch_fastdet.yolov5 import patch

        patch(loader_optim=True)
    hyp = yaml.safe_load((Path(yolov5.__file__).parent / HYP).read_text())
    torch.zeros(1, device=device)
    loader, _ = create_dataloader(
        str(images), SIZE, BATCH, 32, augment=True, hyp=hyp, workers=workers, shuffle=True, cache=cache
    )
    seconds = []
    for _ in range(epochs):
        begun = time.perf_counter()
        for batch in loader:
            batch[0].to(device, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds


def run(
    images: Path, epochs: int, device: str, workers: int, cache: str | None, ours: bool, cores: int = 0
) -> list[float]:
    """Return the microseconds of an image, epoch by epoch."""
    arguments = [images, int(ours), workers, epochs, cache or "", device]
    program = [sys.executable, "-m", "benchmarks.bench_loader", "--measure", *map(str, arguments)]
    if cores:
        program = ["taskset", "--cpu-list", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores])), *program]
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = subprocess.run(program, env=env | hidden, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
    if done.returncode or not found:
        raise SystemExit(f"bench_loader: a process failed:\n{(done.stdout + done.stderr)[-3000:]}")
    count = len(list(images.iterdir()))
    return [1e6 * seconds / count for seconds in json.loads(found[0].removeprefix("SECONDS "))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", nargs="+", type=at_least(0), help="default: 8, or one a core")
    parser.add_argument("--cores", nargs="*", type=at_least(1), help="default: 2 on a GPU machine, none elsewhere")
    parser.add_argument("--images", type=at_least(BATCH), help="default: 1024 on a GPU, 192 on the CPU")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        images, ours, workers, epochs, cache, device = options.measure
        seconds = measure(Path(images), ours == "1", int(workers), int(epochs), cache or None, device)
        print(f"SECONDS {json.dumps(seconds)}")
        return
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, but 2 or more are expected: the first is left out")
    if reason := missing("loader"):
        print(f"nothing to do: {reason}")
        return
    cuda = options.device == "cuda"
    options.images = options.images or (1024 if cuda else 192)
    images = make_data(options.images) / "images"
    cores_alone = ([2] if cuda else []) if options.cores is None else options.cores
    few = make_data(max(options.images // 4, BATCH)) / "images" if cores_alone else images
    if options.prepare:
        return
    report = Report("loader", torch.device(options.device), options.out)
    report.resume()

    def compare(
        case: str, first_too: bool, place: tuple[Path, str], workers: int, cache: str | None, cores: int
    ) -> None:
        for name in ("stock", OURS):
            times = run(place[0], options.epochs, place[1], workers, cache, name == OURS, cores)
            rows = {case: times[1:]} | ({f"{case}, first epoch": times[:1]} if first_too else {})
            for title, values in rows.items():
                report.drop(title, name)
                report.add(title, name, "call", values)
            report.write()

    for workers in options.workers or [min(8, cores)]:
        for cache in (None, "ram"):
            case = f"an image, {workers} workers, {'--cache ram' if cache else 'JPEGs'}"
            compare(case, not cache, (images, options.device), workers, cache, 0)
    for count in cores_alone:
        case = f"an image, {count} CPU cores without a GPU, --cache ram"
        compare(case, False, (few, "cpu"), count, "ram", count)
    report.plot()


if __name__ == "__main__":
    main()
