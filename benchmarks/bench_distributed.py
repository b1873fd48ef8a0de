"""Compare training on several GPUs of a host with training on one: a user's own loop, and the real train.py.

    python -m benchmarks.bench_distributed [--gpus 2] [--models s16 s64] [--parts step train] [--epochs 3] [--out FOLDER]

step: TrainStep, GraphedModule and stock DistributedDataParallel run over a batch for each GPU, first without a process
group on every GPU at once ("1 GPU"), then with one. exchange: the all-reduce alone. train: train.py runs with
hyp.scratch-low and --cache ram, a batch for each GPU, stock and --fastdet, under torchrun. It needs two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_loss import make_targets
from benchmarks.bench_step import fused_blocks, make_images, make_model
from benchmarks.bench_train import size_and_batch
from benchmarks.harness import OURS, WORK, Report, add_arguments, missing

VARIANTS = ("ours", "ours-1", "stock")  # on all GPUs, on one, and stock on all
NVLS = {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}


def torchrun(gpus: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]


# In a rank ------------------------------------------------------------------------------------------------------------


def ours(size: str, batch: int, whole: bool) -> Callable[[], Any]:
    from torch_fastdet.ema import ModelEMA
    from torch_fastdet.graphs import GraphedModule, TrainStep
    from torch_fastdet.optim import SGD, FusedStep
    from torch_fastdet.yolov5 import ComputeLoss

    model = make_model(size, True)
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    loss, ema = ComputeLoss(model), ModelEMA(model)
    images, targets = make_images(batch), make_targets(batch, 8, torch.device("cuda"))
    if whole:
        step = TrainStep(model, loss, optimizer, scaler, ema)
        return lambda: step(images, targets).tolist()
    fused, call = FusedStep(optimizer, scaler, ema, 10.0), GraphedModule(model, required=True)

    def one_by_one() -> None:
        with torch.autocast("cuda"):
            value, items = loss(call(images.float() / 255), targets)
        scaler.scale(value).backward()
        fused.step()
        optimizer.zero_grad()
        items.tolist()

    return one_by_one


def stock_ddp(size: str, batch: int) -> Callable[[], Any]:
    """Return train.py's own step without its loader."""
    from yolov5.utils.loss import ComputeLoss
    from yolov5.utils.torch_utils import ModelEMA, smart_optimizer

    model = make_model(size, False)
    optimizer = smart_optimizer(model, "SGD", 1e-4, 0.937, 5e-4)
    ema, scaler = ModelEMA(model), torch.amp.GradScaler("cuda", init_scale=1024.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], static_graph=True
    )
    loss = ComputeLoss(model)
    images, targets = make_images(batch), make_targets(batch, 8, torch.device("cuda"))

    def step() -> None:
        with torch.autocast("cuda"):
            value, items = loss(wrapped(images.float() / 255), targets)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update(model)
        items.tolist()

    return step


def exchange(size: str) -> tuple[Callable[[], Any], int]:
    from torch_fastdet.graphs.ranks import Ranks

    model = make_model(size, True)
    group = torch.distributed.group.WORLD
    assert group is not None
    ranks = Ranks(group)
    ranks.prepare(model)
    return ranks.average.exchange, sum(p.numel() * p.element_size() for p in model.parameters())


def _constant(value: Callable[[], Any]) -> Callable[[], Any]:
    return value


def timed(step: Callable[[], Any], seconds: float, warmup: int = 8) -> list[float]:
    """Return the microseconds of each call; all ranks make the same number of calls."""
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    calls = torch.tensor([max(10, int(seconds / max(time.perf_counter() - begun, 1e-4)))], device="cuda")
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(calls, 0)
    times = []
    for _ in range(int(calls)):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def rank(folder: Path, models: list[str], stock: bool) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []

    def measure(case: str, variant: str, make: Callable[[], Callable[[], Any]], seconds: float = 0.8) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with fused_blocks(variant.startswith(OURS)):
            times = timed(make(), seconds)
        rows.append(
            {
                "case": case,
                "variant": variant,
                "times": times,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
        if os.environ["RANK"] == "0":
            print(
                f"{case}: {variant}: {statistics.median(times) / 1e3:.3f} ms, peak {rows[-1]['peak_mib']:.0f} MiB",
                flush=True,
            )

    both = (("TrainStep", True), ("GraphedModule", False))
    for grouped in (False, True):
        gpus = int(os.environ["WORLD_SIZE"]) if grouped else 1
        if grouped:
            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        for name in models:
            size, batch = name[0], int(name[1:])
            case = f"yolov5{size}, {batch} a GPU, step"
            for title, whole in both:
                measure(case, f"{OURS}, {title}, {gpus} GPU", partial(ours, size, batch, whole))
            if grouped and stock:
                measure(case, f"stock, {gpus} GPU", partial(stock_ddp, size, batch))
            if grouped:
                call, count = exchange(size)
                measure(
                    f"yolov5{size}, {count / 1e6:.1f} MB of gradients",
                    f"{OURS}, exchange, {gpus} GPU",
                    partial(_constant, call),
                    0.3,
                )
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(rows))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# In the first process -------------------------------------------------------------------------------------------------


def measure_steps(report: Report, gpus: int, models: list[str], stock: bool) -> None:
    from examples.yolov5_env import environment

    env = environment(WORK / "environment") | NVLS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *torchrun(gpus), "-m", "benchmarks.bench_distributed", "--rank", folder]
        command += ["--models", *models, *([] if stock else ["--no-stock"])]
        subprocess.run(command, check=True, env=env)
        for row in json.loads(Path(folder, "0.json").read_text()):
            report.drop(row["case"], row["variant"])
            report.add(row["case"], row["variant"], "call", row["times"], peak_mib=round(row["peak_mib"], 1))
    report.write()


