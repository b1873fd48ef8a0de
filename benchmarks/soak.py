"""Watch a long training from outside: are the time of an epoch, memory, threads and open files flat?

    python -m benchmarks.soak --minutes 10          (or --hours 4)
    python -m benchmarks.soak --evolve 40
    python -m benchmarks.soak --kills 50 --jobs 10  (--host ultralytics)

The real train.py runs with every switch that applies: yolov5n at 320 pixels, with validation, checkpoints and
--multi-scale; on the CPU at 64 pixels. A table has the slope of each quantity over the run and over its second half,
with standard errors. What grows in the second half by more than three errors and by more than 1% of itself is marked,
and the exit status is 1; the first half warms up. --minutes count from the start of the program. The folder that it
names has samples.csv with a row per epoch.

--evolve N runs N generations of one epoch, one after the other in one process, with a sample per generation.

--kills N sends SIGKILL N times, and resumes after each, to trainings with ``--resume_exact`` that are killed five
times; --jobs of them run at a time. Half of the kills come at random, the others while a checkpoint is written. One
more training is not killed. Each saved state (weights, moving average, optimizer, scaler, random states and so on) must
have the bits of one of its states, the last of its last, and results.csv must be the same, or the exit status is 1.
--host ultralytics trains yolov8n at 64 pixels, without the times of results.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from benchmarks.harness import WORK
from examples.demo.dataset import Recipe, make
from examples.yolov5_env import environment
from torch_fastdet.switches.resume_exact import files

ERRORS, SHARE = 3.0, 0.01  # what counts as growth
LEFT_OUT = 3  # epochs that warm up: captures, caches, the first validation
KILLS = 5  # of one training
MIB = 1 << 20


@dataclass
class Sample:
    """Hold what the training's processes hold at the end of an epoch. Shared memory counts in parts."""

    hours: float
    epoch_seconds: float
    host_mib: float
    mapped_mib: float  # of files, such as libraries; the fewer processes map them, the more is this one's share
    gpu_mib: float
    threads: float
    files: float


def processes(root: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [root]
    for number in found:
        for task in Path(f"/proc/{number}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def _memory(number: int) -> tuple[int, int]:
    """Return KiB of a process, with its part of shared memory: all that it holds, and how much of that is of files."""
    lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name[:3] == "Pss"
    }
    files = found.get("Pss_File", 0)
    return found.get("Pss", 0) - files, files


def sample(root: int, hours: float, seconds: float, device: torch.device) -> Sample:
    host = mapped = threads = files = 0
    for number in processes(root):
        try:
            of_process = _memory(number)
            threads += len(os.listdir(f"/proc/{number}/task"))
            files += len(os.listdir(f"/proc/{number}/fd"))
        except OSError:  # it has ended
            continue
        host, mapped = host + of_process[0], mapped + of_process[1]
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return Sample(hours, seconds, host / 1024, mapped / 1024, (total - free) / MIB, threads, files)


def slope(x: list[float], y: list[float]) -> tuple[float, float]:
    """Return the slope of the straight line through the points and its standard error."""
    count, middle, mean = len(x), sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle) ** 2 for each in x)
    found = sum((a - middle) * (b - mean) for a, b in zip(x, y)) / spread
    rest = sum((b - mean - found * (a - middle)) ** 2 for a, b in zip(x, y))
    return found, math.sqrt(rest / (count - 2) / spread) if count > 2 else math.inf


