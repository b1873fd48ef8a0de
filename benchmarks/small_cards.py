"""What cards of 8 to 24 GB train at with the frameworks' own trainers: the largest batch and its speed, stock and with ``patch()``. GPU only.

    python -m benchmarks.small_cards [--models yolov8s rtdetr-l yolov5s] [--cards 8 12 16] [--seconds 600] [--out FOLDER]

A batch of ``BATCHES`` fits if two epochs of it train and one batch is validated, and Ultralytics did not halve it. PyTorch's allocator gets
what the card leaves (benchmarks/report.py: APART_MIB less, for CUDA, its libraries and a desktop), and what asks for the card's memory
hears of that card, as the default budget of kept images does: so searches run side by side. ``beside_mib`` of a row is what CUDA took beside the
allocator, which APART_MIB must cover. Images a second are those of the largest batch, behind its first 16 batches, with the GPU and the host to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import OURS, ROOT, WORK, add_place, at_least, environment
from benchmarks.report import APART_MIB, as_json, results_folder, table

MODELS = ("yolov8s", "yolov8n", "yolo26s", "rtdetr-l", "yolov8m", "yolo11s", "yolov5s")
CARDS = (8, 10, 12, 16, 24)
BATCHES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
#: Batches of an epoch, and epochs.
SEARCHED, MEASURED = (4, 1), (8, 3)
WARM = 2  # epochs: images are kept behind the 16th batch
CLASSES = 80
MIB = 2**20
SIDE_BY_SIDE = 8


class Enough(Exception):
    """End a training, from one of its callbacks."""


class Clock:
    """Take the time of iterations, and end a training when it has shown what is asked."""

    def __init__(self) -> None:
        self.ends: list[list[float]] = []

    def begin(self, trainer: Any = None) -> None:
        if getattr(trainer, "_oom_retries", 0):
            raise Enough  # the trainer goes on with half of the batch
        self.ends.append([])

    def note(self, *_: object) -> None:
        self.ends[-1].append(time.perf_counter())

    def end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()

    def seconds(self) -> float:
        """Return the mean time of an iteration, without the first of each epoch."""
        spans = [(ends[-1] - ends[0]) / (len(ends) - 1) for ends in self.ends[WARM:]]
        return sum(spans) / len(spans)


def make_images(folder: Path) -> Path:
    """Draw the images once; a data set is a list of them."""
    from torch_fastdet.ultralytics.benchmark import draw_pictures

    if not (folder / "data.yaml").exists():
        draw_pictures(folder, MEASURED[0] * max(BATCHES))
    return folder


def data_set(images: Path, folder: Path, batch: int, length: int) -> Path:
    """Write a data set of an epoch's images, and of one batch to validate."""
    files = sorted((images / "images").glob("*.jpg"))
    place = folder / f"data{batch}-{length}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "train.txt").write_text("\n".join(map(str, files[: length * batch])))
    (place / "val.txt").write_text("\n".join(map(str, files[: 2 * batch])))
    names = "".join(f"  {number}: c{number}\n" for number in range(CLASSES))
    (place / "data.yaml").write_text(f"path: {place}\ntrain: train.txt\nval: val.txt\nnames:\n{names}")
    return place / "data.yaml"


def train_ultralytics(model: str, batch: int, data: Path, folder: Path, epochs: int, clock: Clock) -> bool:
    import ultralytics

    def last(trainer: Any) -> None:
        clock.end()
        if trainer.epoch + 1 == epochs:
            raise Enough

    network = (ultralytics.RTDETR if model.startswith("rtdetr") else ultralytics.YOLO)(f"{model}.yaml")
    network.add_callback("on_train_epoch_start", clock.begin)
    network.add_callback("on_train_batch_end", clock.note)
    network.add_callback("on_train_epoch_end", clock.end)
    network.add_callback("on_fit_epoch_end", last)
    with contextlib.suppress(Enough):
        network.train(
            data=data, batch=batch, epochs=epochs, imgsz=640, device=0, workers=8, cache="ram", plots=False, val=False,
            save=False, optimizer="SGD", project=folder, name="run", exist_ok=True, verbose=False,
        )  # fmt: skip
    return not network.trainer._oom_retries  # type: ignore[attr-defined]


