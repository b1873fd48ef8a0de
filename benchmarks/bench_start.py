"""Time a training's start, the scan of labels, and what is between two trials, stock and with torch_fastdet in turns.

    python -m benchmarks.bench_start [--parts start scan trials] [--frameworks yolov5 ultralytics] [--images 118287]
        [--rounds 3] [--cold] [--out FOLDER]

start: from the start of a process until it has imported the framework, ``patch()`` is done, the labels of bench_dataset's
images are scanned (there is no cache file), the epoch begins, and its first iteration has ended; then the process is
killed. ``--cold`` drops the page cache before each start: root alone may do that. The images are hard links to 2,048
files, so fewer files are read than in COCO.
scan: the frameworks' ``cache_labels`` of all images, again and again in one process.
trials: from the end of a trial of ``YOLO.tune`` or ``--evolve`` to the end of the next one's first iteration.

This process imports no torch: what a process has mapped stays in the page cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

DROP = Path("/proc/sys/vm/drop_caches")
PROGRAMS = {"yolov5": "YOLOv5's train.py", "ultralytics": "Ultralytics' trainer"}
MODELS = {"yolov5": "yolov5", "ultralytics": "yolov8"}
BATCH = 16
TRIALS = 3
IMPORTED, PATCHED = "imports done", "patch() done"
FIRST = r"[01]/\d+ +[\d.]+G +[\din]"  # a progress bar with the losses of an iteration
MARKS = {IMPORTED: IMPORTED, PATCHED: re.escape(PATCHED), "labels scanned": "train: .*New cache created"}
MARKS |= {"epoch begins": "Starting training for", "first iteration ended": FIRST}
ENDS = {"yolov5": "epochs completed in", "ultralytics": r"Learn more at \S+/train"}  # of a trial


# In a process of its own ----------------------------------------------------------------------------------------------


def train(framework: str, ours: bool, words: dict[str, Any]) -> None:
    """Run a user's program; with ``iterations`` or ``evolve`` among the words it has trials."""
    sys.argv[1:] = []
    start = load(framework, ours)
    if framework == "yolov5":
        start.run(**words)
        return
    model = start.YOLO(words.pop("model"))
    (model.tune if "iterations" in words else model.train)(**words)


def load(framework: str, ours: bool) -> Any:
    module = importlib.import_module({"yolov5": "yolov5.train", "ultralytics": "ultralytics"}[framework])
    getattr(module, "YOLO", None)  # Ultralytics imports its models, and torch, when they are asked for
    print(IMPORTED, flush=True)
    if ours:
        importlib.import_module(f"torch_fastdet.{framework}").patch()
        print(PATCHED, flush=True)
    return module


def scan(framework: str, ours: bool, words: dict[str, Any]) -> None:
    """Print the seconds of each scan."""
    load(framework, ours)
    images = Path(words["data"]).parent / "images"
    if framework == "yolov5":
        from yolov5.utils.dataloaders import LoadImagesAndLabels

        data = LoadImagesAndLabels(str(images))
    else:
        from ultralytics.data.dataset import YOLODataset

        data = YOLODataset(img_path=str(images), data={"names": dict.fromkeys(range(80), ""), "channels": 3})
    times = [time.perf_counter()]
    for _ in range(words["rounds"]):
        data.cache_labels(images.with_name("labels.cache"))
        times.append(time.perf_counter())
    print(json.dumps([later - earlier for earlier, later in pairwise(times)]))


def prepare(options: argparse.Namespace) -> tuple[list[Path], dict[str, Path], dict[str, str]]:
    """Return the data sets, for the start and for trials, YOLOv5's configurations, and the environment."""
    from benchmarks.bench_dataset import make_data
    from benchmarks.harness import WORK, missing
    from examples.demo.training import yolov5_folder
    from examples.yolov5_env import environment

    if reason := missing("start"):
        raise SystemExit(f"nothing to do: {reason}")
    data = [make_data(images, 90) for images in (options.images, options.trial_images)]
    folders = {"work": WORK / "start", "yolov5": yolov5_folder()}
    return data, folders, environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}


def write(options: argparse.Namespace, rows: list[tuple[str, bool, list[float], int | None]]) -> None:
    import torch

    from benchmarks.harness import OURS, Report

    report = Report("start", torch.device(options.device), options.out)
    report.resume()
    for case, ours, seconds, images in rows:
        variant = OURS if ours else "stock"
        rate = {"images_per_s": round(images / statistics.median(seconds))} if images else {}
        report.drop(case, variant)
        report.add(case, variant, "call", [1e6 * each for each in seconds], **rate)
    report.write()
    report.plot()


