"""Run the real train.py and detect.py of PyPI's yolov5 as subprocesses, and time their iterations from outside.

Both runs are the same command except for what starts the script: ``python -m yolov5.train ...`` for stock, and ``python
-m torch_fastdet.yolov5 --fastdet -m yolov5.train ...`` for torch_fastdet.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

BATCH_SIZE = 16
# These are added to hyp.no-augmentation.yaml. fliplr stays 0 because a flipped digit is another digit, or none. The
# rest makes a small problem learnable in 30 epochs: a higher rate, a shorter warm-up, more weight on the ten classes.
HYPERPARAMETERS = {"lr0": 0.02, "warmup_epochs": 1.0, "cls": 4.0, "fliplr": 0.0}


@dataclass(frozen=True)
class Variant:
    """Describe one of the two ways to start a script of yolov5."""

    name: str
    title: str
    launcher: tuple[str, ...]

    def command(self, module: str, arguments: list[str]) -> list[str]:
        return [sys.executable, "-u", *self.launcher, "-m", module, *arguments]


# --fastdet is every switch that applies on this machine; torch_fastdet/switches/registry.py lists them.
STOCK = Variant("stock", "stock", ())
FASTDET = Variant("fastdet", "torch_fastdet", ("-m", "torch_fastdet.yolov5", "--fastdet"))


@dataclass(frozen=True)
class Machine:
    device: str  # as train.py's --device takes it
    image_size: int
    workers: int
    title: str

    @classmethod
    def find(cls) -> Machine:
        """Return the first GPU if torch sees one and torch_fastdet is built for it, else the CPU, with smaller
        images."""
        import torch

        import torch_fastdet

        if torch.cuda.is_available():
            if torch_fastdet.build_info()["cuda"]:
                # The scripts run with --device 0; more than eight workers do not feed one GPU faster here.
                return cls("0", 640, min(8, os.cpu_count() or 1), torch.cuda.get_device_name(0))
            print("There is a GPU, but torch_fastdet is built for the CPU only: the demo runs on the CPU.", flush=True)
        return cls("cpu", 128, 0, f"CPU, {os.cpu_count()} cores")


@dataclass
class Progress:
    """Keep what train.py's progress bar printed: when each iteration of each epoch ended, and the losses so far."""

    done: dict[int, dict[int, float]] = field(default_factory=dict)
    batches: int = 0
    # These are box, obj and cls at each iteration, means since the first iteration of its epoch.
    losses: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)

    # "      3/29         0G     0.0853     0.0124     0.0331         80        128:  50%|#####     | 32/64 [00:04<..."
    # classify/train.py's: "       3/5      1.2G        2.31                    :  50%|#####     | 32/64 [00:04<..."
    LINE = re.compile(r"^\s*(\d+)/\d+\s+[\d.]+G((?:\s+[\dainfe.+-]+)+)\s*:.*\|\s*(\d+)/(\d+)\s\[")

    def feed(self, line: str, now: float) -> None:
        """Count a state of the bar, which train.py prints once in an iteration, before its counter goes up.

        classify/train.py prints its bar after the counter has gone up.
        """
        if match := self.LINE.match(line):
            epoch, before, self.batches = (int(match.group(group)) for group in (1, 3, 4))
            iterations = self.done.setdefault(epoch, {})
            if before not in iterations:
                iterations[before] = now
                losses = tuple(float(loss) for loss in match.group(2).split()[:3])
                if len(losses) == 3:  # a classifier has one
                    self.losses.setdefault(epoch, []).append(losses)

    @property
    def first_losses(self) -> list[tuple[float, ...]]:
        """Return the losses of the first epoch."""
        return self.losses.get(0, [])

    def epoch_seconds(self) -> list[float]:
        """Return each epoch's mean time from the end of the first iteration to the end of the last.

        It excludes the start of the process, the first batch of an epoch, validation and saving.
        """
        last, first = self.batches - 1, min((min(done) for done in self.done.values()), default=0)
        if last <= first or first > 1:
            return []
        whole = (done for _, done in sorted(self.done.items()) if {first, last} <= done.keys())
        return [(done[last] - done[first]) / (last - first) for done in whole]

    def iteration_seconds(self) -> list[float]:
        """Return the same without the first epoch, in which caches fill, if there are others."""
        epochs = self.epoch_seconds()
        return epochs[1:] or epochs

    def seconds_an_iteration(self) -> float | None:
        """Return the median over the epochs."""
        epochs = self.iteration_seconds()
        return statistics.median(epochs) if epochs else None

    def seconds_an_epoch(self) -> float | None:
        """Return the median time from one epoch to the next: training, validation and saving."""
        starts = [self.done[epoch][0] for epoch in sorted(self.done) if 0 in self.done[epoch]]
        steps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        return statistics.median(steps[1:] or steps) if steps else None


@dataclass
class Run:
    variant: Variant
    folder: Path
    epochs: list[dict[str, float]]  # one row of results.csv each
    progress: Progress
    seconds: float
    replaced: list[str]  # what torch_fastdet said that it replaced, one line each

    @property
    def weights(self) -> Path:
        return self.folder / "weights" / "best.pt"


