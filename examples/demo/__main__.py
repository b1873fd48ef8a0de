"""Train yolov5n on handwritten digits on photographs, with stock YOLOv5 and with torch_fastdet, and compare.

    make demo                    30 epochs; EPOCHS=2 is a quick look
    python -m examples.demo --epochs 30 --output runs/demo

This writes curves.png, detections.png (from 10 epochs on), results.json and both runs' folders to runs/demo. The exit
code is 1 if a run does not learn the task or the two do not agree.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path

from examples.demo import dataset, report
from examples.demo.training import FASTDET, HYPERPARAMETERS, STOCK, Machine, Run, detect, train
from examples.yolov5_env import environment


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=int(os.environ.get("EPOCHS") or report.FULL_EPOCHS),
        help="default: $EPOCHS, or 30",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, help="of the data set and of both trainings")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs is {arguments.epochs}, and at least 1 is expected")
    return arguments


def say(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def what_it_shows(machine: Machine, epochs: int) -> str:
    """Return what to expect, printed before anything runs."""
    shows = "the same train.py, trained stock and with torch_fastdet, has the same losses"
    if epochs >= report.FEW_EPOCHS:
        shows += " and learns the same"
    if machine.device == "cpu":
        return f"No GPU is used here, and most of torch_fastdet needs one: the two take about as long. What you see: {shows}."
    return f"What you see: {shows}, in less time."


def main() -> int:
    started = time.perf_counter()
    arguments = parse_arguments()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    machine = Machine.find()
    env = environment(output / "environment")
    env["PYTHONWARNINGS"] = "ignore"  # yolov5 is of 2023, and its deprecation warnings would tear its progress bars
    env["TORCH_FASTDET_LOG"] = "debug"  # each replaced name, which the report lists

    say(what_it_shows(machine, arguments.epochs))
    recipe = dataset.Recipe(image_size=machine.image_size, seed=arguments.seed)
    say(f"Images: {recipe.train} to train, {recipe.val} to validate, {recipe.image_size}x{recipe.image_size}")
    data = dataset.make(output / f"digits-{recipe.image_size}", recipe)

    runs: list[Run] = []
    for variant in (STOCK, FASTDET):
        shutil.rmtree(output / variant.name, ignore_errors=True)
        say(f"Training {len(runs) + 1} of 2, {variant.title}: yolov5n, {arguments.epochs} epochs, on {machine.title}")
        runs.append(train(variant, data, output, env, machine, arguments.epochs, arguments.seed))
    found = {}
    for run in runs if arguments.epochs >= report.FEW_EPOCHS else ():
        say(f"Detecting in a few validation images, {run.variant.title}")
        found[run.variant.title] = detect(run, str(data.parent / "images" / "val" / "0000[0-7]*.jpg"), env, machine)

    stock, ours = runs
    verdict = report.checks(stock, ours)
    report.plot_curves(output / "curves.png", stock, ours)
    if found:
        report.draw_detections(output / "detections.png", data, found)
    versions = {name: metadata.version(name) for name in ("torch", "yolov5", "ultralytics", "numpy")}
    about = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine.title,
        "python": platform.python_version(),
        "versions": versions,
        "epochs": arguments.epochs,
        "seed": arguments.seed,
        "image_size": machine.image_size,
        "hyperparameters": HYPERPARAMETERS,
    }
    report.write_json(output / "results.json", stock, ours, verdict, about)

    say(f"{machine.title}, {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(report.table(stock, ours), "\n")
    for check in verdict:
        print("passed" if check.passed else "FAILED", check.sentence, sep=": ")
    if arguments.epochs < report.FULL_EPOCHS:
        print(
            f"A quick look: boxes are drawn from {report.FEW_EPOCHS} epochs on, and the mAP50 that is reached is asserted from "
            f"{report.FULL_EPOCHS} on."
        )
    for name in ("curves.png", *(["detections.png"] if found else []), "results.json"):
        print(os.path.relpath(output / name))
    print(f"{time.perf_counter() - started:.0f} seconds", flush=True)
    return 0 if all(check.passed for check in verdict) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError) as error:
        sys.exit(f"demo: {error}")
