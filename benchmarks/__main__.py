"""``python -m benchmarks`` (make bench): every benchmark on this machine, into one folder, then the tables made from it.

--device cpu|cuda   default: the GPU where there is one
--only NAME ...     some benchmarks: bbox_iou, upsample, ...
--budget SECONDS    for all of them; 0: no limit. Default: 580, so that an H200 ends within ten minutes
--out FOLDER        default: benchmarks/results/<machine>-<date>

A benchmark's old files in the folder are removed before it starts; one that fails or passes its limit loses what it
has not measured yet, and nothing of the others. Longer tables than fit the budget:
``python -m benchmarks.bench_train --models s16 s64 m32``, ``python -m benchmarks.bench_step --compiled s16 s64``,
``python -m benchmarks.training_truth``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import harness, report

ROOT = Path(__file__).resolve().parents[1]

# In this order, with the seconds that each may take: where time ends early, what users ask for first is there.
LIMITS = {
    "multi_tensor": 90,
    "nms": 90,
    "loss": 90,
    "step": 240,
    "train": 100,
    "postprocess": 150,
    "bbox_iou": 75,
    "upsample": 90,
}
# What these compile or train is made first, all at once: it is no part of what they measure, and one after the other
# it would take most of the time.
PREPARED = ("multi_tensor", "nms", "loss", "step", "postprocess", "bbox_iou", "upsample")
PREPARE_SECONDS = 180
ROOFLINE = "roofline"
ROOFLINE_SECONDS = 25  # kept back for it


def run(command: list[str], seconds: float | None, quiet: bool = False) -> str:
    """Runs a command with all its children for so long at the most, and says how it ended."""
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=output, stderr=output)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:  # loader workers and trainings too, whatever ended the wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "out of time" if status is None else "ok" if status == 0 else f"failed, exit status {status}"


def prepare(names: list[str]) -> None:
    """Fills the caches that the benchmarks find: of torch.compile, and of weights."""
    commands = {name: [sys.executable, "-m", f"benchmarks.bench_{name}", "--prepare"] for name in names}
    with ThreadPoolExecutor(len(commands)) as pool:
        ended = {name: pool.submit(run, command, PREPARE_SECONDS, quiet=True) for name, command in commands.items()}
    print(f"== prepared: {', '.join(f'{name} {how.result()}' for name, how in ended.items())}", flush=True)


def remove_old(folder: Path, name: str) -> None:
    """Removes what a benchmark left in the folder: if it fails now, older rows must not pass for this run's."""
    for path in [*folder.glob(f"{name}.*"), *folder.glob(f"{name}_*.png")]:
        path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", choices=[*LIMITS, ROOFLINE], default=[*LIMITS, ROOFLINE])
    parser.add_argument("--budget", type=float, default=580)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    environment = harness.environment(torch.device(arguments.device))
    folder = (arguments.out or harness.results_folder(environment)).resolve()
    print(", ".join(f"{key} {value}" for key, value in environment.items() if value), flush=True)

    begun = time.monotonic()
    ended: dict[str, tuple[str, float]] = {}
    prepared = [name for name in PREPARED if name in arguments.only]
    if arguments.device == "cuda" and len(prepared) > 1:
        prepare(prepared)
        print(f"== prepared in {time.monotonic() - begun:.0f} s", flush=True)
    for name in [name for name in (*LIMITS, ROOFLINE) if name in arguments.only]:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--device", arguments.device, "--out", str(folder)]
        if name == ROOFLINE:
            command[2:] = ["benchmarks.roofline", "--device", arguments.device, "--results", str(folder)]
        limit = None
        if arguments.budget:
            left = arguments.budget - (started - begun)
            limit = max(left, 10.0) if name == ROOFLINE else min(LIMITS[name], left - ROOFLINE_SECONDS)
        how = "not begun: no time left"
        if limit is None or limit > 0:
            remove_old(folder, name)
            how = run(command, limit)
        ended[name] = (how, time.monotonic() - started)
        print(f"== {name}: {how}, {ended[name][1]:.0f} s", flush=True)

    if report.load(folder):
        (folder / "tables.md").write_text(report.tables(folder))
        print(f"wrote {folder / 'tables.md'}; python -m benchmarks.report brings the tables into README.md and docs/")
    for name, (how, seconds) in ended.items():
        print(f"{name:14} {seconds:5.0f} s  {how}")
    print(f"{'all':14} {time.monotonic() - begun:5.0f} s")
    return 0 if all(how == "ok" for how, _ in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