class Echo:
    """Pass on a process's output: unchanged to a terminal, and to a file or pipe one state of a bar in two seconds."""

    def __init__(self, interval: float = 2.0):
        self.interval = 0.0 if sys.stdout.isatty() else interval
        self.last = 0.0

    def __call__(self, line: str, end: str, now: float) -> None:
        if end == "\r":
            if now - self.last < self.interval:
                return
            self.last = now
        # A terminal overwrites a bar; elsewhere each state gets a line of its own.
        sys.stdout.write(line + (end if sys.stdout.isatty() else "\n" if line.strip() else ""))
        sys.stdout.flush()


def stream(command: list[str], env: dict[str, str], log: Path, show: bool = True) -> tuple[list[str], Progress]:
    """Run a command, show its output as it comes, keep it in ``log``, and return its whole lines and its progress."""
    lines: list[str] = []
    progress, echo, pending = Progress(), Echo(), ""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "wb") as file,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 65536):
            now = time.perf_counter()
            file.write(chunk)
            # A character that the end of a chunk cuts in two belongs to a bar, and is only shown.
            *complete, pending = re.split(r"([\r\n])", pending + chunk.decode(errors="replace"))
            for line, end in zip(complete[::2], complete[1::2]):
                progress.feed(line, now)
                if show:
                    echo(line, end, now)
                if end == "\n":
                    lines.append(line)
        if show:
            print(pending, flush=True)
        code = process.wait()
    if code:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {code}; its output is in {log}")
    return lines, progress


def read_results(path: Path) -> list[dict[str, float]]:
    """Return the rows of a results.csv of train.py, which pads names and values with blanks."""
    with open(path, newline="") as file:
        return [
            {name.strip(): float(value) for name, value in row.items() if name and name.strip()}
            for row in csv.DictReader(file)
            if None not in row.values()  # segment/train.py's last row, which is no epoch
        ]


def yolov5_folder() -> Path:
    spec = importlib.util.find_spec("yolov5")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the demo trains with PyPI's yolov5, which is not installed; "
            "type: pip install --no-deps -r requirements/yolov5.txt"
        )
    return Path(spec.origin).parent


def train(
    variant: Variant,
    data: Path,
    project: Path,
    env: dict[str, str],
    machine: Machine,
    epochs: int,
    seed: int,
    model: str = "yolov5n",
    batch_size: int = BATCH_SIZE,
    show: bool = True,
) -> Run:
    """Train ``model`` from scratch into ``project/<variant>``."""
    yolov5 = yolov5_folder()
    hyperparameters = yaml.safe_load((yolov5 / "data/hyps/hyp.no-augmentation.yaml").read_text()) | HYPERPARAMETERS
    project.mkdir(parents=True, exist_ok=True)
    hyp = project / "hyp.yaml"
    hyp.write_text(yaml.safe_dump(hyperparameters, sort_keys=False))
    folder = project / variant.name
    arguments = {
        "--data": data,
        "--weights": "",
        "--cfg": yolov5 / f"models/{model}.yaml",
        "--hyp": hyp,
        "--epochs": epochs,
        "--batch-size": batch_size,
        "--imgsz": machine.image_size,
        "--device": machine.device,
        "--workers": machine.workers,
        "--cache": "ram",
        "--seed": seed,
        "--project": project,
        "--name": variant.name,
    }
    options = [str(part) for pair in arguments.items() for part in pair]
    return run_train(variant, [*options, "--exist-ok", "--noplots"], folder, env, show)


def run_train(
    variant: Variant, options: list[str], folder: Path, env: dict[str, str], show: bool = True, script: str = "train"
) -> Run:
    """Run train.py, or another ``script``, with ``options`` that put its results into ``folder``."""
    command = variant.command(f"yolov5.{script}", options)
    # By default the bar's counter moves at most ten times a second, and faster iterations share a state.
    env = env | {"TQDM_MININTERVAL": "0"}
    started = time.perf_counter()
    lines, progress = stream(command, env, folder / "train.log", show)
    seconds = time.perf_counter() - started
    said, in_block = [], False
    for line in lines:
        _, prefix, text = line.partition("torch_fastdet: ")
        in_block = (
            text == "this run, by switch:" if prefix else in_block and line.startswith(("  ", "nothing fell back"))
        )
        if prefix or in_block:
            said.append(text or line)
    return Run(variant, folder, read_results(folder / "results.csv"), progress, seconds, said)


def detect(run: Run, images: str, env: dict[str, str], machine: Machine) -> Path:
    """Run detect.py with a run's weights on a glob pattern of images.

    Returns the folder of the label files, with class, x, y, width, height and confidence in a line.
    """
    arguments = {
        "--weights": run.weights,
        "--source": images,
        "--imgsz": machine.image_size,
        "--device": machine.device,
        "--project": run.folder,
        "--name": "detect",
    }
    command = run.variant.command(
        "yolov5.detect",
        [str(part) for pair in arguments.items() for part in pair]
        + ["--exist-ok", "--nosave", "--save-txt", "--save-conf"],
    )
    stream(command, env, run.folder / "detect.log")
    return run.folder / "detect" / "labels"
