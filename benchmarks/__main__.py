"""Run every benchmark on this machine into one folder, then make the tables (``python -m benchmarks``, make bench).

--device cpu|cuda   default: the GPU where there is one
--only NAME ...     some benchmarks, in this order: bbox_iou, upsample, ...; the roofline of all is always last
--budget SECONDS    for all of them; 0: no limit. Default: 520, so that an H200 ends within ten minutes, build included
--out FOLDER        default: benchmarks/results/<machine>-<date>; then the tables of README.md and docs/ are written again

A benchmark's old files in the folder are removed before it starts. One that fails or passes its limit loses only what
it has not measured yet. These make longer tables than fit the budget:
``python -m benchmarks.bench_train --models s16 s64 m32``, ``python -m benchmarks.bench_ultralytics --models all``,
``python -m benchmarks.bench_step --compiled s16 s64``, ``python -m benchmarks.bench_start``,
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

# They run in this order, each for at most so many seconds: if time runs out, what users ask for first is there.
LIMITS = {
    "multi_tensor": 90,
    "nms": 90,
    "loss": 90,
    "v8_loss": 150,
    "rtdetr": 60,
    "bbox_iou": 75,
    "upsample": 90,
    "image": 45,
    "jpeg": 60,
    "masks": 45,
    "detector": 45,
    "predict": 75,
    "serving": 45,
    "evaluation": 45,
    "bn_act": 75,
    "train": 170,
    "ultralytics": 110,
    "distributed": 110,
    "loader": 90,
    "val": 90,
    "track": 60,
    "detect": 120,
    "postprocess": 150,
    "step": 240,
    "latency": 120,
    "dataset": 400,
}
# What these compile or train is made first, all at once: it is no part of what they measure, and would take most of the
# time if made one after the other.
PREPARED = ("multi_tensor", "nms", "loss", "bbox_iou", "upsample", "bn_act", "val", "postprocess", "step")
PREPARE_SECONDS = 150
ROOFLINE = "roofline"
ROOFLINE_SECONDS = 25  # kept back for it


def run(command: list[str], seconds: float | None, quiet: bool = False) -> str:
    """Run a command with all its children for at most ``seconds``, and return how it ended."""
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
    """Fill the caches that the benchmarks find, of torch.compile and of weights, and print each one's seconds."""
    begun = time.monotonic()

    def one(name: str) -> None:
        how = run([sys.executable, "-m", f"benchmarks.bench_{name}", "--prepare"], PREPARE_SECONDS, quiet=True)
        print(f"== prepared {name}: {how}, {time.monotonic() - begun:.0f} s", flush=True)

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(one, names))


def left_out(name: str, device: str) -> str | None:
    """Return why there is nothing to measure here, or None."""
    if name in ("step", "serving", "evaluation") and device == "cpu":
        return "left out: measured on a GPU only"
    reason = harness.missing(name)
    return f"left out: {reason}" if reason else None


def remove_old(folder: Path, name: str) -> None:
    """Remove a benchmark's files from the folder: if it fails now, older rows must not pass for this run's."""
    for path in [*folder.glob(f"{name}.*"), *folder.glob(f"{name}_*.png")]:
        path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_place(parser, "--out", "default: benchmarks/results/<machine>-<date>")
    parser.add_argument("--only", nargs="+", choices=[*LIMITS, ROOFLINE], default=[*LIMITS, ROOFLINE])
    parser.add_argument("--budget", type=harness.at_least(0, float), default=520)
    arguments = parser.parse_args()
    environment = harness.environment(torch.device(arguments.device))
    folder = (arguments.out or report.results_folder(environment)).resolve()
    print(", ".join(f"{key} {value}" for key, value in environment.items() if value), flush=True)

    begun = time.monotonic()
    ended: dict[str, tuple[str, float]] = {}
    names = sorted(dict.fromkeys(arguments.only), key=lambda name: name == ROOFLINE)
    absent = {name: why for name in names if (why := left_out(name, arguments.device))}
    prepared = [name for name in names if name in PREPARED and name not in absent]
    if arguments.device == "cuda" and (len(prepared) > 1 or "step" in prepared):  # alone, the others take their time
        prepare(prepared)
    for name in names:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--device", arguments.device, "--out", str(folder)]
        if name == ROOFLINE:
            command[2:] = ["benchmarks.roofline", "--device", arguments.device, "--results", str(folder)]
            command.append("--leave-pages")
        limit = None
        if arguments.budget:
            left = arguments.budget - (started - begun)
            limit = max(left, 10.0) if name == ROOFLINE else min(LIMITS[name], left - ROOFLINE_SECONDS)
        if name == "step" and limit is not None:
            command += ["--seconds", str(limit)]
        how = absent.get(name, "not begun: no time left")
        if name not in absent and (limit is None or limit > 0):
            remove_old(folder, name)
            how = run(command, limit)
        ended[name] = (how, time.monotonic() - started)
        print(f"== {name}: {how}, {ended[name][1]:.0f} s", flush=True)

    trouble = report.bring_pages(folder)
    for name, (how, seconds) in ended.items():
        print(f"{name:14} {seconds:5.0f} s  {how}")
    print(f"{'all':14} {time.monotonic() - begun:5.0f} s")
    if trouble:
        print(trouble)
    fine = all(how == "ok" or how.startswith("left out") for how, _ in ended.values())
    return 0 if fine and not trouble else 1


if __name__ == "__main__":
    sys.exit(main())