# In the first process -------------------------------------------------------------------------------------------------


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class Programs:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        (self.data, self.small), self.folders, self.env = apart(prepare, options)
        size = "s" if options.device == "cuda" else "n"
        self.models = {framework: name + size for framework, name in MODELS.items()}

    def words(self, framework: str, data: Path, **words: Any) -> dict[str, Any]:
        cuda = self.options.device == "cuda"
        words |= {"data": str(data), "epochs": 1, "imgsz": 640 if cuda else 128, "workers": 8 if cuda else 2}
        words |= {"device": "0" if cuda else "cpu", "project": str(self.folders["work"]), "exist_ok": True}
        if framework == "ultralytics":
            return words | {
                "model": f"{self.models[framework]}.yaml",
                "batch": BATCH,
                "plots": False,
                "optimizer": "SGD",
            }
        cfg = str(self.folders["yolov5"] / f"models/{self.models[framework]}.yaml")
        return words | {"weights": "", "cfg": cfg, "batch_size": BATCH, "noplots": True}

    def command(self, function: str, framework: str, ours: bool, words: dict[str, Any]) -> list[str]:
        """Return the command of a new process; remove what older ones left."""
        for cache in Path(words["data"]).parent.glob("*.cache"):
            cache.unlink()
        code = f"from benchmarks.bench_start import {function}; {function}({framework!r}, {ours}, {words!r})"
        return [sys.executable, "-u", "-c", code]

    def watch(self, marks: list[str], framework: str, ours: bool, words: dict[str, Any]) -> list[float]:
        """Return after how many seconds each mark came in a training's output, one after the other; then end it."""
        command = self.command("train", framework, ours, words)
        log = self.folders["work"] / f"{framework}-{'torch_fastdet' if ours else 'stock'}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        times: list[float] = []
        text = ""
        with open(log, "wb") as file:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            assert process.stdout is not None
            try:
                while len(times) < len(marks) and (chunk := os.read(process.stdout.fileno(), 65536)):
                    now = time.perf_counter()
                    file.write(chunk)
                    text = text[-4096:] + chunk.decode(errors="replace")
                    while len(times) < len(marks) and (found := re.search(marks[len(times)], text)):
                        times.append(now - began)
                        text = text[found.end() :]
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # loader workers, too
                process.wait()
        if len(times) < len(marks):
            raise SystemExit(f"bench_start: no {marks[len(times)]!r} came; see {log}")
        return times

    def start(self, framework: str) -> None:
        options = self.options
        times: dict[bool, list[list[float]]] = {False: [], True: []}
        marks = {ours: {k: v for k, v in MARKS.items() if ours or k != PATCHED} for ours in times}
        for ours in times:  # Python compiles modules
            self.watch([*marks[ours].values()], framework, ours, self.words(framework, self.small, name="start"))
        for _ in range(options.rounds):
            for ours, found in times.items():
                if options.cold:
                    os.sync()
                    DROP.write_text("3")
                words = self.words(framework, self.data, name="start")
                found.append(self.watch([*marks[ours].values()], framework, ours, words))
        case = f"{PROGRAMS[framework]}, {self.models[framework]}, batch {BATCH}, {options.images:,} images"
        case += ", cold files" if options.cold else ""
        columns = [(mark, ours, column) for ours in times for mark, column in zip(marks[ours], zip(*times[ours]))]
        columns.sort(key=lambda column: [*MARKS].index(column[0]))
        apart(write, options, [(f"{case}: {mark}", ours, [*column], None) for mark, ours, column in columns])

    def scan(self, framework: str) -> None:
        rows = []
        for ours in (False, True):
            words = {"data": str(self.data), "rounds": self.options.rounds}
            command = self.command("scan", framework, ours, words)
            done = subprocess.run(command, env=self.env, text=True, capture_output=True)
            if done.returncode:
                raise SystemExit(f"bench_start: a scan ended with status {done.returncode}:\n{done.stderr[-2000:]}")
            seconds = json.loads(done.stdout.splitlines()[-1])
            case = f"{PROGRAMS[framework]}: cache_labels, {self.options.images:,} images"
            rows.append((case, ours, seconds, self.options.images))
        apart(write, self.options, rows)

    def trials(self, framework: str) -> None:
        tuned = framework == "ultralytics"
        marks = [FIRST, ENDS[framework]] * TRIALS
        rows = []
        for ours in (False, True):
            trials = {"iterations" if tuned else "evolve": TRIALS, "name": f"trials-{time.time_ns()}"}
            times = self.watch(marks[:-1], framework, ours, self.words(framework, self.small, **trials))
            gaps = [first - end for end, first in zip(times[1::2], times[2::2])]
            case = f"{'YOLO.tune' if tuned else '--evolve'}, {self.models[framework]}"
            case += f", {self.options.trial_images:,} images: from a trial's end to the next one's first iteration"
            rows.append((case, ours, gaps, None))
        apart(write, self.options, rows)


def main() -> None:
    from benchmarks.report import COCO

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="folder for JSON and PNG")
    parser.add_argument("--prepare", action="store_true", help="make the images alone")
    parser.add_argument("--parts", nargs="+", choices=["start", "scan", "trials"], default=["start", "scan", "trials"])
    parser.add_argument("--frameworks", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS])
    parser.add_argument("--images", type=int, help=f"default: {COCO} on a GPU, 64 on the CPU")
    parser.add_argument("--trial-images", type=int, help="default: 1024 on a GPU, 64 on the CPU")
    parser.add_argument("--rounds", type=int, default=3, help="starts, and scans, of each; default: 3")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each start")
    options = parser.parse_args()
    if options.cold and not os.access(DROP, os.W_OK):
        parser.error(f"--cold came, but {DROP} cannot be written here")
    cuda = options.device == "cuda"
    options.images = options.images or (COCO if cuda else 64)
    options.trial_images = options.trial_images or (1024 if cuda else 64)
    programs = Programs(options)
    if options.prepare:
        return
    for part in options.parts:
        for framework in options.frameworks:
            getattr(programs, part)(framework)


if __name__ == "__main__":
    main()