def run_train_py(
    name: str, title: str, launcher: list[str], data: Path, devices: list[int], epochs: int, workers: int
) -> list[float]:
    """Return the seconds of an iteration in each epoch of one train.py except the first."""
    from examples.demo.training import Variant, run_train, yolov5_folder
    from examples.yolov5_env import environment

    env = environment(WORK / "environment") | NVLS | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    folder = WORK / "distributed" / name / title.replace(", ", "-").replace(" ", "")
    shutil.rmtree(folder, ignore_errors=True)
    arguments = {
        "--data": data,
        "--weights": "",
        "--cfg": yolov5_folder() / f"models/yolov5{name[0]}.yaml",
        "--hyp": yolov5_folder() / "data/hyps/hyp.scratch-low.yaml",
        "--epochs": epochs,
        "--batch-size": int(name[1:]) * len(devices),
        "--imgsz": 640,
        "--device": ",".join(map(str, devices)),
        "--workers": workers,
        "--cache": "ram",
        "--seed": 0,
        "--project": folder.parent,
        "--name": folder.name,
    }
    # --noval is not used because train.py of yolov5 7.0.14 fails with it.
    options = [str(part) for pair in arguments.items() for part in pair] + ["--exist-ok", "--noplots"]
    run = run_train(Variant(title, title, tuple(launcher)), options, folder, env, show=False)
    return run.progress.iteration_seconds()


def measure_training(
    report: Report, gpus: int, models: list[str], epochs: int, images: int, variants: list[str]
) -> None:
    """Run trainings on one GPU side by side, each on its own GPU, as many as there are."""
    from examples.demo import dataset

    data = dataset.make(WORK / f"digits-640-{images}", dataset.Recipe(image_size=640, train=images))
    workers = min(16, (os.cpu_count() or 1) // gpus)
    fast = ["-m", "torch_fastdet.yolov5", "--fastdet"]

    def measure(name: str, variant: str, devices: list[int]) -> None:
        count = len(devices)
        title = {"ours": OURS, "ours-1": f"{OURS}, one GPU", "stock": "stock"}[variant]
        launcher = [*(torchrun(count) if count > 1 else []), *(fast if variant.startswith("ours") else [])]
        times = run_train_py(name, title, launcher, data, devices, epochs, workers)
        case = f"yolov5{name[0]}, {name[1:]} a GPU, train.py, {gpus} GPUs"
        rate = int(name[1:]) * count / statistics.median(times)
        print(f"{case}: {title}: {1e3 * statistics.median(times):.2f} ms, {rate:.0f} images/s", flush=True)
        with written:
            report.drop(case, title)
            report.add(case, title, "call", [1e6 * seconds for seconds in times])
            report.write()

    written = threading.Lock()
    for variant in variants:
        if variant != "ours-1":
            for name in models:
                measure(name, variant, list(range(gpus)))
            continue
        with ThreadPoolExecutor(gpus) as lanes:
            runs = [lanes.submit(measure, name, variant, [i % gpus]) for i, name in enumerate(models)]
        for run in runs:
            run.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", type=size_and_batch, default=["s16"], help="size and batch of each GPU")
    parser.add_argument("--parts", nargs="+", choices=["step", "train"], default=["step", "train"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1536)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="of the part train")
    parser.add_argument("--no-stock", action="store_true", help="leave the rows of stock out")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options.models, not options.no_stock)
        return
    if options.prepare:
        return
    if torch.cuda.device_count() < options.gpus:
        print(f"nothing to do: {options.gpus} GPUs are needed, and there are {torch.cuda.device_count()}")
        return
    if reason := missing("train"):
        print(f"nothing to do: {reason}")
        return
    report = Report("distributed", torch.device("cuda"), options.out)
    report.resume()
    if "step" in options.parts:
        measure_steps(report, options.gpus, options.models, not options.no_stock)
    if "train" in options.parts:
        variants = [variant for variant in options.variants if variant != "stock" or not options.no_stock]
        measure_training(report, options.gpus, options.models, options.epochs, options.images, variants)
    report.plot()


if __name__ == "__main__":
    main()
