"""Time an iteration of the real, unmodified train.py, loader included, stock and with torch_fastdet.

    python -m benchmarks.bench_train [--defaults s16 s64] [--cached s64 --workers 8 2] [--models s16] [--segments s16]
        [--classify s64] [--epochs N] [--flags fastdet] [--out FOLDER]

--defaults runs train.py as README's command starts it, on a GPU: 640x640, 8 workers, JPEGs of bench_loader from disk.
Weights are random, so that nothing is downloaded, and there are no plots.
--cached runs the same command with --cache ram and so many workers; on the CPU it is a dry run at 128x128.
--segments runs segment/train.py on the outlines of the demo's digits, from a RAM cache; on the CPU at 128x128.
--classify runs classify/train.py with default options on JPEGs of single digits at 224x224; on the CPU at 64x64.
--models runs the demo's images from a RAM cache at 640x640 (s16 s64 m32 is the whole table); on the CPU at 128x128.
An iteration is the mean over an epoch without its first batch, as examples/demo counts it, after the first epoch.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.bench_loader import make_data
from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, missing
from examples.demo.training import STOCK, Machine, Run, Variant, run_train, train, yolov5_folder
from examples.yolov5_env import CLASSIFIER, environment
from torch_fastdet.yolov5 import ALL, SWITCHES

VALIDATED = 64  # images of the training set, after each epoch


def measure_defaults(
    report: Report, models: list[str], epochs: int, flags: list[str], images: int, cached_by: int | None = None
) -> None:
    """Measure train.py on JPEGs, with default options or with --cache ram and ``cached_by`` workers."""
    root = make_data(images, validated=min(VALIDATED, images))
    data = WORK / f"jpegs-{images}.yaml"
    names = "".join(f"  {number}: class{number}\n" for number in range(80))
    data.write_text(f"path: {root}\ntrain: images\nval: validated.txt\nnames:\n{names}")

    def run(model: str, batch: int, variant: Variant, folder: Path, env: dict[str, str]) -> Run:
        config = yolov5_folder() / f"models/{model}.yaml"
        place = ["--project", str(folder), "--name", variant.name, "--exist-ok", "--noplots"]
        options = ["--data", str(data), "--weights", "", "--cfg", str(config), "--epochs", str(epochs), *place]
        options += [] if batch == 16 else ["--batch-size", str(batch)]
        options += [] if cached_by is None else ["--cache", "ram", "--workers", str(cached_by)]
        options += [] if report.device.type == "cuda" else ["--imgsz", "128"]
        return run_train(variant, options, folder / variant.name, env, show=False)

    for name in models:
        case = f"yolov5{name[0]}, batch {name[1:]}, train.py"
        case += "'s default options, JPEGs from disk" if cached_by is None else f" --cache ram --workers {cached_by}"
        case += "" if report.device.type == "cuda" else " at 128"
        compare(report, case, name, flags, "defaults", run)


def measure(report: Report, models: list[str], epochs: int, flags: list[str], images: int) -> None:
    from examples.demo import dataset  # its PIL may be missing

    machine = Machine.find() if report.device.type == "cuda" else Machine("cpu", 128, 0, "CPU")
    recipe = dataset.Recipe(image_size=machine.image_size, train=images)
    data = dataset.make(WORK / f"digits-{machine.image_size}-{images}", recipe)

    def run(model: str, batch: int, variant: Variant, folder: Path, env: dict[str, str]) -> Run:
        return train(variant, data, folder, env, machine, epochs, 0, model=model, batch_size=batch, show=False)

    for name in models:
        # The CPU's figure has no floor to compare with, so its name says so.
        case = f"yolov5{name[0]}, batch {name[1:]}, train.py"
        case += "" if machine.device == "0" else f" at {machine.image_size}"
        compare(report, case, name, flags, "train", run)


def train_segments(
    model: str, batch: int, variant: Variant, folder: Path, env: dict[str, str], data: Path, epochs: int, cuda: bool
) -> Run:
    """Run segment/train.py with default options and --cache ram; it validates only after the last epoch."""
    options = {
        "--data": data, "--weights": "", "--cfg": yolov5_folder() / f"models/segment/{model}-seg.yaml",
        "--epochs": epochs, "--batch-size": batch, "--imgsz": 640 if cuda else 128, "--cache": "ram", "--project": folder,
        "--name": variant.name, "--device": 0 if cuda else "cpu", **({} if cuda else {"--workers": 0}),
    }  # fmt: skip
    words = [str(part) for pair in options.items() for part in pair] + ["--noval", "--exist-ok", "--noplots"]
    return run_train(variant, words, folder / variant.name, env, show=False, script="segment.train")


def make_segments(images: int, cuda: bool) -> Path:
    """Make the demo's digits with their outlines."""
    from examples.demo import dataset  # its PIL may be missing

    recipe = dataset.Recipe(image_size=640 if cuda else 128, train=images, task="segment")
    return dataset.make(WORK / f"digits-{recipe.image_size}-{images}-segment", recipe)


