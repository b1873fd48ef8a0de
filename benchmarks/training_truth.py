"""Compare what training learns with torch_fastdet and stock: train.py or Ultralytics' trainer, several seeds each.

    python -m benchmarks.training_truth --out FOLDER [--model s] [--epochs 60] [--seeds 3] [--jobs 2] [--minutes 9]
    python -m benchmarks.training_truth --out FOLDER --small --seeds 16 --jobs 12 --variants stock fastdet only_loss_optim
    python -m benchmarks.training_truth --out FOLDER --model yolo26n [...]
    python -m benchmarks.training_truth --out FOLDER --model yolov8n-seg [...]
    python -m benchmarks.training_truth --out FOLDER --model yolov8n-rtdetr [...]
    python -m benchmarks.training_truth --out FOLDER --report

A run is train.py from scratch on the demo's images. Its variant is ``stock``, ``fastdet`` (``torch_fastdet.yolov5
--fastdet``) or ``only_<switch>`` (only that switch). With a model of Ultralytics a run is its trainer's, with default
arguments except for size, epochs and batch; models that end in -seg, -pose or -obb get their task's labels. --jobs of
them share the machine and take turns on its GPUs. Each finished run leaves <variant>-seed<n>.json in FOLDER, and a run
with a file is not repeated: several commands can share the work. With --minutes no run begins that would end later,
judged by the longest so far. When all are done, or with --report, FOLDER.md has a table of means and of the difference
with its standard error, and FOLDER.png a plot. The default FOLDER is training_truth in the results folder of this
machine and day; benchmarks/report.py names the others that the docs show.

--small is for many seeds: yolov5n at 320x320, batch 64 (an optimizer step in each iteration). A difference means
something from twelve seeds on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, as_json, pyplot, results_folder, table
from examples.demo.training import FASTDET, STOCK, Machine, Progress, Run, Variant, read_results, train

MAP50, MAP = "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"  # columns of train.py's results.csv
NAMES = {
    MAP: "mAP50-95",
    MAP50: "mAP50",
    "metrics/mAP50-95(M)": "mAP50-95 of masks",
    "metrics/mAP50-95(P)": "mAP50-95 of keypoints",
    "metrics/precision": "precision",
    "metrics/recall": "recall",
    "val/box_loss": "val box loss",
    "val/giou_loss": "val GIoU loss",
    "val/seg_loss": "val seg loss",
    "val/pose_loss": "val pose loss",
    "val/kobj_loss": "val kobj loss",
    "val/angle_loss": "val angle loss",
    "val/obj_loss": "val obj loss",
    "val/cls_loss": "val cls loss",
    "val/dfl_loss": "val dfl loss",
    "val/l1_loss": "val l1 loss",
    "train/box_loss": "train box loss",
}
# The plot shows these, six at most.
PANELS = [name for name in NAMES if name not in ("metrics/precision", "metrics/recall", "val/kobj_loss")]
# Ultralytics' results.csv has other names for these columns.
ULTRALYTICS_NAMES = {
    "metrics/mAP50-95(B)": MAP,
    "metrics/mAP50(B)": MAP50,
    "metrics/precision(B)": "metrics/precision",
    "metrics/recall(B)": "metrics/recall",
}
TASKS = {"seg": "segment", "pose": "pose", "obb": "obb"}
MAP_WANTED = 0.6  # mAP50-95, so that the runs have learnt the task
FEW = 4  # seeds that a plot of curves can tell apart
ONLY = "only_"


@dataclass(frozen=True)
class Settings:
    """Hold what all runs of a comparison have in common."""

    model: str = "yolov5s"
    epochs: int = 60
    image_size: int = 640
    images: int = 1024
    batch_size: int = 16

    @property
    def of_yolov5(self) -> bool:
        """Return whether the runs are train.py's rather than those of Ultralytics' trainer."""
        return self.model.startswith("yolov5")


SMALL = Settings("yolov5n", 20, 320, 1024, 64)


def variant_of(name: str) -> Variant:
    """Return the variant with this name: stock, fastdet or only_<switch>."""
    if name in (STOCK.name, FASTDET.name):
        return STOCK if name == STOCK.name else FASTDET
    from torch_fastdet import ultralytics, yolov5

    switches = {**yolov5.SWITCHES, **ultralytics.SWITCHES}
    switch = name.removeprefix(ONLY)
    if name == switch or switch not in switches:
        names = ", ".join([STOCK.name, FASTDET.name, *(ONLY + switch for switch in switches)])
        raise ValueError(f"there is no variant {name!r}; there are: {names}")
    return Variant(name, f"{switch} alone", ("-m", "torch_fastdet.yolov5", f"--{switch}"))


def file_of(folder: Path, variant: Variant, seed: int) -> Path:
    return folder / f"{variant.name}-seed{seed}.json"


def finished(folder: Path, settings: Settings | None = None) -> dict[tuple[str, int], dict[str, Any]]:
    """Map (variant, seed) to what a run left. Different settings raise an error: such curves cannot be compared."""
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        run = json.loads(path.read_text())
        found = Settings(**run["settings"])
        settings = settings or found
        if found != settings:
            raise SystemExit(f"{path} is of {found}, but {settings} is expected; name another --out")
        runs[run["variant"], run["seed"]] = run
    return runs


def one_run(
    folder: Path, work: Path, variant: Variant, seed: int, settings: Settings, machine: Machine, data: Path, about: dict
) -> float:
    """Train, write the run's file, and return the seconds that this took."""
    from examples.yolov5_env import environment

    started = time.monotonic()
    project = work / settings.model / f"seed{seed}"  # a command for another model may run beside this one
    shutil.rmtree(project / variant.name, ignore_errors=True)
    env = environment(work / "environment") | {"PYTHONWARNINGS": "ignore"}
    begin = train if settings.of_yolov5 else train_ultralytics
    run = begin(variant, data, project, env, machine, settings.epochs, seed, settings.model, settings.batch_size, False)
    if (epochs := [row["epoch"] for row in run.epochs]) != list(range(settings.epochs)):
        raise RuntimeError(
            f"{run.folder} has rows of the epochs {epochs}, but 0 to {settings.epochs - 1} are expected, each once; "
            "another training may have written there"
        )
    found = {
        "variant": variant.name,
        "seed": seed,
        "settings": asdict(settings),
        **about,
        "seconds": round(run.seconds, 1),
        "seconds_an_iteration": run.progress.seconds_an_iteration(),
        "nms_timeouts": (run.folder / "train.log").read_text(errors="replace").count("time limit"),
        "replaced": run.replaced,
        "epochs": run.epochs,
    }
    path = file_of(folder, variant, seed)
    path.with_suffix(".part").write_text(as_json(found))
    path.with_suffix(".part").rename(path)  # never half a file
    shutil.rmtree(project / variant.name, ignore_errors=True)
    print(f"{path.name}: mAP50-95 {run.epochs[-1][MAP]:.4f} after {run.seconds:.0f} s", flush=True)
    return time.monotonic() - started


