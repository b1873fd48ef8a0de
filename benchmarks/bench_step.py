"""Whole training steps of YOLOv5 at 640x640 under AMP: as shipped, tuned by hand, and with torch_fastdet. GPU only.

    python -m benchmarks.bench_step [--out FOLDER] [--models s16 s64 n16 m32]           a loop over one batch on the GPU
    python -m benchmarks.bench_step --script --data digits.yaml [--epochs 3] [...]      the real, unmodified train.py

The loop is train.py's step without its loader: forward, loss, backward, unscale, clip, SGD, EMA, and the loss items on the
host, which train.py's progress bar wants every step. Both need the package yolov5.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.bench_loss import HYP, make_targets
from benchmarks.harness import Report

# An epoch's bar begins with epoch and GPU memory; the last one it prints is full.
EPOCH_LINE = re.compile(r"^\s*\d+/\d+\s+[\d.]+G.*\s(\d+)/(\d+) \[[^\]]*?([\d.]+)(it/s|s/it)")


def make_model(size: str, channels_last: bool):
    from yolov5.models import yolo

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = yolo.DetectionModel(str(Path(yolo.__file__).parent / f"yolov5{size}.yaml"), ch=3, nc=80).cuda().train()
    model.hyp = dict(HYP)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def foreach_average(ema, model) -> Callable[[], None]:
    pairs = [(a, v) for a, v in zip(ema.state_dict().values(), model.state_dict().values()) if a.is_floating_point()]
    averages, values = [a for a, _ in pairs], [v for _, v in pairs]
    return lambda: torch._foreach_lerp_(averages, values, 1e-4)


def stock_step(size: str, batch: int, tuned: bool, compiled: bool = False) -> Callable[[], None]:
    """train.py's step. tuned: channels_last, fused SGD, foreach EMA; compiled: torch.compile on model and loss besides."""
    from yolov5.utils.loss import ComputeLoss
    from yolov5.utils.torch_utils import ModelEMA, smart_optimizer

    model = make_model(size, tuned)
    optimizer = smart_optimizer(model, "SGD", 1e-4, 0.937, 5e-4)
    compute_loss, ema = ComputeLoss(model), ModelEMA(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    average = (lambda: ema.update(model)) if not tuned else foreach_average(ema.ema, model)
    if tuned:
        for group in optimizer.param_groups:
            group["fused"] = True
    call = torch.compile(model) if compiled else model
    loss_of = torch.compile(compute_loss.__call__) if compiled else compute_loss
    images, targets = make_images(batch), make_targets(batch, 8, torch.device("cuda"))

    def step():
        x = images.float() / 255
        if tuned:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda"):
            loss, items = loss_of(call(x), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average()
        items.tolist()

    return step


def make_images(batch: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 3, 640, 640), dtype=torch.uint8, device="cuda")


def graphed_step(size: str, batch: int) -> Callable[[], None]:
    """GraphedModule and the fused pieces, called one by one."""
    from torch_fastdet.ema import ModelEMA
    from torch_fastdet.graphs import GraphedModule
    from torch_fastdet.optim import SGD, FusedStep
    from torch_fastdet.yolov5 import ComputeLoss

    model = make_model(size, True)
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    compute_loss = ComputeLoss(model)
    fused = FusedStep(optimizer, scaler, ModelEMA(model), 10.0)
    call = GraphedModule(model, required=True)
    images, targets = make_images(batch), make_targets(batch, 8, torch.device("cuda"))

    def step():
        with torch.autocast("cuda"):
            loss, items = compute_loss(call(images.float() / 255), targets)
        scaler.scale(loss).backward()
        fused.step()
        optimizer.zero_grad()
        items.tolist()

    return step


def train_step(size: str, batch: int) -> Callable[[], None]:
    from torch_fastdet.ema import ModelEMA
    from torch_fastdet.graphs import TrainStep
    from torch_fastdet.optim import SGD
    from torch_fastdet.yolov5 import ComputeLoss

    model = make_model(size, True)
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    step = TrainStep(model, ComputeLoss(model), optimizer, scaler, ModelEMA(model))
    images, targets = make_images(batch), make_targets(batch, 8, torch.device("cuda"))
    return lambda: step(images, targets).tolist()


VARIANTS = {
    "stock": lambda size, batch: stock_step(size, batch, False),
    "stock, tuned": lambda size, batch: stock_step(size, batch, True),
    "stock, tuned, torch.compile": lambda size, batch: stock_step(size, batch, True, True),
    "GraphedModule": graphed_step,
    "TrainStep": train_step,
}

# Compiling takes minutes.
DEFAULT_VARIANTS = [name for name in VARIANTS if "compile" not in name]


def measure_loop(models: list[str], variants: list[str], out: Path | None) -> None:
    report = Report("step", torch.device("cuda"))
    for name in models:
        size, batch = name[0], int(name[1:])
        for variant in variants:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step = VARIANTS[variant](size, batch)
            for _ in range(8):
                step()
            torch.cuda.synchronize()
            times = []
            for _ in range(30):
                start = time.perf_counter()
                step()  # ends with the loss items on the host
                times.append((time.perf_counter() - start) * 1e6)
            counts = {"peak_mib": torch.cuda.max_memory_reserved() / 2**20}
            report._add(f"yolov5{size}, batch {batch}, loop", variant, "call", times, None, counts)
            del step
    folder = report.write(out)
    report.plot(folder)


def measure_script(arguments: argparse.Namespace, out: Path | None) -> None:
    """Milliseconds an iteration in the last epoch of the real train.py, as its progress bar counts them."""
    from examples.yolov5_env import environment

    report = Report("train_script", torch.device("cuda"))
    root = Path(tempfile.mkdtemp())
    env = environment(root / "env")
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], os.getcwd()])
    for name in arguments.models:
        size, batch = name[0], int(name[1:])
        common = [
            "--img",
            640,
            "--batch",
            batch,
            "--epochs",
            arguments.epochs,
            "--data",
            arguments.data,
            "--weights",
            "",
        ]
        common += ["--cfg", f"yolov5{size}.yaml", "--workers", 16, "--noplots", "--noautoanchor", "--cache", "ram"]
        common += ["--project", root / "runs"]
        for variant, head, flags in (
            ("stock", ["-m", "yolov5.train"], []),
            (
                "torch_fastdet",
                ["-m", "torch_fastdet.yolov5", "-m", "yolov5.train"],
                [f"--{flag}" for flag in arguments.flags],
            ),
        ):
            command = [sys.executable, *head, *common, "--name", f"{name}{variant}", *flags]
            done = subprocess.run(
                [str(part) for part in command], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            if done.returncode:
                raise SystemExit(f"{variant} failed:\n{done.stdout[-6000:]}")
            print("\n".join(line for line in done.stdout.splitlines() if "torch_fastdet" in line), flush=True)
            found = [EPOCH_LINE.match(line) for line in re.split(r"[\r\n]", done.stdout)]
            full = [match.groups()[2:] for match in found if match and match[1] == match[2]]
            rates = [1e6 / float(rate) if unit == "it/s" else 1e6 * float(rate) for rate, unit in full]
            print(variant, [round(rate) for rate in rates], flush=True)
            report._add(
                f"yolov5{size}, batch {batch}, train.py", variant, "call", rates[1:], None, {}
            )  # the first captures
    report.write(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["s16", "s64", "n16", "m32"], help="size and batch")
    parser.add_argument("--variants", nargs="+", default=DEFAULT_VARIANTS, choices=list(VARIANTS))
    parser.add_argument("--script", action="store_true", help="the real train.py instead of a loop")
    parser.add_argument("--flags", nargs="+", default=["fastdet"], help="switches of --script")
    parser.add_argument("--data", type=Path, help="data set for --script")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--skip", type=int, default=4, help="progress bars shorter than four times this are validation's"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    if options.device == "cpu" or not torch.cuda.is_available():
        print("bench_step measures on a GPU only: nothing to do")
    elif options.script:
        measure_script(options, options.out)
    else:
        measure_loop(options.models, options.variants, options.out)
