"""Implements ``python -m torch_fastdet benchmark``, which prints what torch_fastdet is worth on this machine in one table to paste.

Ultralytics trains, validates, predicts and tracks on images that are drawn here, each in a process of its own, with and without ``patch()``. The
first epoch is left out, and the last one is profiled.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torch_fastdet import memory
from torch_fastdet._build_info import build_info
from torch_fastdet.patching.evidence import installed_version
from torch_fastdet.patching.protocols import Function, Trainer

PROG = "python -m torch_fastdet benchmark"
VARIANTS = ("stock", "ours")
FRAMES = 60


def drawn(number: int) -> tuple[np.ndarray, str]:
    """Return an image of 640x480 with one to six plain rectangles, and the lines of its labels."""
    import cv2

    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (640, 480), interpolation=cv2.INTER_CUBIC)
    rows = []
    for _ in range(rng.integers(1, 7)):
        width, height = rng.integers(30, 200, 2).tolist()
        left, top = int(rng.integers(0, 640 - width)), int(rng.integers(0, 480 - height))
        kind, colour = int(rng.integers(2)), rng.integers(0, 256, 3).tolist()
        cv2.rectangle(image, (left, top), (left + width, top + height), colour, -1 if kind else 6)
        rows.append(f"{kind} {(left + width / 2) / 640} {(top + height / 2) / 480} {width / 640} {height / 480}\n")
    return image, "".join(rows)


def draw_images(folder: Path, count: int) -> Path:
    """Write JPEG files of images, and labels for them. Returns the data set's file."""
    import cv2

    for split in ("images", "labels"):
        (folder / split).mkdir(parents=True)
    for number in range(count):
        image, labels = drawn(number)
        cv2.imwrite(str(folder / f"images/{number:05d}.jpg"), image)
        (folder / f"labels/{number:05d}.txt").write_text(labels)
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [outline, area]\n")
    return data


def draw_video(file: Path) -> Path:
    """Write a video of 1920x1080 in which twenty plain rectangles move."""
    import cv2

    rng = np.random.default_rng(0)
    place, way = rng.uniform(0, (1700, 900), (20, 2)), rng.normal(0, 6, (20, 2))
    size, colours = rng.integers(60, 200, (20, 2)), rng.integers(0, 256, (20, 3)).tolist()
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 30, (1920, 1080))
    for t in range(FRAMES):
        image = np.full((1080, 1920, 3), 114, np.uint8)
        for (x, y), (width, height), colour in zip((place + t * way).astype(int).tolist(), size.tolist(), colours):
            cv2.rectangle(image, (x, y), (x + width, y + height), colour, -1)
        writer.write(image)
    writer.release()
    return file