def train_ultralytics(
    variant: Variant,
    data: Path,
    project: Path,
    env: dict[str, str],
    machine: Machine,
    epochs: int,
    seed: int,
    model: str,
    batch_size: int,
    show: bool,
) -> Run:
    """Train ``model`` from scratch by Ultralytics' command into ``project/<variant>``."""
    folder = project / variant.name
    folder.mkdir(parents=True, exist_ok=True)
    flags = [] if variant == STOCK else [f"--{variant.name.removeprefix(ONLY)}"]
    words = {
        "model": f"{model}.yaml", "data": data, "epochs": epochs, "batch": batch_size, "imgsz": machine.image_size,
        "device": machine.device, "workers": machine.workers, "cache": "ram", "seed": seed, "plots": False,
        "project": project, "name": variant.name, "exist_ok": True,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.ultralytics_run", str(folder / "times.json"), *flags, "train"]
    command += [f"{key}={value}" for key, value in words.items()]
    started = time.perf_counter()
    with open(folder / "train.log", "w") as log:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.perf_counter() - started
    log_text = (folder / "train.log").read_text(errors="replace")
    if code:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {code}: {log_text[-500:]}")
    rows = [
        {ULTRALYTICS_NAMES.get(name, name): value for name, value in row.items()} | {"epoch": row["epoch"] - 1}
        for row in read_results(folder / "results.csv")
    ]
    progress = Progress()
    for epoch, ends in enumerate(json.loads((folder / "times.json").read_text())["ends"]):
        progress.done[epoch], progress.batches = dict(enumerate(ends)), len(ends)
    said = [line.split("torch_fastdet: ", 1)[1] for line in log_text.splitlines() if "torch_fastdet: " in line]
    said = said if flags else []
    return Run(variant, folder, rows, progress, seconds, said)


def run_all(arguments: argparse.Namespace, folder: Path, settings: Settings) -> bool:
    """Do the missing runs as far as time allows. Return True if none is left."""
    import torch

    from benchmarks.harness import WORK, environment, missing

    if reason := missing("training_truth" if settings.of_yolov5 else "ultralytics"):
        raise SystemExit(f"nothing to do: {reason}")
    from examples.demo import dataset

    begun = time.monotonic()
    done = finished(folder, settings)
    wanted = [(variant_of(name), seed) for seed in range(arguments.seeds) for name in arguments.variants]
    left = [(variant, seed) for variant, seed in wanted if (variant.name, seed) not in done]
    if not left:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    about = environment(torch.device(arguments.device))
    cuda = arguments.device == "cuda"
    own = min(8, (os.cpu_count() or 1) // arguments.jobs - 1) if cuda else 0
    workers = own if arguments.workers is None else arguments.workers
    gpus = torch.cuda.device_count() if cuda else 0
    machines = [
        Machine(device, settings.image_size, max(0, workers), about["gpu"] or about["cpu"])
        for device in (map(str, range(gpus)) if cuda else ["cpu"])
    ]
    work = (arguments.work or WORK / "training_truth").resolve()
    task = TASKS.get(settings.model.partition("-")[2], "detect")
    recipe = dataset.Recipe(image_size=settings.image_size, train=settings.images, task=task)
    name = f"digits-{settings.image_size}-{settings.images}" + ("" if task == "detect" else f"-{task}")
    data = dataset.make(work / name, recipe)
    longest = max((run["seconds"] for run in done.values()), default=0.0)

    def affordable() -> bool:
        return not arguments.minutes or time.monotonic() - begun + 1.1 * longest < 60 * arguments.minutes

    failed = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running: dict[concurrent.futures.Future, tuple[str, Machine]] = {}
        while running or (left and affordable()):
            while left and len(running) < arguments.jobs and affordable():
                variant, seed = left.pop(0)
                busy = [machine for _, machine in running.values()]
                machine = min(machines, key=busy.count)
                future = pool.submit(one_run, folder, work, variant, seed, settings, machine, data, about)
                running[future] = f"{variant.name}-seed{seed}", machine
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                name, _ = running.pop(future)
                if error := future.exception():
                    failed.append(f"{name}: {error}")
                    continue
                longest = max(longest, future.result())
    for sentence in failed:
        print(f"failed: {sentence}", flush=True)
    if left:
        names = ", ".join(f"{variant.name}-seed{seed}" for variant, seed in left)
        print(f"left: {names}; the same command goes on with them", flush=True)
    return not left and not failed


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean, or nan for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def by_variant(runs: dict[tuple[str, int], dict[str, Any]]) -> dict[Variant, list[dict[str, Any]]]:
    """Map each variant to its runs, sorted by seed; stock comes first, then --fastdet."""
    first = {STOCK.name: 0, FASTDET.name: 1}
    names = sorted({name for name, _ in runs}, key=lambda name: (first.get(name, 2), name))
    return {variant_of(name): [run for (other, _), run in sorted(runs.items()) if other == name] for name in names}


def report(folder: Path) -> str:
    """Return the comparison as Markdown, from the files in `folder`: each variant against stock."""
    groups = by_variant(finished(folder))
    stock = groups.pop(STOCK, [])
    if not stock or not groups:
        ours = sum(map(len, groups.values()))
        raise SystemExit(f"{folder} holds {len(stock)} stock and {ours} other runs, but one of each is expected")
    body = []
    for variant, group in groups.items():
        measured = [metric for metric in NAMES if metric in stock[0]["epochs"][-1]]
        for metric in measured if variant == FASTDET else (MAP, MAP50):
            a, b = ([run["epochs"][-1][metric] for run in runs] for runs in (stock, group))
            difference = statistics.mean(b) - statistics.mean(a)
            error = math.hypot(standard_error(a), standard_error(b))
            body.append([
                NAMES[metric], f"{statistics.mean(a):.4f}", f"{variant.title} ({len(b)})", f"{statistics.mean(b):.4f}",
                f"{difference:+.4f}", f"{error:.4f}", f"{difference / error:+.1f}" if error else "-",
            ])  # fmt: skip
    header = ["after the last epoch", f"stock ({len(stock)})", "compared (runs)", "its mean", "difference"]
    text = table([*header, "standard error", "difference / error"], body)
    return text + "\n" + caption(stock, groups)


def caption(stock: list[dict[str, Any]], groups: dict[Variant, list[dict[str, Any]]]) -> str:
    first = stock[0]
    settings = Settings(**first["settings"])
    runs = [run for group in (stock, *groups.values()) for run in group]
    lowest = min(run["epochs"][-1][MAP] for run in runs)
    times = [
        f"{variant.title} {1e3 * statistics.median(run['seconds_an_iteration'] for run in group):.1f} ms and "
        f"{statistics.median(run['seconds'] for run in group):.0f} s"
        for variant, group in {STOCK: stock, **groups}.items()
    ]
    return (
        f"{settings.model}, {settings.epochs} epochs of {settings.images} images at {settings.image_size}x"
        f"{settings.image_size}, batch {settings.batch_size}; in brackets the number of runs, each of its own seed. Chance alone "
        f"gives a difference beyond two standard errors in one of twenty comparisons. The lowest mAP50-95 is {lowest:.3f} "
        f"({'above' if lowest > MAP_WANTED else 'not above'} the {MAP_WANTED} that shows that the task was learnt). Medians of an "
        f"iteration and of a run, where runs may have shared the machine: {'; '.join(times)}. {first['gpu'] or first['cpu']}, "
        f"torch {first['torch']}, {' and '.join(sorted({run['date'] for run in runs}))}.\n"
    )


def plot(folder: Path, path: Path) -> None:
    """Plot each run's mAP and losses by epoch, or with many runs their final values."""
    if not (plt := pyplot()):
        return
    groups = by_variant(finished(folder))
    settings = Settings(**next(iter(groups.values()))[0]["settings"])
    if max(map(len, groups.values())) <= FEW:
        figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
        measured = next(iter(groups.values()))[0]["epochs"][-1]
        for axis, metric in zip(axes.flat, [metric for metric in PANELS if metric in measured]):
            _curves(axis, metric, groups)
        axes[0, 0].legend(fontsize=9)
    else:
        figure, axes = plt.subplots(1, 2, figsize=(15, 1.5 + 0.5 * len(groups)), layout="constrained")
        for axis, metric in zip(axes, (MAP, MAP50)):
            _ends(axis, metric, groups)
    figure.suptitle(
        f"The same {'train.py' if settings.of_yolov5 else 'trainer'}, {settings.model} at {settings.image_size}x{settings.image_size}: stock and torch_fastdet"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(axis: Any, metric: str, groups: dict[Variant, list[dict[str, Any]]]) -> None:
    for index, (variant, group) in reversed(list(enumerate(groups.items()))):
        for run in group:
            few = len(group) <= FEW
            axis.plot(
                [row["epoch"] + 1 for row in run["epochs"]],
                [row[metric] for row in run["epochs"]],
                "-" if variant == STOCK else "--",
                color="0.3" if variant == STOCK else f"C{index}",
                linewidth=1.2 if few else 0.7,
                label=f"{variant.title}, seed {run['seed']}" if few else variant.title if run is group[0] else None,
            )
    if not metric.startswith("metrics/"):
        axis.set_yscale("log")
    axis.set(title=NAMES[metric], xlabel="epoch")
    axis.grid(alpha=0.3)


def _ends(axis: Any, metric: str, groups: dict[Variant, list[dict[str, Any]]]) -> None:
    """Draw a dot for each run, and the mean with its standard error."""
    for index, group in enumerate(groups.values()):
        values = [run["epochs"][-1][metric] for run in group]
        axis.plot(values, [index] * len(values), ".", color="0.6")
        axis.errorbar(
            statistics.mean(values), index, xerr=standard_error(values), fmt="D", color=f"C{index}", capsize=4
        )
    axis.set(title=f"{NAMES[metric]} after the last epoch", yticks=range(len(groups)))
    axis.set_yticklabels([variant.title for variant in groups])
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the runs' files")
    parser.add_argument("--work", type=Path, help="folder for images and trainings; default: under runs/benchmarks")
    parser.add_argument(
        "--small", action="store_true", help="the small case for many seeds; the next five options change it"
    )
    parser.add_argument("--model", help="n, s, m, l, x of YOLOv5, or a model of Ultralytics, as in yolov8n and yolo26n")
    for name in ("epochs", "image-size", "images", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--variants", nargs="+", default=[STOCK.name, FASTDET.name], help="stock, fastdet, only_<switch>"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, as many as the GPUs' memory holds")
    parser.add_argument(
        "--workers", type=int, help="of each run's loader; default: what the CPU has for each, 8 at most"
    )
    parser.add_argument("--minutes", type=float, default=0, help="begin no run that would end later; 0: no limit")
    parser.add_argument("--device", default=None, choices=["cpu", "cuda"])
    parser.add_argument("--report", action="store_true", help="no run, the table and plot of those that are there")
    arguments = parser.parse_args()
    for name in ("epochs", "seeds", "jobs"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, but 1 or more are expected")
    try:
        arguments.variants = [variant_of(name).name for name in arguments.variants]
    except ValueError as error:
        parser.error(str(error))
    asked = {name: getattr(arguments, name) for name in ("epochs", "image_size", "images", "batch_size")}
    known = rf"[nsmlx]|yolo(?!v5)\w+(-({'|'.join(TASKS)}|rtdetr))?|rtdetr-\w+"
    if arguments.model and not re.fullmatch(known, arguments.model):
        parser.error(f"--model is {arguments.model}, but one of n, s, m, l, x or a model of Ultralytics is expected")
    asked["model"] = f"yolov5{arguments.model}" if arguments.model in tuple("nsmlx") else arguments.model
    arguments.settings = replace(
        SMALL if arguments.small else Settings(), **{name: value for name, value in asked.items() if value is not None}
    )
    return arguments


def main() -> int:
    arguments = parse()
    if not arguments.out or not arguments.report:
        import torch

        from benchmarks.harness import environment

        arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        arguments.out = arguments.out or results_folder(environment(torch.device(arguments.device))) / "training_truth"
    folder = arguments.out.resolve()
    if not arguments.report and not run_all(arguments, folder, arguments.settings):
        return 1
    text = report(folder)
    print(text)
    (folder.parent / f"{folder.name}.md").write_text(text)
    plot(folder, folder.parent / f"{folder.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
