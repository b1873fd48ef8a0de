"""Find the largest batch and its speed on cards of 8 to 24 GB with the frameworks' trainers, stock and with
``patch()``.

    python -m benchmarks.small_cards [--models yolov8s rtdetr-l yolov5s] [--cards 8 12 16] [--seconds 240] [--out FOLDER]

A batch of ``BATCHES`` is the largest if it trains and validates, and the next one runs out of memory (or Ultralytics
halves it). PyTorch's allocator gets what the card leaves (benchmarks/report.py: APART_MIB less), and queries of the
GPU's memory return the card's, as for the default budget of kept images. A process for each model and variant, as many
at once as the GPU has memory for such cards, tries batches beside the others, where only memory matters. Before timed
epochs all wait, and each has the GPU and the host to itself in turn. ``beside_mib`` is what the process held outside
the allocator, which APART_MIB must cover. Rows of other models, variants and cards that are in FOLDER stay.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.harness import OURS, ROOT, WORK, add_place, at_least, environment
from benchmarks.report import APART_MIB, NOT_MEASURED, as_json, results_folder, table

MODELS = ("yolov8s", "yolov8n", "yolo26s", "rtdetr-l", "yolov8m", "yolo11s", "yolov5s")
CARDS = (8, 10, 12, 16, 24)
BATCHES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
PROBED = (8, 16)  # a straight line through their peaks says where to search
SEARCHED, MEASURED = (4, 1), (12, 3)  # batches of an epoch, and epochs
TIMED = 2  # the epoch: images are kept behind the 16th batch
#: Validate this many images per image of a batch, twice a batch at a time: the second time captures a graph.
VALIDATED = 4
CLASSES = 80
MIB = 2**20


class Enough(Exception):
    """End a training from one of its callbacks."""


class Turn:
    """Let this process measure alone. The parent gives turns once every process asks."""

    def __init__(self, folder: Path, name: str) -> None:
        self.asked, self.given = folder / f"{name}.asked", folder / f"{name}.given"
        self.leave()

    def take(self) -> None:
        self.asked.touch()
        while not self.given.exists():
            time.sleep(0.02)
        for _ in range(15):  # loader processes of those that wait fill their queues
            if psutil.cpu_percent(0.2) < 5:
                return

    def leave(self) -> None:
        self.asked.unlink(missing_ok=True)
        self.given.unlink(missing_ok=True)


class Clock:
    """Time iterations, and end a training after enough of them."""

    def __init__(self, epochs: int, turn: Turn) -> None:
        self.epochs, self.turn = epochs, turn
        self.ends: list[list[float]] = []

    def begin(self, trainer: Any = None) -> None:
        if getattr(trainer, "_oom_retries", 0):
            raise Enough  # the trainer goes on with half of the batch
        if len(self.ends) == TIMED - 1:
            torch.cuda.synchronize()
            self.turn.take()
        self.ends.append([])

    def note(self, *_: object) -> None:
        self.ends[-1].append(time.perf_counter())

    def end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        if len(self.ends) == self.epochs:
            self.turn.leave()

    def last(self, *_: object, **__: object) -> None:
        if len(self.ends) == self.epochs:
            raise Enough

    def seconds(self) -> float:
        """Return the mean time of an iteration in the timed epoch without its first."""
        ends = self.ends[TIMED]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def data_set(images: Path, folder: Path, batch: int, length: int) -> Path:
    """Write a data set of an epoch's images. The process has its own label caches."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("images", "labels"):
        if not (folder / part).exists():
            (folder / part).symlink_to(images / part)
    files = sorted((folder / "images").glob("*.jpg"))
    for split, count in (("train", length), ("val", VALIDATED)):
        (folder / f"{split}.txt").write_text("\n".join(map(str, files[: count * batch])))
    names = "".join(f"  {number}: c{number}\n" for number in range(CLASSES))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: train.txt\nval: val.txt\nnames:\n{names}")
    return folder / "data.yaml"


def train_ultralytics(model: str, batch: int, data: Path, clock: Clock) -> bool:
    import ultralytics

    network = (ultralytics.RTDETR if model.startswith("rtdetr") else ultralytics.YOLO)(f"{model}.yaml")
    network.add_callback("on_train_epoch_start", clock.begin)
    network.add_callback("on_train_batch_end", clock.note)
    network.add_callback("on_train_epoch_end", clock.end)
    network.add_callback("on_fit_epoch_end", clock.last)
    with contextlib.suppress(Enough):
        network.train(
            data=data, batch=batch, epochs=clock.epochs, imgsz=640, device=0, workers=8, cache="ram", plots=False, val=False,
            save=False, close_mosaic=0, optimizer="SGD", project=data.parent, name="run", exist_ok=True, verbose=False,
        )  # fmt: skip
    return not network.trainer._oom_retries  # type: ignore[attr-defined]