class Clock:
    """Note by Ultralytics' callbacks when iterations end, and how long the GPU works in the last epoch."""

    def __init__(self, epochs: int) -> None:
        self.last = epochs - 1
        self.ends: dict[int, list[float]] = {}
        self.profiler: torch.profiler.profile | None = None
        self.busy: float | None = None

    def epoch(self, trainer: Trainer) -> None:
        if trainer.epoch == self.last and torch.cuda.is_available():
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.__enter__()

    def iteration(self, trainer: Trainer) -> None:
        self.ends.setdefault(trainer.epoch, []).append(time.perf_counter())

    def end(self, _: object) -> None:
        if self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            on_gpu = [event for event in self.profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            self.busy = 1e-6 * sum(event.device_time_total for event in on_gpu) / len(self.ends[self.last])
            self.profiler = None

    def seconds(self) -> float:
        """Return the seconds of an iteration: the mean over all epochs but the first and, if it was profiled, the last."""
        epochs = [ends for epoch, ends in self.ends.items() if epoch and (self.busy is None or epoch != self.last)]
        return sum(ends[-1] - ends[0] for ends in epochs) / sum(len(ends) - 1 for ends in epochs)


def measure(variant: str, options: argparse.Namespace, data: str, folder: Path) -> dict[str, float | None]:
    """Train, validate, predict and track in this process, in seconds (and MiB)."""
    from ultralytics import RTDETR, YOLO

    if variant == "ours":
        from torch_fastdet.ultralytics import patch

        patch()
    cuda = options.device != "cpu"
    kind = RTDETR if "rtdetr" in options.model else YOLO
    clock, model = Clock(options.epochs), kind(f"{options.model}.yaml")
    model.add_callback("on_train_epoch_start", clock.epoch)
    model.add_callback("on_train_batch_end", clock.iteration)
    model.add_callback("on_train_epoch_end", clock.end)
    shared = {"imgsz": options.imgsz, "device": options.device, "workers": options.workers, "plots": False}
    places = {"project": str(folder), "name": variant, "exist_ok": True}
    held: list[memory.Row] = []
    model.add_callback("on_train_end", lambda trainer: held.extend(memory.report()))
    model.train(
        data=data, batch=options.batch, epochs=options.epochs, val=False, optimizer="SGD", **shared, **places
    )  # fmt: skip
    peak = torch.cuda.max_memory_reserved() / 2**20 if cuda else None
    began = time.perf_counter()
    precision = {"quantize": 16} if cuda else {}
    model.val(data=data, batch=options.batch, verbose=False, **precision, **shared, **places)
    validation = time.perf_counter() - began
    folder_of_images, video = Path(data).parent / "images", draw_video(folder / f"{variant}.avi")
    paths = sorted(map(str, folder_of_images.iterdir()))
    given = {"imgsz": options.imgsz, "device": options.device, "batch": options.batch, "verbose": False, **precision}
    objects = 0

    def an_image(run: Function, source: object, count: int, repeat: int = 3) -> float:
        """Return the seconds of an image of a source that has ``count``, in the best of some runs. The last one counts ``objects``."""
        nonlocal objects
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            objects = sum(len(result.boxes.data.cpu()) for result in run(source, stream=True, **given))
            times.append((time.perf_counter() - began) / count)
        return min(times)

    def share(what: str) -> float | None:
        return sum(row.held for row in held if row.what == what) / 2**20 if cuda else None

    def tracking(track: Function) -> float | None:
        return an_image(track, str(video), FRAMES) if importlib.util.find_spec("lap") else None

    arrays = [drawn(number)[0] for number in range(4 * options.batch)]
    return {
        "iteration": clock.seconds(),
        "busy": clock.busy,
        "validation": validation,
        "frame": an_image(model.predict, arrays[0], 1, repeat=60),
        "arrays": an_image(model.predict, arrays, len(arrays)),
        "folder": an_image(model.predict, str(folder_of_images), len(paths)),
        "paths": an_image(model.predict, paths, len(paths)),
        "video": an_image(model.predict, str(video), FRAMES),
        "objects": objects / FRAMES,  # of the video
        "tracking": tracking(model.track),
        "still": tracking(functools.partial(model.track, tracker="bytetrack.yaml")),
        "peak": peak,
        "graphs": share("CUDA graphs"),
        "images": share("images on the GPU"),
    }


def in_its_own_process(variant: str, words: Sequence[str], data: Path, folder: Path) -> dict[str, float | None]:
    print(f"{variant}: training, validation, predictions, tracking ...", file=sys.stderr, flush=True)
    result, log = folder / f"{variant}.json", folder / f"{variant}.log"
    command = [sys.executable, "-m", __name__, *words, "--measure", variant, str(data), str(result)]
    # Ultralytics then downloads no weights for its own checks.
    env = {**os.environ, "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "WANDB_MODE": "disabled"}
    with open(log, "w") as file:
        status = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=folder).returncode
    if status or not result.exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(
            f"{tail}\ntorch_fastdet: benchmark: the run of {variant} ended with status {status}; see above"
        )
    return json.loads(result.read_text())


def table(options: argparse.Namespace, stock: dict[str, float | None], ours: dict[str, float | None]) -> str:
    """Return the table of both runs, in Markdown."""

    def row(title: str, key: str, factor: float, unit: str, share_of: str | None = None) -> str | None:
        a, b = stock[key], ours[key]
        if a is None or b is None:
            return None
        cells = []
        for run, value in ((stock, a), (ours, b)):
            whole = run[share_of] if share_of else None
            number = f"{factor * value:.3g}" if factor * value < 1000 else f"{factor * value:.0f}"
            cells.append(f"{number} {unit}" + (f" ({value / whole:.0%})" if whole else ""))
        ratio = "" if share_of or unit == "MiB" else f"{a / b:.1f}x"
        return f"| {title} | {' | '.join(cells)} | {ratio} |"

    objects = "" if ours["objects"] is None else f" with {ours['objects']:.3g} objects"
    rows = [
        row(f"an iteration of training, {options.model}, batch {options.batch}, {options.imgsz} pixels", "iteration", 1e3, "ms"),
        row("of it, the GPU works", "busy", 1e3, "ms", share_of="iteration"),
        row(f"validation of {options.images} images", "validation", 1, "s"),
        row("YOLO(...).predict of an array", "frame", 1e3, "ms"),
        row("YOLO(...).predict of a list of arrays, an image", "arrays", 1e3, "ms"),
        row("YOLO(...).predict of a folder of JPEG files, an image", "folder", 1e3, "ms"),
        row("YOLO(...).predict of a list of their names, an image", "paths", 1e3, "ms"),
        row(f"YOLO(...).predict of a video of 1080p, a frame{objects}", "video", 1e3, "ms"),
        row("YOLO(...).track of it, a frame", "tracking", 1e3, "ms"),
        row("YOLO(...).track of it by ByteTrack, without camera motion, a frame", "still", 1e3, "ms"),
        row("memory of the GPU, at most", "peak", 1, "MiB"),
        row("of it, CUDA graphs", "graphs", 1, "MiB", share_of="peak"),
        row("of it, decoded images", "images", 1, "MiB", share_of="peak"),
    ]  # fmt: skip
    return "\n".join(["| | stock | torch_fastdet | faster |", "|---|---|---|---|", *filter(None, rows)])


def machine(options: argparse.Namespace) -> str:
    info = build_info()
    gpu = f"{info['gpu']}, driver CUDA {info['driver']}" if options.device != "cpu" else "CPU"
    versions = f"torch {info['torch_running']}, ultralytics {installed_version('ultralytics')}"
    return f"{gpu}; {os.cpu_count()} threads, {options.workers} workers; {versions}, torch_fastdet {info['version']}"


def parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available() and bool(build_info()["cuda"])
    found = argparse.ArgumentParser(
        prog=PROG, description="Time Ultralytics on this machine, stock and with torch_fastdet."
    )
    found.add_argument("--model", default="yolov8s" if cuda else "yolov8n", help="default: %(default)s")
    found.add_argument("--batch", type=int, default=16, help="images in an iteration (default: %(default)s)")
    found.add_argument("--imgsz", type=int, default=640 if cuda else 128, help="pixels (default: %(default)s)")
    found.add_argument(
        "--images", type=int, default=640 if cuda else 96, help="images that are drawn (default: %(default)s)"
    )
    found.add_argument("--epochs", type=int, default=4, help="at least 3 (default: %(default)s)")
    found.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1) if cuda else 0)
    found.add_argument("--device", default="0" if cuda else "cpu", help="default: %(default)s")
    found.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    return found


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else list(words)
    options = parser().parse_args(words)
    for name, least in (("epochs", 3), ("batch", 1), ("imgsz", 32), ("images", 2 * options.batch)):
        if getattr(options, name) < least:
            parser().error(f"--{name} is {getattr(options, name)}, but at least {least} is expected")
    if importlib.util.find_spec("ultralytics") is None:
        raise SystemExit("torch_fastdet: benchmark found no ultralytics, which it times; type: pip install ultralytics")
    if options.measure:
        variant, data, result = options.measure
        Path(result).write_text(json.dumps(measure(variant, options, data, Path(result).parent)))
        return
    with tempfile.TemporaryDirectory(prefix="torch_fastdet_benchmark_") as name:
        folder = Path(name)
        data = draw_images(folder / "data", options.images)
        stock, ours = (in_its_own_process(variant, words, data, folder) for variant in VARIANTS)
    print(f"{table(options, stock, ours)}\n\n{machine(options)}")


if __name__ == "__main__":
    main()
