"""Time whole training steps of YOLOv5 at 640x640 under AMP: as shipped, tuned by hand, and with torch_fastdet.

    python -m benchmarks.bench_step [--models s16 s64 n16 m32 l16 x16] [--compiled s16] [--out FOLDER]

The step is train.py's without its loader, over one batch on the GPU: forward, loss, backward, unscale, clip, SGD, EMA,
and the loss items on the host, which train.py's progress bar reads every step; so a row is the time of a loop that
reads them each step. benchmarks/bench_train.py has the real script. Both need a GPU and the package yolov5.
torch.compile takes a minute or more per model and mode, so it is measured only for --compiled, and beyond the first of
them only with reduce-overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import multiprocessing
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_loss import HYP, make_targets
from benchmarks.harness import OURS, Report, add_arguments, host_syncs, launches, missing


def make_model(size: str, channels_last: bool):
    from yolov5.models import yolo

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = yolo.DetectionModel(str(Path(yolo.__file__).parent / f"yolov5{size}.yaml"), ch=3, nc=80).cuda().train()
    model.hyp = dict(HYP)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def compile_whole(model, mode: str):
    """Compile the model as one graph. SPPF.forward silences a warning of torch 1.9, on which Dynamo would leave the
    model's loop, compile each layer by itself and leave most of them eager (its limit of recompilations)."""
    from yolov5.models import common

    common.warnings = types.SimpleNamespace(catch_warnings=contextlib.nullcontext, simplefilter=lambda action: None)
    return torch.compile(model, mode=mode, fullgraph=True)


def foreach_average(ema, model) -> Callable[[], None]:
    pairs = [(a, v) for a, v in zip(ema.state_dict().values(), model.state_dict().values()) if a.is_floating_point()]
    averages, values = [a for a, _ in pairs], [v for _, v in pairs]
    return lambda: torch._foreach_lerp_(averages, values, 1e-4)


def stock_step(size: str, batch: int, tuned: bool, mode: str | None = None) -> Callable[[], None]:
    """Return train.py's step. tuned: channels_last, fused SGD, foreach EMA. mode: torch.compile's mode for the model,
    with the default for the loss (reduce-overhead on both failed in the backward pass on an H200)."""
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
    call = compile_whole(model, mode) if mode else model
    loss_of = torch.compile(compute_loss.__call__) if mode else compute_loss
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
    """Call GraphedModule and the fused pieces one by one."""
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


def train_step(size: str, batch: int) -> Callable[[], object]:
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


VARIANTS: dict[str, Callable[[str, int], Callable[[], object]]] = {
    "stock": lambda size, batch: stock_step(size, batch, False),
    "stock, tuned": lambda size, batch: stock_step(size, batch, True),
    f"{OURS} TrainStep": train_step,
    f"{OURS} GraphedModule": graphed_step,
}
# The first of torch.compile's modes, the faster of two, runs for each of --compiled, others for the first only.
MODES = {
    "stock, tuned, torch.compile, reduce-overhead": "reduce-overhead",
    "stock, tuned, torch.compile": "default",
    "stock, tuned, torch.compile, max-autotune": "max-autotune",
}


@contextlib.contextmanager
def fused_blocks(wanted: bool) -> Iterator[None]:
    """Apply the switches that change layers; original steps run after they are off, and graphs keep their operators."""
    from torch_fastdet import yolov5

    if wanted:
        yolov5.patch(bn_act_optim=True, upsample_optim=True)
    try:
        yield
    finally:
        yolov5.unpatch()


IN_A_ROW = 3  # steps, from the items of the one before them to those of the last
COMPILED_SECONDS = 40  # of one that `--prepare` has compiled, with the start of the process


def compiled_variants(names: list[str]) -> Iterator[tuple[str, str, Callable[[str, int], Callable[[], object]]]]:
    """Yield the name, the variant and what makes it, for each compiled variant."""
    for name in names:
        for variant, mode in MODES.items():
            if mode == "reduce-overhead" or name == names[0]:
                yield name, variant, partial(stock_step, tuned=True, mode=mode)


