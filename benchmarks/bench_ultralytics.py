"""Time an iteration of Ultralytics' real, unmodified trainer, loader included, stock and with --fastdet.

    python -m benchmarks.bench_ultralytics [--models yolov8s-16 yolo26s-64-MuSGD] [--epochs 3] [--flags fastdet] [--gpus 2]
        [--jpegs 11829] [--no-stock] [--compiled] [--validate] [--out FOLDER]

A name is a model, a batch size and, if it is not SGD, an optimizer; ``yolov8s-seg-16`` and others train on the labels
of their task. On a GPU images have 640x640 (classification: 224x224) with cache=ram and 16 workers (``--models all`` is
the whole table of issue 16, ``--models tasks`` the other tasks, ``--models families`` one model of each family); on the
CPU yolov8n runs at 128x128. Each training is a process, started as a user starts it. An iteration is the mean over an
epoch without its first batch, after the first epoch, in which the warm-up ends. Images are mosaics, as in all but the
last ten epochs of a training (``close_mosaic=0``: without it these few epochs would have none). With ``--jpegs`` only
torch_fastdet trains, on so many images of bench_dataset with Ultralytics' defaults (8 workers, no cache), and the first
epoch has a row too. ``--gpus 2`` starts a process with this batch size for each GPU. ``--validate`` validates
torch_fastdet's weights on the images of their training, stock and with the switches, as ``yolo val`` does by default;
one row is the pass over the images, one the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import OURS, ROOT, WORK, Report, add_arguments, at_least, missing
from torch_fastdet.ultralytics import ALL, SWITCHES

DEFAULT = ("yolov8s-16", "yolo26s-16")
WHOLE = (
    *("yolov8n-16", "yolov8s-16", "yolov8s-64", "yolov8m-32", "yolo11s-16", "yolo12s-16", "yolo26s-16"),
    *("yolov8s-64-MuSGD", "yolo26s-64-MuSGD", "yolov8s-64-AdamW"),
)
TASKS = (
    *("yolov8s-seg-16", "yolo11s-seg-16", "yolo26s-seg-16", "yolov8s-seg-64", "yolov8s-pose-16", "yolo26s-pose-16"),
    *("yolov8s-obb-16", "yolo26s-obb-16", "yolov8s-cls-64"),
)
FAMILIES = (
    *("yolov3-tiny-16", "yolov5s-16", "yolov6s-16", "yolov8s-ghost-16", "yolov8s-p2-16", "yolov9s-16", "yolov10s-16"),
    *("yolo11s-16", "yolo12s-16", "yolo26s-16", "yolov8s-rtdetr-16", "rtdetr-l-16", "rtdetr-resnet50-16"),
    *("yolov8s-world-16", "yoloe-11s-16"),
)
NAMED = {"all": WHOLE, "tasks": TASKS, "families": FAMILIES}
SUFFIXES = {"seg": "segment", "pose": "pose", "obb": "obb", "cls": "classify"}
ITERATIONS = 60  # measured at least
VALIDATIONS = 3


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    optimizer: str = "SGD"

    @classmethod
    def parse(cls, text: str) -> Case:
        found = re.fullmatch(r"((?:yolo\w+|rtdetr)(?:-\d*[a-z]\w*)?)-([1-9]\d*)(?:-([A-Za-z]\w*))?", text)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text} came, but a model, a batch size and perhaps an optimizer are expected, as in yolov8s-16 or yolov8s-64-MuSGD"
            )
        return cls(found[1], int(found[2]), found[3] or "SGD")

    @property
    def task(self) -> str:
        return SUFFIXES.get(self.model.partition("-")[2], "detect")

    @property
    def title(self) -> str:
        return f"{self.model}, batch {self.batch}" + ("" if self.optimizer == "SGD" else f", {self.optimizer}")


def make_data(task: str, size: int, images: int) -> Path:
    """Make digits on photographs with a task's labels; for classification one digit per image, in class folders."""
    from examples.demo import dataset  # its PIL may be missing

    folder = WORK / f"digits-{size}-{images}"
    if task != "classify":
        recipe = dataset.Recipe(image_size=size, train=images, task=task)
        return dataset.make(folder if task == "detect" else folder.with_name(f"{folder.name}-{task}"), recipe)
    folder = folder.with_name(f"{folder.name}-{task}")
    if folder.exists():
        return folder
    half = folder.with_name(f"{folder.name}-half")
    shutil.rmtree(half, ignore_errors=True)
    recipe = dataset.Recipe(image_size=size, train=images, val=max(images // 8, 10), min_digits=1, max_digits=1)
    made = dataset.make(half / "images", recipe).parent
    for label in made.glob("labels/*/*.txt"):
        place = half / label.parent.name / label.read_text().split()[0]
        place.mkdir(parents=True, exist_ok=True)
        (made / f"images/{label.parent.name}/{label.stem}.jpg").rename(place / f"{label.stem}.jpg")
    shutil.rmtree(made)
    half.rename(folder)
    return folder


def iteration_seconds(ends: list[list[float]]) -> list[float]:
    """Return each epoch's mean time from the end of its first iteration to the end of its last."""
    return [(epoch[-1] - epoch[0]) / (len(epoch) - 1) for epoch in ends if len(epoch) > 1]


def yolo(mode: str, title: str, flags: list[str], folder: Path, **words: object) -> dict:
    """Run one command of yolo in ``folder``; return its seconds and what benchmarks.ultralytics_run wrote."""
    from examples.yolov5_env import environment

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words |= {"plots": False, "project": folder, "name": "run"}
    command = [sys.executable, "-m", "benchmarks.ultralytics_run", str(folder / "times.json")]
    command += [*(f"--{flag}" for flag in flags), mode, *(f"{key}={value}" for key, value in words.items())]
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    with open(folder / f"{mode}.log", "w") as log:
        began = time.perf_counter()
        process = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        seconds = time.perf_counter() - began
    if process.returncode or not (folder / "times.json").exists():
        raise SystemExit(f"bench_ultralytics: {title} ended with status {process.returncode}; see {folder}/{mode}.log")
    return {**json.loads((folder / "times.json").read_text()), "seconds": seconds}


def train(case: Case, flags: list[str], folder: Path, gpus: int = 1, **words: object) -> dict:
    return yolo(
        "train", case.title, flags, folder, model=f"{case.model}.yaml", batch=case.batch * gpus,
        optimizer=case.optimizer, warmup_epochs=1, val=False, close_mosaic=0, **words,
    )  # fmt: skip


def measure(
    report: Report,
    cases: list[Case],
    epochs: int,
    flags: list[str],
    images: int,
    gpus: int,
    stock: bool,
    compiled: bool,
    validate: bool,
) -> None:
    cuda = report.device.type == "cuda"
    device = ",".join(map(str, range(gpus))) if cuda else "cpu"
    workers = min(16, (os.cpu_count() or 1) // gpus) if cuda else 0
    trained: list[tuple[str, list[str], dict[str, object]]] = [("stock", [], {})] if stock else []
    trained += [("stock, compile=True", [], {"compile": True})] if compiled else []
    trained.append((OURS, flags, {}))
    for case in cases:
        size = 128 if not cuda else 224 if case.task == "classify" else 640
        data = make_data(case.task, size, images)
        title = case.title + ("" if cuda else f" at {size}") + ("" if gpus == 1 else f" a GPU, {gpus} GPUs")
        batches = -(-images // (case.batch * gpus))
        count = max(epochs, 1 + -(-ITERATIONS // batches)) if cuda else epochs
        place = WORK / "ultralytics" / title.replace(", ", "-").replace(" ", "-")
        shared = {"data": data, "imgsz": size, "workers": workers, "device": device}
        for name, switches, words in trained:
            found = train(case, switches, place / name, gpus, epochs=count, cache="ram", **shared, **words)
            times = iteration_seconds(found["ends"])[1:]
            print(f"{title}, {name}: {', '.join(f'{1e3 * seconds:.1f}' for seconds in times)} ms", flush=True)
            report.drop(title, name)
            peak = {"peak_mib": found["peak_mib"]} if cuda else {}
            report.add(title, name, "call", [1e6 * seconds for seconds in times], **peak)
            report.write()
        words = {"model": place / OURS / "run/weights/last.pt", "split": "train", **shared}
        if cuda:
            del words["workers"]
        variants = {"stock": [], OURS: flags} if validate else {}
        runs: dict[str, list[dict]] = {name: [] for name in variants}
        for _ in range(VALIDATIONS):  # in turns, so that a machine that warms up favors none
            for name, switches in variants.items():
                runs[name].append(yolo("val", title, switches, place / f"{name}-val", **words))
        for name, timed in runs.items():
            for row, times in (
                (f"validation's pass over {images} images", [seconds for run in timed for seconds in run["passes"]]),
                ("yolo val, the whole command", [run["seconds"] for run in timed]),
            ):
                report.drop(f"{title}: {row}", name)
                report.add(f"{title}: {row}", name, "call", [1e6 * seconds for seconds in times])
        report.write()


def measure_jpegs(report: Report, case: Case, epochs: int, flags: list[str], images: int) -> None:
    """Train with torch_fastdet on JPEGs that are decoded for each batch, the first epoch included."""
    from benchmarks.bench_dataset import WORKERS, make_data, mean_file_size

    cuda = report.device.type == "cuda"
    data = make_data(images, 90)
    title = f"{case.title}, {images:,} JPEGs of 640x480, {mean_file_size(data) / 1000:.0f} kB"
    folder = WORK / "ultralytics" / f"{case.model}-{case.batch}-jpegs-{images}"
    found = train(
        case, flags, folder, data=data, imgsz=640 if cuda else 128, workers=WORKERS if cuda else 2,
        device="0" if cuda else "cpu", epochs=epochs, cache=False,
    )  # fmt: skip
    first, *later = iteration_seconds(found["ends"])
    for row, times in ((f"{title}, first epoch", [first]), (title, later)):
        report.drop(row, OURS)
        report.add(row, OURS, "call", [1e6 * seconds for seconds in times])
    report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--models", nargs="+", help="model-batch or model-batch-optimizer, all, or tasks; see above")
    parser.add_argument("--epochs", type=int, default=3, help="at least; small data gets more")
    parser.add_argument(
        "--flags", nargs="+", default=[ALL], choices=[ALL, *SWITCHES], help="switches of torch_fastdet.ultralytics"
    )
    parser.add_argument("--gpus", type=at_least(1), default=1, help="how many GPUs train together")
    parser.add_argument("--no-stock", action="store_true", help="train with the switches alone")
    parser.add_argument("--compiled", action="store_true", help="stock with compile=True beside it, too")
    parser.add_argument("--validate", action="store_true", help="time a validation of the trained weights, too")
    parser.add_argument("--images", type=at_least(1), help="to train on; default: 1024 on a GPU, 64 on the CPU")
    parser.add_argument("--jpegs", type=at_least(64), help="how many images of bench_dataset; see above")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, but 2 or more are expected: the first is left out")
    names = options.models or (DEFAULT if cuda else ("yolov8n-16",))
    try:
        cases = [Case.parse(name) for given in names for name in NAMED.get(given, [given])]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if reason := missing("ultralytics"):
        print(f"nothing to do: {reason}")
        return
    if options.prepare:
        return  # its images take seconds
    if cuda and torch.cuda.device_count() < options.gpus:
        print(f"nothing to do: {options.gpus} GPUs are needed, and there are {torch.cuda.device_count()}")
        return
    report = Report("ultralytics", torch.device(options.device), options.out)
    report.resume()
    if options.jpegs:
        for case in cases:
            measure_jpegs(report, case, options.epochs, options.flags, options.jpegs)
        return
    images = options.images or (1024 if cuda else 64)
    how = {"stock": not options.no_stock, "compiled": options.compiled, "validate": options.validate}
    measure(report, cases, options.epochs, options.flags, images, options.gpus, **how)
    report.plot()


if __name__ == "__main__":
    main()
