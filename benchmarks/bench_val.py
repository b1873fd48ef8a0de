"""Time the real, unmodified val.py, stock and with torch_fastdet: its pass over the images, and the whole command.

    python -m benchmarks.bench_val [--model s] [--images 1536] [--repetitions 3] [--flags fastdet] [--segment] [--out FOLDER]
    python -m benchmarks.bench_val --jpegs 5000 --weights last.pt [...]

A GPU runs half precision at 640x640, batch 32 and 8 workers, val.py's defaults except for --half; the CPU runs yolov5n
at 128x128. The images are the demo's, as JPEGs from disk; weights are trained on them first for two epochs, with every
switch, so that there is something to detect. Both commands end with YOLOv5's plots. A pass is the whole of val.py's own
progress bar. ``ap_per_class`` is measured apart. With ``--jpegs`` the images are bench_dataset's, in COCO's sizes;
``--weights`` for its 80 classes come from a training of bench_dataset. With ``--segment`` segment/val.py runs on the
outlines of the demo's images.
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_dataset import COCO_SIZES, make_data
from benchmarks.bench_train import make_segments, train_segments
from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, missing
from examples.demo.training import FASTDET, STOCK, Machine, Variant, stream, train
from examples.yolov5_env import environment
from torch_fastdet.yolov5 import ALL, SWITCHES

BATCH = 32
# tqdm ends with the rate of the whole pass: "Class  Images ...: 100%|##########| 48/48 [00:06<00:00,  7.33it/s]".
BAR = re.compile(r"\b(\d+)/\1 \[[\d:]+<[\d:]+,\s*([\d.]+)(it/s|s/it)\]")


def pass_seconds(output: str) -> float | None:
    """Return how long val.py's progress bar ran."""
    found = BAR.findall(output)
    if not found:
        return None
    batches, rate, unit = found[-1]
    return int(batches) / float(rate) if unit == "it/s" else int(batches) * float(rate)


def make_weights(model: str, data: Path, machine: Machine, env: dict[str, str], segment: bool) -> Path:
    folder = WORK / "val" / f"{model}-{machine.image_size}{'-segment' * segment}"
    weights = folder / FASTDET.name / "weights" / "last.pt"
    if weights.exists():
        return weights
    if segment:
        train_segments(model, 64, FASTDET, folder, env, data, epochs=2, cuda=machine.device != "cpu")
    else:
        train(FASTDET, data, folder, env, machine, 2, 0, model=model, batch_size=64, show=False)
    return weights


def measure_average_precision(report: Report, repetitions: int, count: int = 1_500_000) -> None:
    """Measure ``ap_per_class`` on the host with as many random detections as COCO's 5,000 images can have."""
    from yolov5.utils.metrics import ap_per_class

    from torch_fastdet.switches.val.average_precision import from_one_sort
    from torch_fastdet.switches.val.yolov5 import plotted

    generator = np.random.default_rng(0)
    conf = generator.beta(0.3, 6, count).astype(np.float32)
    correct = generator.random((count, 1)) < conf[:, None]
    tp = correct & (np.arange(10) < generator.integers(0, 11, (count, 1)))
    classes, labels = (generator.integers(0, 80, n).astype(np.float32) for n in (count, 36_781))
    names = {number: str(number) for number in range(80)}
    times: dict[str, list[float]] = {STOCK.title: [], OURS: []}
    for _ in range(repetitions):
        for variant, function in ((STOCK.title, ap_per_class), (OURS, from_one_sort(ap_per_class, plotted))):
            begun = time.perf_counter()
            function(tp, conf, classes, labels, names=names)
            times[variant].append(1e6 * (time.perf_counter() - begun))
    case = f"ap_per_class, {count:,} detections of 80 classes"
    for variant, values in times.items():
        report.drop(case, variant)
        report.add(case, variant, "call", values)


