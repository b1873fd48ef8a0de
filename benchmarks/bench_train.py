"""The real, unmodified train.py on the demo's pictures, stock and with torch_fastdet: time of an iteration, loader included.

    python -m benchmarks.bench_train [--models s16] [--epochs 3] [--flags fastdet] [--out FOLDER]

On a GPU at 640x640 (--models s16 s64 m32 is the whole table); on the CPU yolov5n at 128x128, unless --models says otherwise.
An iteration is the mean over an epoch without its first batch, as examples/demo counts it; the first epoch is left out.
"""

from __future__ import annotations

import argparse
import re
import shutil

import torch

from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, missing
from examples.demo.training import STOCK, Machine, Variant, train
from examples.yolov5_env import environment
from torch_fastdet.yolov5.registry import ALL, SWITCHES


def measure(report: Report, models: list[str], epochs: int, flags: list[str], pictures: int) -> None:
    from examples.demo import dataset  # its PIL may be missing

    machine = Machine.find() if report.device.type == "cuda" else Machine("cpu", 128, 0, "CPU")
    recipe = dataset.Recipe(image_size=machine.image_size, train=pictures)
    data = dataset.make(WORK / f"digits-{machine.image_size}-{pictures}", recipe)
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    ours = Variant(OURS, OURS, ("-m", "torch_fastdet.yolov5", *(f"--{flag}" for flag in flags)))
    for name in models:
        size, batch = name[0], int(name[1:])
        # The CPU's figure has no floor to be compared with: its name says so.
        case = f"yolov5{size}, batch {batch}, train.py" + ("" if machine.device == "0" else f" at {machine.image_size}")
        for variant in (STOCK, ours):
            shutil.rmtree(WORK / "train" / name / variant.name, ignore_errors=True)
            run = train(
                variant,
                data,
                WORK / "train" / name,
                env,
                machine,
                epochs,
                0,
                model=f"yolov5{size}",
                batch_size=batch,
                show=False,
            )
            times = run.progress.iteration_seconds()
            if not times:
                raise SystemExit(f"bench_train: {variant.title} printed no whole epoch; its output is in {run.folder}")
            switches = dict.fromkeys(line.partition(":")[0] for line in run.replaced if " -> " in line)
            print(f"{case}: {variant.title}, replaced by {', '.join(switches) or 'nothing'}", flush=True)
            report.drop(case, variant.title)
            report.add(case, variant.title, "call", [1e6 * seconds for seconds in times])
            report.write()


def size_and_batch(text: str) -> str:
    if not re.fullmatch(r"[nsmlx][1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"{text} came, but one of n, s, m, l, x and a batch size are wanted, as in s16"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--models", nargs="+", type=size_and_batch, help="size and batch; default: s16 on a GPU, n16 on the CPU"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--flags", nargs="+", default=[ALL], choices=[ALL, *SWITCHES], help="switches of torch_fastdet.yolov5"
    )
    parser.add_argument("--pictures", type=at_least(1), help="to train on; default: 1024 on a GPU, 256 on the CPU")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if options.epochs < 2:
        parser.error(f"--epochs is {options.epochs}, but 2 or more are wanted: the first is left out")
    if reason := missing("train"):
        print(f"nothing to do: {reason}")
        return
    if options.prepare:
        return  # its pictures take seconds
    report = Report("train", torch.device(options.device), options.out)
    report.resume()
    models = options.models or ["s16" if cuda else "n16"]
    measure(report, models, options.epochs, options.flags, options.pictures or (1024 if cuda else 256))
    report.plot()


if __name__ == "__main__":
    main()