def measure(
    report: Report, name: str, variants: dict[str, Callable], repetitions: int = 30, seconds: float = 2
) -> None:
    """Time all variants of one model and batch in turns, side by side in memory, for at most ``seconds``.

    A row of torch_fastdet that was timed beside stock is kept when it now runs beside a compiled variant.
    """
    size, batch = name[0], int(name[1:])
    steps: dict[str, Callable[[], object]] = {}
    others: dict[str, dict[str, Any]] = {}
    for variant, make in variants.items():
        torch._dynamo.reset()  # a second model in one process would be compiled for any batch size, and slower
        gc.collect()  # models hold themselves by cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        try:
            with fused_blocks(variant.startswith(OURS)):
                step = make(size, batch)
                start = time.perf_counter()
                step()
                first_us = (time.perf_counter() - start) * 1e6
                for _ in range(7):
                    step()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_reserved() - before) / 2**20
            others[variant] = {"peak_mib": peak, "launches": launches(step), "host_syncs": host_syncs(step)}
        except Exception as error:
            if variant.startswith(OURS) or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"left out: {variant} ended with {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        steps[variant] = step
        if variant in MODES:
            print(f"{name}: {variant}: the first step, with compilation, took {first_us / 1e6:.0f} s", flush=True)
            report.drop(f"yolov5{size}, batch {batch}, first step", variant)
            report.add(f"yolov5{size}, batch {batch}, first step", variant, "call", [first_us])
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    begun = time.monotonic()
    for repetition in range(repetitions):
        if repetition >= 5 and time.monotonic() - begun > seconds:
            break
        for variant, step in steps.items():
            torch.cuda.synchronize()
            step()  # ends with the loss items on the host; torch_fastdet's are there before the backward pass has ended
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                step()
            times[variant].append((time.perf_counter() - start) * 1e6 / IN_A_ROW)
    case = f"yolov5{size}, batch {batch}, loop"
    compiled = not MODES.keys().isdisjoint(variants)
    there = {row.variant for row in report.rows if row.case == case}
    for variant, values in times.items():
        if compiled and variant.startswith(OURS) and variant in there:
            continue
        report.drop(case, variant)
        report.add(case, variant, "call", values, **others[variant])
    report.write()
    report.plot()  # now: compilation of the next may outlast the time that `make bench` gives


def measure_in_memory(report: Report, name: str, variants: dict[str, Callable]) -> None:
    """Measure variants side by side if they fit into memory, else one after the other."""
    try:
        measure(report, name, variants)
        return
    except torch.OutOfMemoryError:
        print(f"{name}: the variants do not fit side by side, so they are timed one after the other", flush=True)
    for variant, make in variants.items():
        measure(report, name, {variant: make})


def compile_step(name: str, variant: str, make: Callable[[str, int], Callable[[], object]]) -> str:
    """Compile a step for this model and batch, and print how that ended."""
    try:
        step = make(name[0], int(name[1:]))
        for _ in range(2):
            step()
    except Exception as error:
        return f"{name}: {variant} ended with {type(error).__name__}: {str(error)[:200]}"
    return f"{name}: {variant} is compiled"


def prepare(names: list[str]) -> None:
    """Compile all steps side by side, each in its own process: Dynamo works on one thread."""
    jobs = list(compiled_variants(names))
    if not jobs:
        return
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn")) as pool:
        for how in pool.map(compile_step, *zip(*jobs)):
            print(how, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=["s16", "s64", "n16", "m32", "l16", "x16"], help="size and batch"
    )
    parser.add_argument("--compiled", nargs="*", default=["s16"], help="size and batch, against torch.compile too")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no compiled one that does not fit")
    add_arguments(parser)
    options = parser.parse_args()
    if options.device == "cpu" or not torch.cuda.is_available():
        print("nothing to do: the training step is measured on a GPU only")
        return
    if reason := missing("step"):
        print(f"nothing to do: {reason}")
        return
    if options.prepare:
        prepare(options.compiled)
        return
    report = Report("step", torch.device("cuda"), options.out)
    report.resume()
    begun = time.monotonic()
    for name in options.models:
        measure_in_memory(report, name, VARIANTS)
    # Run torch.compile last, one at a time beside TrainStep: a compilation may outlast the remaining time.
    for name, variant, make in compiled_variants(options.compiled):
        if time.monotonic() - begun + COMPILED_SECONDS > options.seconds:
            print(
                f"left out: {name}: {variant}: no time left; python -m benchmarks.bench_step --models measures it alone"
            )
        else:
            measure_in_memory(report, name, {f"{OURS} TrainStep": train_step, variant: make})


if __name__ == "__main__":
    main()