def train_yolov5(model: str, batch: int, data: Path, folder: Path, epochs: int, clock: Clock) -> bool:
    from yolov5 import train
    from yolov5.utils.callbacks import Callbacks

    def last(_: object, epoch: int, *__: object) -> None:
        if epoch + 1 == epochs:
            raise Enough

    options = train.parse_opt(True)
    vars(options).update(
        weights="", cfg=f"{model}.yaml", data=str(data), epochs=epochs, batch_size=batch, imgsz=640, device="0", workers=8,
        cache="ram", nosave=True, noplots=True, project=folder, name="run", exist_ok=True,
    )  # fmt: skip
    callbacks = Callbacks()
    callbacks.register_action("on_train_epoch_start", callback=clock.begin)
    callbacks.register_action("on_train_batch_end", callback=clock.note)
    callbacks.register_action("on_train_epoch_end", callback=clock.end)
    callbacks.register_action("on_fit_epoch_end", callback=last)
    with contextlib.suppress(Enough):
        train.main(options, callbacks)
    return True


def trains(model: str, batch: int, images: Path, folder: Path, length: int, epochs: int) -> Clock | None:
    """Return the clock of a training, or None if the batch does not fit."""
    from torch_fastdet.memory import is_out_of_memory

    gc.collect()  # models hold themselves by cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    data, clock = data_set(images, folder, batch, length), Clock()
    train = train_yolov5 if model.startswith("yolov5") else train_ultralytics
    try:
        return clock if train(model, batch, data, folder, epochs, clock) else None
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


class Card:
    """Let this process take the GPU for one with less memory."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.about, self._free = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info

    def pretend(self, size: int) -> None:
        apart = APART_MIB * MIB
        torch.cuda.set_per_process_memory_fraction((size - apart) / self.about.total_memory)
        # Whoever asks hears of the small card: the budget of kept images, and Ultralytics before it empties the allocator's cache.
        torch.cuda.mem_get_info = lambda device=None: (size - apart - torch.cuda.memory_reserved(), size)
        torch.cuda.get_device_properties = lambda device=None: Properties(self.about, size)  # type: ignore[assignment, return-value]

    def beside(self) -> float:
        """Return what the whole GPU holds beside this process's allocator, in MiB."""
        torch.cuda.synchronize()
        free, total = self._free()
        return (total - free - torch.cuda.memory_reserved()) / MIB