def measure(report: Report, model: str, options: argparse.Namespace) -> None:
    from examples.demo import dataset  # its PIL may be missing

    images, repetitions, flags = options.images, options.repetitions, options.flags
    machine = Machine.find() if report.device.type == "cuda" else Machine("cpu", 128, 0, "CPU")
    cuda = machine.device != "cpu"
    if options.jpegs:
        data, images = make_data(options.jpegs, 90, COCO_SIZES), options.jpegs
    elif options.segment:
        data = make_segments(images, cuda)
    else:
        recipe = dataset.Recipe(machine.image_size, images)
        data = dataset.make(WORK / f"digits-{machine.image_size}-{images}", recipe)
    env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    weights = options.weights or make_weights(model, data, machine, env, options.segment)
    if report.prepare:
        return
    folder, script = WORK / "val", "segment/val" if options.segment else "val"
    arguments = {
        "--data": data, "--weights": weights, "--task": "train", "--batch-size": BATCH, "--imgsz": machine.image_size,
        "--device": "" if cuda else "cpu", "--workers": machine.workers, "--project": folder, "--name": "run",
    }  # fmt: skip
    words = [str(part) for pair in arguments.items() for part in pair] + ["--exist-ok", *(["--half"] if cuda else [])]
    ours = Variant(OURS, OURS, ("-m", "torch_fastdet.yolov5", *(f"--{flag}" for flag in flags)))
    times: dict[str, list[tuple[float, float]]] = {STOCK.title: [], OURS: []}
    for _ in range(repetitions):
        for variant in (STOCK, ours):
            shutil.rmtree(folder / "run", ignore_errors=True)
            log = folder / f"{variant.name}.log"
            begun = time.perf_counter()
            stream(variant.command(f"yolov5.{script.replace('/', '.')}", words), env, log, show=False)
            whole = time.perf_counter() - begun
            if (bar := pass_seconds(log.read_text(errors="replace"))) is None:
                raise SystemExit(
                    f"bench_val: {variant.title} ended without a whole progress bar; its output is in {log}"
                )
            times[variant.title].append((bar, whole))
    kind = f"{'half, ' if cuda else ''}batch {BATCH}, {images} JPEGs of "
    kind += "COCO's sizes" if options.jpegs else f"{machine.image_size}x{machine.image_size}"
    for index, what in enumerate(("the pass over the images", "the whole command")):
        case = f"{script}.py, {model}, {kind}: {what}"
        for name, values in times.items():
            report.drop(case, name)
            report.add(case, name, "call", [1e6 * value[index] for value in values])
    if not options.jpegs and not options.segment:
        measure_average_precision(report, repetitions)
    report.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", choices=tuple("nsmlx"), help="default: s on a GPU, n on the CPU")
    parser.add_argument("--images", type=at_least(BATCH), help="default: 1536 on a GPU, 128 on the CPU")
    parser.add_argument("--repetitions", type=at_least(1), default=3)
    parser.add_argument(
        "--flags", nargs="+", default=[ALL], choices=[ALL, *SWITCHES], help="switches of torch_fastdet.yolov5"
    )
    parser.add_argument("--segment", action="store_true", help="segment/val.py, not val.py")
    parser.add_argument("--jpegs", type=at_least(BATCH), help="how many images of bench_dataset; see above")
    parser.add_argument("--weights", type=Path, help="default: trained on the demo's images first")
    options = parser.parse_args()
    if options.jpegs and not options.weights:
        parser.error("--jpegs wants --weights, of a training of bench_dataset")
    if options.jpegs and options.segment:
        parser.error("bench_dataset has no outlines: --segment and --jpegs do not go together")
    if reason := missing("val"):
        print(f"nothing to do: {reason}")
        return
    cuda = options.device == "cuda"
    report = Report("val", torch.device(options.device), options.out, options.prepare)
    report.resume()
    model = f"yolov5{options.model or ('s' if cuda else 'n')}"
    options.images = options.images or (1536 if cuda else 128)
    measure(report, model, options)
    report.plot()


if __name__ == "__main__":
    main()
