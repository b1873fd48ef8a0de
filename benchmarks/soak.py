"""A long training, watched from outside: are the time of an epoch, memory, threads and open files flat?

    python -m benchmarks.soak --minutes 10          (or --hours 4)
    python -m benchmarks.soak --minutes 20 --kills 50

The real train.py with every switch that applies: yolov5n at 320 pixels, with validation, checkpoints and --multi-scale; on the CPU
at 64 pixels. A table has the slope of each quantity over the run and the slope's standard error. What grows by more than three of these
errors, and by more than 2% of itself over the run, is marked, and the exit status is 1 then.

--kills N: N times SIGKILL at a random moment, with ``--resume_exact``, and a resume after each. A resume that does not go on
to the last bit, where there is a checkpoint, ends the run with status 1.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import WORK
from examples.demo.dataset import Recipe, make
from examples.yolov5_env import environment

ERRORS, SHARE = 3.0, 0.02  # what counts as growth
LEFT_OUT = 3  # epochs that warm up: captures, caches, the first validation
MIB = 1 << 20


@dataclass
class Sample:
    """What the training's processes hold when an epoch is over."""

    hours: float
    epoch_seconds: float
    host_mib: float
    gpu_mib: float
    threads: float
    files: float


def processes(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for number in found:
        for task in Path(f"/proc/{number}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def _proportional_bytes(number: int) -> int:
    """Memory of a process, with its share of what it shares."""
    for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def sample(root: int, hours: float, seconds: float, device: torch.device) -> Sample:
    memory = threads = files = 0
    for number in processes(root):
        try:
            memory += _proportional_bytes(number)
            threads += len(os.listdir(f"/proc/{number}/task"))
            files += len(os.listdir(f"/proc/{number}/fd"))
        except OSError:  # it has ended
            continue
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return Sample(hours, seconds, memory / MIB, (total - free) / MIB, threads, files)


def slope(x: list[float], y: list[float]) -> tuple[float, float]:
    """Of the straight line through the points, with its standard error."""
    count, middle, mean = len(x), sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle) ** 2 for each in x)
    found = sum((a - middle) * (b - mean) for a, b in zip(x, y)) / spread
    rest = sum((b - mean - found * (a - middle)) ** 2 for a, b in zip(x, y))
    return found, math.sqrt(rest / (count - 2) / spread)


def table(samples: list[Sample]) -> tuple[str, list[str]]:
    """The table, and the quantities that grow."""
    lines = ["| quantity | mean | slope in an hour | its standard error | |", "|---|---|---|---|---|"]
    growing = []
    hours = [each.hours for each in samples]
    for name in ("epoch_seconds", "host_mib", "gpu_mib", "threads", "files"):
        values = [getattr(each, name) for each in samples]
        mean = sum(values) / len(values)
        found, error = slope(hours, values)
        grows = found > ERRORS * error and found * (hours[-1] - hours[0]) > SHARE * mean
        growing += [name] if grows else []
        lines.append(f"| {name} | {mean:,.2f} | {found:+,.3f} | {error:,.3f} | {'grows' if grows else 'flat'} |")
    return "\n".join(lines), growing


class Training:
    """train.py in a process, begun or resumed."""

    def __init__(self, folder: Path, device: torch.device, pictures: int, flags: list[str]) -> None:
        self.folder = folder
        on_gpu = device.type == "cuda"
        self.env = environment(folder / "environment")
        self.env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), self.env.get("PYTHONPATH", "")]
        )
        size = 320 if on_gpu else 64
        data = make(folder / "digits", Recipe(image_size=size, train=pictures, val=max(pictures // 8, 4)))
        self.run = folder / "run"
        self.flags = ["--fastdet", *flags]
        self.options = ["--data", str(data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", str(size)]
        self.options += [
            "--batch-size",
            "16" if on_gpu else "4",
            "--workers",
            "2",
            "--device",
            "0" if on_gpu else "cpu",
        ]
        self.options += ["--epochs", "100000", "--patience", "0", "--multi-scale", "--noplots", "--noautoanchor"]
        self.options += ["--project", str(folder), "--name", self.run.name, "--exist-ok"]
        self.log = folder / "log.txt"

    @property
    def last(self) -> Path:
        return self.run / "weights/last.pt"

    def start(self) -> subprocess.Popen:
        options = ["--resume", str(self.last)] if self.last.exists() else self.options
        command = [sys.executable, "-m", "torch_fastdet.yolov5", *self.flags, "-m", "yolov5.train", *options]
        with open(self.log, "w") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, cwd=self.folder, start_new_session=True
            )

    def epochs(self) -> int:
        results = self.run / "results.csv"
        return max(len(results.read_text().splitlines()) - 1, 0) if results.exists() else 0


def end(process: subprocess.Popen) -> None:
    """Kill it and what it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(training: Training, device: torch.device, seconds: float, least: int) -> list[Sample]:
    """A sample for each epoch, until the time is over and there are ``least`` samples."""
    samples: list[Sample] = []
    process, begin = training.start(), time.monotonic()
    try:
        seen, before = training.epochs(), None
        while len(samples) < least or time.monotonic() - begin < seconds:
            if process.poll() is not None:
                raise RuntimeError(
                    f"the training has ended with {process.returncode}:\n{training.log.read_text()[-3000:]}"
                )
            if (now := training.epochs()) > seen:
                moment = time.monotonic()
                if before is not None and now > LEFT_OUT:
                    each = (moment - before) / (now - seen)
                    samples.append(sample(process.pid, (moment - begin) / 3600, each, device))
                seen, before = now, moment
            time.sleep(0.05)
    finally:
        end(process)
    return samples


def kill(training: Training, kills: int, draw: random.Random) -> tuple[int, int]:
    """Kill and resume; how many resumes went on, and how many epochs there are in the end. A resume that fails is an error."""
    resumed = 0
    for _ in range(kills):
        expected, process = training.last.exists(), training.start()
        try:
            first = training.epochs()
            while training.epochs() == first and process.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.random() * 2)  # in the next epoch, or in what is written at its end
            output = training.log.read_text()
            if process.poll() is not None or (expected and "to the last bit" not in output):
                raise RuntimeError(f"a killed training does not go on:\n{output[-3000:]}")
            resumed += expected
        finally:
            end(process)
    return resumed, training.epochs()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=int, default=0, help="of the training set; default: 1,024, on the CPU 16")
    parser.add_argument("--least", type=int, default=8, help="epochs, however long they take")
    parser.add_argument("--folder", type=Path, default=WORK / "soak")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    pictures = options.pictures or (1024 if device.type == "cuda" else 16)
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    if options.kills:
        training = Training(folder, device, pictures, ["--resume_exact"])
        resumed, epochs = kill(training, options.kills, random.Random(0))
        print(f"killed {options.kills} times: {resumed} resumes to the last bit, {epochs} epochs")
        return 0
    seconds = options.hours * 3600 or options.minutes * 60
    samples = watch(Training(folder, device, pictures, []), device, seconds, options.least)
    text, growing = table(samples)
    print(f"{len(samples)} epochs in {samples[-1].hours:.2f} hours on {options.device}\n\n{text}")
    return 1 if growing else 0


if __name__ == "__main__":
    sys.exit(main())