def train_yolov5(model: str, batch: int, data: Path, clock: Clock) -> bool:
    from yolov5 import train
    from yolov5.utils.callbacks import Callbacks

    options = train.parse_opt(True)
    vars(options).update(
        weights="", cfg=f"{model}.yaml", data=str(data), epochs=clock.epochs, batch_size=batch, imgsz=640, device="0", workers=8,
        cache="ram", nosave=True, noplots=True, project=data.parent, name="run", exist_ok=True,
    )  # fmt: skip
    callbacks = Callbacks()
    callbacks.register_action("on_train_epoch_start", callback=clock.begin)
    callbacks.register_action("on_train_batch_end", callback=clock.note)
    callbacks.register_action("on_train_epoch_end", callback=clock.end)
    callbacks.register_action("on_fit_epoch_end", callback=clock.last)
    with contextlib.suppress(Enough):
        train.main(options, callbacks)
    return True


class Card:
    """Let this process treat the GPU as one with less memory."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.about = torch.cuda.get_device_properties(0)

    def pretend(self, size: int) -> None:
        """Give later trainings what a card of that size has, not counting what an earlier one left."""
        gc.collect()  # models hold themselves by cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.left = torch.cuda.memory_allocated()
        most = size - APART_MIB * MIB + self.left
        torch.cuda.set_per_process_memory_fraction(most / self.about.total_memory)
        # Both the budget of kept images and Ultralytics, before it empties the allocator's cache, see the small card.
        torch.cuda.mem_get_info = lambda device=None: (most - torch.cuda.memory_reserved(), size)
        torch.cuda.get_device_properties = lambda device=None: Properties(self.about, size)  # type: ignore[assignment, return-value]

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated() - self.left

    @staticmethod
    def beside() -> dict[str, float]:
        """Return what this process holds outside its allocator, if the driver names processes."""
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        said = []
        with contextlib.suppress(OSError):
            said = subprocess.run(command, capture_output=True, text=True).stdout.replace(",", "").split()
        held = dict(zip(said[::2], said[1::2])).get(str(os.getpid()), "")
        return {"beside_mib": int(held) - torch.cuda.memory_reserved() / MIB} if held.isdecimal() else {}


class Properties:
    def __init__(self, real: Any, total_memory: int) -> None:
        self._real, self.total_memory = real, total_memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def line(peaks: dict[int, float]) -> Callable[[int], float]:
    """Return what a batch needs by a straight line through the largest two peaks, or through one and zero."""
    (first, low), (last, high) = sorted([(0, 0.0), *peaks.items()])[-2:]
    return lambda batch: high + (batch - last) * (high - low) / (last - first)


def work(model: str, variant: str, cards: list[int], folder: Path, deadline: float) -> None:
    """Find and measure the batches of one model and variant; each row is a line on stdout."""
    name = f"{model}-{variant}"
    turn, card = Turn(folder, name), Card()
    family = "yolov5" if model.startswith("yolov5") else "ultralytics"
    if variant == OURS:
        __import__(f"torch_fastdet.{family}", fromlist=["patch"]).patch()
    from torch_fastdet.memory import is_out_of_memory

    train = train_yolov5 if family == "yolov5" else train_ultralytics
    while not (folder / "images/data.yaml").exists():
        time.sleep(0.1)

    def trains(size: int, batch: int, length: int, epochs: int) -> Clock | None:
        """Return the clock of a training, or None if the batch does not fit."""
        if time.time() > deadline:
            raise TimeoutError
        began, fits, clock = time.time(), False, Clock(epochs, turn)
        card.pretend(size << 30)
        try:
            fits = train(model, batch, data_set(folder / "images", folder / name, batch, length), clock)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            turn.leave()
            how = f"{time.time() - began:.1f} s, peak {card.peak() / MIB:.0f} MiB, {card.left / MIB:.0f} left before"
            print(f"  {size} GB, batch {batch}: {'fits' if fits else 'no'}, {how}", file=sys.stderr, flush=True)
        return clock if fits else None

    peaks = {batch: card.peak() for batch in PROBED if trains(cards[-1], batch, *SEARCHED)}
    need = line(peaks or {PROBED[0]: math.inf})
    index = 0
    for size in cards:
        most = 0.97 * ((size << 30) - APART_MIB * MIB)
        index = max(index, sum(need(batch) <= most for batch in BATCHES))
        while index < len(BATCHES) and trains(size, BATCHES[index], *SEARCHED):
            index += 1
        row: dict[str, Any] = {"model": model, "variant": variant, "card": size, "batch": 0}
        while index:  # a longer training may hold more
            if clock := trains(size, BATCHES[index - 1], *MEASURED):
                row["batch"] = BATCHES[index - 1]
                row["images_per_s"] = row["batch"] / clock.seconds()
                row["peak_mib"] = torch.cuda.max_memory_reserved() / MIB
                row |= card.beside()
                break
            index -= 1
        print(json.dumps(row), flush=True)


def small_table(rows: list[dict[str, Any]]) -> str:
    """Return the table with a line for each model and card."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        speed = f", {row['images_per_s']:,.0f} images/s" if "images_per_s" in row else ""
        cells.setdefault((row["model"], row["card"]), {})[row["variant"]] = f"{row['batch'] or 'none'}{speed}"
    lines = [
        [model, f"{card} GB", found.get("stock", NOT_MEASURED), found.get(OURS, NOT_MEASURED)]
        for (model, card), found in sorted(cells.items(), key=lambda each: (MODELS.index(each[0][0]), each[0][1]))
    ]
    return table(["model", "card", "stock", OURS], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS)
    parser.add_argument("--seconds", type=at_least(1), default=3600, help="after which nothing new begins")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    add_place(
        parser, "--out", "folder of small_cards.json and small_cards.md (default: benchmarks/results/<machine>-<date>)"
    )
    options = parser.parse_args()
    folder = WORK / "small_cards"
    if options.work:
        model, variant, deadline = options.work
        del sys.argv[1:]  # train.py of YOLOv5 reads them
        with contextlib.suppress(TimeoutError):
            work(model, variant, sorted(options.cards), folder, float(deadline))
        return
    if options.device == "cpu" or not torch.cuda.is_available():
        print("nothing to do: memory is limited on a GPU only")
        return
    from examples.yolov5_env import environment as yolov5_environment
    from torch_fastdet.ultralytics.benchmark import draw_images

    deadline = time.time() + options.seconds
    folder.mkdir(parents=True, exist_ok=True)
    env = yolov5_environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore", "YOLO_OFFLINE": "true"}
    # More of them would run out of memory that a real card has.
    at_once = max(1, torch.cuda.get_device_properties(0).total_memory // (max(options.cards) << 30))
    waiting = [(model, variant) for model in options.models for variant in ("stock", OURS)]
    logs: list[Path] = []
    running: dict[str, subprocess.Popen] = {}
    turns: list[Path] = []
    while running or waiting:
        if time.time() > deadline:
            waiting.clear()
        while waiting and len(running) < at_once:
            model, variant = waiting.pop(0)
            name = f"{model}-{variant}"
            logs.append(folder / f"{name}.log")
            command = [sys.executable, "-m", "benchmarks.small_cards", "--cards", *map(str, options.cards)]
            command += ["--work", model, variant, str(deadline)]
            with open(logs[-1], "w") as log, open(folder / f"{name}.err", "w") as errors:
                running[name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=errors)
        if not (folder / "images/data.yaml").exists():  # the processes wait for it
            draw_images(folder / "images", MEASURED[0] * max(BATCHES))
        if time.time() > deadline + 8:
            for process in running.values():
                process.kill()
        running = {name: process for name, process in running.items() if process.poll() is None}
        asking = [path for name in running if (path := folder / f"{name}.asked").exists()]
        if not any((folder / f"{name}.given").exists() for name in running):
            if not turns and len(asking) == len(running):
                turns = asking
            turns = [path for path in turns if path in asking]
            if turns:
                (path := turns.pop(0)).rename(path.with_suffix(".given"))
        time.sleep(0.02)
    about = environment(torch.device("cuda"))
    rows = [json.loads(line) | about for log in logs for line in log.read_text().splitlines() if line[:8] == '{"model"']
    out = options.out or results_folder(about)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "small_cards.json"
    before = json.loads(file.read_text()) if file.exists() else []
    measured = {(row["model"], row["variant"], row["card"]) for row in rows}
    rows = [row for row in before if (row["model"], row["variant"], row["card"]) not in measured] + rows
    file.write_text(as_json(rows))
    (out / "small_cards.md").write_text(small_table(rows))
    print(small_table(rows))


if __name__ == "__main__":
    main()