def measure_segments(report: Report, models: list[str], epochs: int, flags: list[str], images: int) -> None:
    cuda = report.device.type == "cuda"
    data = make_segments(images, cuda)
    for name in models:
        case = f"yolov5{name[0]}-seg, batch {name[1:]}, segment/train.py" + ("" if cuda else " at 128")
        compare(report, case, name, flags, "segments", partial(train_segments, data=data, epochs=epochs, cuda=cuda))


def train_classifier(
    model: str, batch: int, variant: Variant, folder: Path, env: dict[str, str], data: Path, epochs: int, cuda: bool
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / f"{model}-cls.pt"
    config = str(yolov5_folder() / f"models/{model}.yaml")
    command = [sys.executable, "-c", CLASSIFIER, config, str(weights), "10", "10"]
    subprocess.run(command, env=env, check=True, capture_output=True)
    options = {
        "--model": weights, "--data": data, "--epochs": epochs, "--batch-size": batch, "--img": 224 if cuda else 64,
        "--pretrained": False, "--project": folder, "--name": variant.name, "--device": 0 if cuda else "cpu",
        **({} if cuda else {"--workers": 0}),
    }  # fmt: skip
    words = [str(part) for pair in options.items() for part in pair] + ["--exist-ok"]
    return run_train(variant, words, folder / variant.name, env, show=False, script="classify.train")


def measure_classifiers(report: Report, models: list[str], epochs: int, flags: list[str], images: int) -> None:
    from benchmarks.bench_ultralytics import make_data as make_folders

    cuda = report.device.type == "cuda"
    for name in models:
        case = f"yolov5{name[0]}-cls, batch {name[1:]}, classify/train.py" + ("" if cuda else " at 64")
        run = partial(
            train_classifier, data=make_folders("classify", 224 if cuda else 64, images), epochs=epochs, cuda=cuda
        )
        compare(report, case, name, flags, "classifiers", run)


def compare(report: Report, case: str, name: str, flags: list[str], kind: str, run: Callable[..., Run]) -> None:
    """Add the rows of stock and torch_fastdet."""
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    ours = Variant(OURS, OURS, ("-m", "torch_fastdet.yolov5", *(f"--{flag}" for flag in flags)))
    for variant in (STOCK, ours):
        folder = WORK / kind / name
        shutil.rmtree(folder / variant.name, ignore_errors=True)
        done = run(f"yolov5{name[0]}", int(name[1:]), variant, folder, env)
        times = done.progress.iteration_seconds()
        if not times:
            raise SystemExit(f"bench_train: {variant.title} printed no whole epoch; its output is in {done.folder}")
        switches = dict.fromkeys(line.partition(":")[0] for line in done.replaced if " -> " in line)
        print(f"{case}: {variant.title}, replaced by {', '.join(switches) or 'nothing'}", flush=True)
        report.drop(case, variant.title)
        report.add(case, variant.title, "call", [1e6 * seconds for seconds in times])
        report.write()


def size_and_batch(text: str) -> str:
    if not re.fullmatch(r"[nsmlx][1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"{text} came, but one of n, s, m, l, x and a batch size are expected, as in s16"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--defaults", nargs="*", type=size_and_batch, help="default: s16 s64 on a GPU")
    parser.add_argument("--cached", nargs="*", type=size_and_batch, default=[], help="default: none")
    parser.add_argument("--workers", nargs="+", type=at_least(0), default=[8, 2], help="of --cached; default: 8 and 2")
    parser.add_argument("--models", nargs="*", type=size_and_batch, help="size and batch; default: n16 on the CPU")
    parser.add_argument("--segments", nargs="*", type=size_and_batch, default=[], help="default: none")
    parser.add_argument("--classify", nargs="*", type=size_and_batch, default=[], help="default: none")
    parser.add_argument("--epochs", type=int, help="default: 2 with --defaults, 3 with --models")
    parser.add_argument(
        "--flags", nargs="+", default=[ALL], choices=[ALL, *SWITCHES], help="switches of torch_fastdet.yolov5"
    )
    parser.add_argument("--images", type=at_least(1), help="to train on; default: 1024 on a GPU, 256 on the CPU")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if options.epochs is not None and options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, but 2 or more are expected: the first is left out")
    if reason := missing("train"):
        print(f"nothing to do: {reason}")
        return
    if options.prepare:
        return  # its images take seconds
    report = Report("train", torch.device(options.device), options.out)
    report.resume()
    images = options.images or (1024 if cuda else 256)
    everything = (
        options.defaults is None and options.models is None and not options.cached + options.segments + options.classify
    )
    defaults = ["s16", "s64"] if everything else options.defaults or []
    models = ["n16"] if everything and not cuda else options.models or []

    def run(measure: Callable[..., None], names: list[str], epochs: int, *more: int) -> None:
        if names:  # their images take seconds
            measure(report, names, options.epochs or epochs, options.flags, images, *more)

    if cuda:  # first: what users start
        run(measure_defaults, defaults, 2)
    for workers in options.workers:
        run(measure_defaults, options.cached, 2, workers)
    run(measure, models, 3)
    run(measure_segments, options.segments, 3)
    run(measure_classifiers, options.classify, 3)
    report.plot()


if __name__ == "__main__":
    main()