class Properties:
    def __init__(self, real: Any, total_memory: int) -> None:
        self._real, self.total_memory = real, total_memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Search beside others, or measure alone."""
    with open(folder / "turn", "a") as file, open(folder / "queue", "a") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)  # who waits for the others keeps new ones out
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def search(fits: Callable[[int], bool], known: int, guess: Callable[[], float]) -> int:
    """Return the largest of BATCHES that fits, 0 if none does. ``known`` fits; ``guess`` says where to try next."""
    low, high = [0, *BATCHES].index(known), len(BATCHES)
    while low < high:
        near = sum(batch <= guess() for batch in BATCHES)
        middle = min(max(near if near > low else low + 1, low + 1), high)
        low, high = (middle, high) if fits(BATCHES[middle - 1]) else (low, middle - 1)
    return [0, *BATCHES][low]


def work(model: str, variant: str, cards: list[int], folder: Path, context: float, deadline: float) -> None:
    """Find and measure the batches of one model and variant; each row is a line on stdout."""
    shared, place = folder, folder / f"{model}-{variant.partition(' ')[0]}"
    family = "yolov5" if model.startswith("yolov5") else "ultralytics"
    card = Card()
    if variant == OURS:
        __import__(f"torch_fastdet.{family}", fromlist=["patch"]).patch()
    peaks: dict[int, float] = {}
    batch = 0

    def fits(batch: int) -> bool:
        if time.time() > deadline:
            raise TimeoutError
        with turn(shared, alone=False):
            clock = trains(model, batch, shared / "images", place, *SEARCHED)
        peaks[batch] = torch.cuda.max_memory_allocated() if clock else math.inf
        print(
            f"  {model}, {variant}, {size} GB, batch {batch}: {'fits' if clock else 'no'}", file=sys.stderr, flush=True
        )
        return clock is not None

    def guess() -> float:
        """Return the batch that a straight line through the peaks so far ends at."""
        known = sorted((batch, peak) for batch, peak in peaks.items() if peak < math.inf)
        if len(known) < 2:
            return (8, 16)[len(known)]
        (first, low), (last, high) = known[-2:]
        each = (high - low) / (last - first)
        return last + ((size << 30) - APART_MIB * MIB - high) / each * 0.97

    def measure(row: dict[str, Any]) -> None:
        while row["batch"]:
            if time.time() > deadline:
                raise TimeoutError
            before = card.beside()
            if clock := trains(model, row["batch"], shared / "images", place, *MEASURED):
                row["images_per_s"] = row["batch"] / clock.seconds()
                row["peak_mib"] = torch.cuda.max_memory_reserved() / MIB
                row["beside_mib"] = context + card.beside() - before
                return
            row["batch"] = [0, *BATCHES][BATCHES.index(row["batch"])]  # a longer training holds more

    rows: list[dict[str, Any]] = []
    try:
        for size in cards:
            card.pretend(size << 30)
            batch = search(fits, batch, guess)
            rows.append({"model": model, "variant": variant, "card": size, "batch": batch})
        with turn(shared, alone=True):
            for row in rows:
                card.pretend(row["card"] << 30)
                measure(row)
    finally:
        for row in rows:
            print(json.dumps(row), flush=True)


def small_table(rows: list[dict[str, Any]]) -> str:
    """Return the table: a line for each model and card."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        speed = f", {row['images_per_s']:,.0f} images/s" if "images_per_s" in row else ""
        cells.setdefault((row["model"], row["card"]), {})[row["variant"]] = f"{row['batch'] or 'none'}{speed}"
    lines = [
        [model, f"{card} GB", found.get("stock", "not run"), found.get(OURS, "not run")]
        for (model, card), found in sorted(cells.items(), key=lambda each: (MODELS.index(each[0][0]), each[0][1]))
    ]
    return table(["model", "card", "stock", OURS], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS)
    parser.add_argument("--seconds", type=at_least(1), default=3600, help="after which nothing new begins")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    add_place(
        parser, "--out", "folder of small_cards.json and small_cards.md (default: benchmarks/results/<machine>-<date>)"
    )
    options = parser.parse_args()
    if options.work:
        model, variant, *numbers = options.work
        with contextlib.suppress(TimeoutError):
            work(model, variant, sorted(options.cards), WORK / "small_cards", *map(float, numbers))
        return
    if options.device == "cpu" or not torch.cuda.is_available():
        print("nothing to do: memory is limited on a GPU only")
        return
    from examples.yolov5_env import environment as yolov5_environment

    deadline, folder, context = time.time() + options.seconds, WORK / "small_cards", Card().beside()
    folder.mkdir(parents=True, exist_ok=True)
    make_images(folder / "images")
    env = yolov5_environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore", "YOLO_OFFLINE": "true"}
    waiting = [(model, variant) for model in options.models for variant in ("stock", OURS)]
    running: list[subprocess.Popen] = []
    logs: list[Path] = []
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE and time.time() < deadline:
            model, variant = waiting.pop(0)
            logs.append(folder / f"{model}-{variant}.log")
            command = [sys.executable, "-m", "benchmarks.small_cards", "--cards", *map(str, options.cards)]
            command += ["--work", model, variant, str(context), str(deadline)]
            with open(logs[-1], "w") as log, open(logs[-1].with_suffix(".err"), "w") as errors:
                running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=errors))
        if time.time() > deadline + 8:
            for process in running:
                process.kill()
        running = [process for process in running if process.poll() is None]
        if time.time() > deadline:
            waiting.clear()
        time.sleep(0.2)
    about = environment(torch.device("cuda"))
    rows = [json.loads(line) | about for log in logs for line in log.read_text().splitlines() if line[:1] == "{"]
    out = options.out or results_folder(about)
    out.mkdir(parents=True, exist_ok=True)
    (out / "small_cards.json").write_text(as_json(rows))
    (out / "small_cards.md").write_text(small_table(rows))
    print(small_table(rows))


if __name__ == "__main__":
    main()