def table(samples: list[Sample]) -> tuple[str, list[str]]:
    """Return the table and the quantities that grow."""
    lines = [
        "| quantity | first | last | mean | slope in an hour | its standard error | in the second half | its standard error | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    growing = []
    later = samples[len(samples) // 2 :]
    for field in fields(Sample)[1:]:
        values, second = ([getattr(each, field.name) for each in part] for part in (samples, later))
        mean = sum(values) / len(values)
        whole = slope([each.hours for each in samples], values)
        found, error = slope([each.hours for each in later], second)
        grows = (
            field.name != "mapped_mib"
            and found > ERRORS * error
            and found * (later[-1].hours - later[0].hours) > SHARE * mean
        )
        growing += [field.name] if grows else []
        numbers = [f"{value:,.2f}" for value in (values[0], values[-1], mean)]
        numbers += [f"{value:,.3f}" for value in (*whole, found, error)]
        lines.append(f"| {field.name} | {' | '.join(numbers)} | {'grows' if grows else 'flat'} |")
    return "\n".join(lines), growing


class Training:
    """Run train.py in a process, begun or resumed, or ``generations`` trainings of one epoch each.

    ``program`` is the launcher, or a module that runs it.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        images: int,
        generations: int = 0,
        epochs: int = 100_000,
        program: str = "torch_fastdet.yolov5",
        flags: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        on_gpu = device.type == "cuda"
        self.env = environment(folder / "environment")
        self.env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), self.env.get("PYTHONPATH", "")]
        )
        size = 320 if on_gpu else 64
        data = make(folder / "digits", Recipe(image_size=size, train=images, val=max(images // 8, 4)))
        self.run = folder / "run"
        self.program = [program, "--fastdet", *flags]
        self.options = ["--data", str(data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", str(size)]
        self.options += [
            "--batch-size",
            "16" if on_gpu else "4",
            "--workers",
            "2",
            "--device",
            str(device.index or 0) if on_gpu else "cpu",
        ]
        self.options += ["--epochs", "1", "--evolve", str(generations)] if generations else ["--epochs", str(epochs)]
        self.options += ["--patience", "0", "--multi-scale", "--noplots", "--noautoanchor"]
        self.options += ["--project", str(folder), "--name", self.run.name, "--exist-ok"]
        self.log = folder / "log.txt"
        self.results = self.run / ("evolve.csv" if generations else "results.csv")

    @property
    def last(self) -> Path:
        return self.run / "weights/last.pt"

    def command(self) -> list[str]:
        options = ["--resume", str(self.last)] if self.last.exists() else self.options
        return [*self.program, "-m", "yolov5.train", *options]

    def start(self) -> subprocess.Popen:
        if not self.last.exists():
            shutil.rmtree(self.run, ignore_errors=True)  # of a training that was killed before its first checkpoint
        with open(self.log, "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *self.command()],
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )

    def table(self) -> str:
        return self.results.read_text()

    def epochs(self) -> int:
        return max(len(self.results.read_text().splitlines()) - 1, 0) if self.results.exists() else 0

    def writes(self, since: float) -> bool:
        """Return whether a process begun at ``since`` writes, or was killed writing, a checkpoint; older files are
        others'."""
        with contextlib.suppress(FileNotFoundError):
            folders = self.last.parent.glob(f"{files.WRITING}*")
            return any(file.stat().st_mtime > since for folder in folders for file in folder.iterdir())
        return False


class UltralyticsTraining(Training):
    """Run a training by Ultralytics' trainer, begun or resumed."""

    def command(self) -> list[str]:
        data, device = self.folder / "digits/data.yaml", self.options[self.options.index("--device") + 1]
        epochs = self.options[self.options.index("--epochs") + 1]
        where = [str(data), str(self.folder), self.run.name]
        return ["tests.ultralytics.programs.killed", *where, f"epochs={epochs}", f"device={device}"]

    def table(self) -> str:
        """Return the table without its second column, the time."""
        return re.sub(r"^([^,]*),[^,]*", r"\1", super().table(), flags=re.M)


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(training: Training, device: torch.device, end_at: float, least: int) -> list[Sample]:
    """Take a sample per epoch until the training ends, or time is up and there are ``least`` samples."""
    samples: list[Sample] = []
    process, begin = training.start(), time.monotonic()
    try:
        seen, before = training.epochs(), None
        with open(training.folder / "samples.csv", "w") as file:
            file.write(",".join(field.name for field in fields(Sample)) + "\n")
            while len(samples) < least or time.monotonic() < end_at:
                if process.poll() is not None:
                    if process.returncode == 0:
                        break
                    raise RuntimeError(
                        f"the training has ended with {process.returncode}:\n{training.log.read_text()[-3000:]}"
                    )
                if (now := training.epochs()) > seen:
                    moment = time.monotonic()
                    if before is not None and now > LEFT_OUT:
                        each = (moment - before) / (now - seen)
                        samples.append(sample(process.pid, (moment - begin) / 3600, each, device))
                        file.write(",".join(f"{value:.6g}" for value in astuple(samples[-1])) + "\n")
                        file.flush()
                    seen, before = now, moment
                time.sleep(0.05)
    finally:
        end(process)
    return samples


@dataclass
class Killed:
    """Hold a training that was killed so many times and has ended."""

    resumes: int  # where there was a checkpoint
    writing: int  # kills while a checkpoint was written
    states: list[str]  # checksums of those that were saved
    table: str


def kill(training: Training, kills: int, draw: random.Random) -> Killed:
    """Kill and resume a training, then let it end. A resume that fails is an error."""
    resumes, writing, states = 0, 0, []
    for number in range(kills + 1):
        begin, expected, first = time.time(), training.last.exists(), training.epochs()
        process = training.start()
        is_last = number == kills
        try:
            while (is_last or training.epochs() <= first) and process.poll() is None:
                time.sleep(0.01)
            if not is_last and number % 2:  # in the next epoch, or in what is written at its end
                time.sleep(draw.random())
            elif not is_last:
                while not training.writes(begin) and process.poll() is None:
                    time.sleep(0.001)
                time.sleep(draw.random() * 0.05)
            output, status = training.log.read_text(), process.poll()
            if status != (0 if is_last else None) or (expected and "to the last bit" not in output):
                raise RuntimeError(f"a killed training does not go on ({status}):\n{output[-3000:]}")
        finally:
            end(process)
        resumes += expected
        writing += training.writes(begin)
        states += re.findall("^SAVED (.*)\n", output, flags=re.M)
    return Killed(resumes, writing, states, training.table())


def kill_many(
    folder: Path, device: torch.device, images: int, kills: int, jobs: int, kind: type[Training] = Training
) -> int:
    """Run trainings that are killed, ``jobs`` at a time, and one that is not; return whether their bits differ."""
    counts = [0, *(min(KILLS, kills - done) for done in range(0, kills, KILLS))]
    epochs, program = 5 * max(counts) + 3, "tests.yolov5.programs.killed"  # no more pass before the last kill
    trainings = [
        kind(folder / str(number), device, images, 0, epochs, program, ("--resume_exact",))
        for number in range(len(counts))
    ]
    for training in trainings:
        training.env["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(jobs) as pool:
        whole, *killed = pool.map(kill, trainings, counts, map(random.Random, range(len(counts))))
    differ = [
        number
        for number, each in enumerate(killed, 1)
        if not set(each.states) <= set(whole.states) or (each.states[-1], each.table) != (whole.states[-1], whole.table)
    ]
    resumes, writing, states = (
        sum(map(count, killed)) for count in (lambda k: k.resumes, lambda k: k.writing, lambda k: len(k.states))
    )
    print(
        f"killed {kills} times on {device}, {writing} of them while a checkpoint was written: {resumes} resumes to the last bit"
    )
    print(
        f"{len(killed)} trainings of {epochs} epochs; states that they saved: {states}, of one that was not killed: {len(whole.states)}"
    )
    print(f"trainings with other bits: {differ or 'none'}")
    return int(bool(differ) or len(set(whole.states)) != epochs)


KINDS = {"yolov5": Training, "ultralytics": UltralyticsTraining}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--host", choices=KINDS, default="yolov5", help="whose trainings are killed, with --kills")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, with --kills")
    parser.add_argument("--evolve", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--images",
        type=int,
        default=0,
        help="of the training set; default: 1,024, with --evolve and --kills 64, on the CPU 16",
    )
    parser.add_argument("--least", type=int, default=8, help="epochs, however long they take")
    parser.add_argument("--folder", type=Path, default=WORK / "soak")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    device = torch.device(options.device)
    few = options.evolve or options.kills
    images = options.images or (16 if device.type == "cpu" else 64 if few else 1024)
    folder = options.folder / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    if options.kills:
        return kill_many(folder, device, images, options.kills, options.jobs, KINDS[options.host])
    seconds = math.inf if options.evolve else options.hours * 3600 or options.minutes * 60
    training = Training(folder, device, images, options.evolve)
    samples = watch(training, device, begin + seconds, options.least)
    if len(samples) < 4:
        print(f"{len(samples)} samples are too few for a slope; {LEFT_OUT + 4} epochs or generations are the least")
        return 1
    text, growing = table(samples)
    what = "generations" if options.evolve else "epochs"
    print(f"{len(samples)} {what} in {samples[-1].hours:.2f} hours on {options.device}: {folder}/samples.csv\n\n{text}")
    return 1 if growing else 0


if __name__ == "__main__":
    sys.exit(main())
