"""Whether training with torch_fastdet learns what stock learns: the real train.py, several seeds each way, all curves in one plot.

    python -m benchmarks.training_truth --out FOLDER [--model s] [--epochs 60] [--seeds 3] [--jobs 2] [--minutes 9]
    python -m benchmarks.training_truth --out FOLDER --report

A run is train.py from scratch on the demo's pictures, as stock or under ``torch_fastdet.yolov5 --fastdet``; --jobs of them share
the machine. Each finished run leaves one JSON file, <variant>-seed<n>.json, in FOLDER, and a run whose file is there is not done
again: the work can be split over several commands. With --minutes no run begins that would end later, judged by the longest so
far. When all are there, or with --report, FOLDER's parent gets training_truth.md, a table of mean, spread and difference, and
training_truth.png. The default FOLDER is training_truth in the results folder of this machine and day.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import pyplot, results_folder, table
from examples.demo.training import FASTDET, STOCK, Machine, Variant, train

# Columns of train.py's results.csv.
MAP50, MAP = "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"
NAMES = {
    MAP: "mAP50-95",
    MAP50: "mAP50",
    "metrics/precision": "precision",
    "metrics/recall": "recall",
    "val/box_loss": "val box loss",
    "val/obj_loss": "val obj loss",
    "val/cls_loss": "val cls loss",
    "train/box_loss": "train box loss",
}
PANELS = (MAP, MAP50, "val/box_loss", "val/obj_loss", "val/cls_loss", "train/box_loss")
VARIANTS = (STOCK, FASTDET)
MAP_WANTED = 0.6  # mAP50-95, so that the runs have learnt the task


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison have in common."""

    model: str = "yolov5s"
    epochs: int = 60
    image_size: int = 640
    pictures: int = 1024
    batch_size: int = 16


def file_of(folder: Path, variant: Variant, seed: int) -> Path:
    return folder / f"{variant.name}-seed{seed}.json"


def finished(folder: Path, settings: Settings | None = None) -> dict[tuple[str, int], dict[str, Any]]:
    """(variant, seed) -> what a run left. Files of different settings are an error: their curves cannot be compared."""
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    wanted = asdict(settings) if settings else None
    for path in sorted(folder.glob("*-seed*.json")):
        run = json.loads(path.read_text())
        wanted = wanted or run["settings"]
        if run["settings"] != wanted:
            raise SystemExit(f"{path} is of {run['settings']}, but {wanted} is wanted; name another --out")
        runs[run["variant"], run["seed"]] = run
    return runs


def one_run(
    folder: Path, work: Path, variant: Variant, seed: int, settings: Settings, machine: Machine, data: Path, about: dict
) -> float:
    """Trains, writes the run's file, and returns the seconds that it took."""
    from examples.yolov5_env import environment

    started = time.monotonic()
    project = work / f"seed{seed}"
    shutil.rmtree(project / variant.name, ignore_errors=True)
    env = environment(work / "environment") | {"PYTHONWARNINGS": "ignore"}
    run = train(
        variant, data, project, env, machine, settings.epochs, seed, settings.model, settings.batch_size, show=False
    )
    found = {
        "variant": variant.name,
        "seed": seed,
        "settings": asdict(settings),
        **about,
        "seconds": round(run.seconds, 1),
        "seconds_an_iteration": run.progress.seconds_an_iteration(),
        "replaced": run.replaced,
        "epochs": run.epochs,
    }
    path = file_of(folder, variant, seed)
    path.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".part").rename(path)  # never half a file
    shutil.rmtree(project / variant.name, ignore_errors=True)
    print(f"{path.name}: mAP50-95 {run.epochs[-1][MAP]:.4f} after {run.seconds:.0f} s", flush=True)
    return time.monotonic() - started


def run_all(arguments: argparse.Namespace, folder: Path, settings: Settings) -> bool:
    """Does the runs that are missing, as far as time allows. True where none is left."""
    import torch

    from benchmarks.harness import WORK, environment, missing

    if reason := missing("training_truth"):
        raise SystemExit(f"nothing to do: {reason}")
    from examples.demo import dataset

    begun = time.monotonic()
    done = finished(folder, settings)
    wanted = [(variant, seed) for seed in range(arguments.seeds) for variant in VARIANTS]
    left = [(variant, seed) for variant, seed in wanted if (variant.name, seed) not in done]
    if not left:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    about = environment(torch.device(arguments.device))
    cuda = arguments.device == "cuda"
    workers = min(8, max(1, (os.cpu_count() or 1) // arguments.jobs)) if cuda else 0
    machine = Machine("0" if cuda else "cpu", settings.image_size, workers, about["gpu"] or about["cpu"])
    work = (arguments.work or WORK / "training_truth").resolve()
    recipe = dataset.Recipe(image_size=settings.image_size, train=settings.pictures)
    data = dataset.make(work / f"digits-{settings.image_size}-{settings.pictures}", recipe)
    longest = max((run["seconds"] for run in done.values()), default=0.0)

    def affordable() -> bool:
        return not arguments.minutes or time.monotonic() - begun + 1.1 * longest < 60 * arguments.minutes

    failed = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running: dict[concurrent.futures.Future, str] = {}
        while running or (left and affordable()):
            while left and len(running) < arguments.jobs and affordable():
                variant, seed = left.pop(0)
                future = pool.submit(one_run, folder, work, variant, seed, settings, machine, data, about)
                running[future] = f"{variant.name}-seed{seed}"
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                name = running.pop(future)
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


def spread(values: list[float]) -> float:
    return max(values) - min(values)


def report(folder: Path) -> str:
    """The comparison as Markdown, from the files in `folder`."""
    runs = finished(folder)
    groups = {v.title: [run for (name, _), run in runs.items() if name == v.name] for v in VARIANTS}
    stock, ours = (groups[variant.title] for variant in VARIANTS)
    if not stock or not ours:
        raise SystemExit(
            f"{folder} holds {len(stock)} stock and {len(ours)} torch_fastdet runs, but one of each is wanted"
        )
    body = []
    for metric in NAMES:
        a, b = ([run["epochs"][-1][metric] for run in group] for group in (stock, ours))
        difference, noise = statistics.mean(b) - statistics.mean(a), max(spread(a), spread(b))
        body.append([
            NAMES[metric], f"{statistics.mean(a):.4f}", f"{spread(a):.4f}", f"{statistics.mean(b):.4f}", f"{spread(b):.4f}",
            f"{difference:+.4f}", "yes" if abs(difference) < noise else "no",
        ])  # fmt: skip
    header = [
        "after the last epoch",
        "stock, mean",
        "spread",
        "torch_fastdet, mean",
        "spread",
        "difference",
        "within the spread",
    ]
    text = table(header, body)
    lowest = min(run["epochs"][-1][MAP] for run in runs.values())
    iterations = [statistics.median(run["seconds_an_iteration"] for run in group) for group in (stock, ours)]
    seconds = [statistics.median(run["seconds"] for run in group) for group in (stock, ours)]
    first = next(iter(runs.values()))
    settings = Settings(**first["settings"])
    text += (
        f"\n{settings.model}, {settings.epochs} epochs of {settings.pictures} pictures at {settings.image_size}x"
        f"{settings.image_size}, batch {settings.batch_size}; {len(stock)} seeds stock, {len(ours)} with --fastdet. The spread is "
        f"largest less smallest over the seeds, and the difference is compared with the larger of the two. The lowest mAP50-95 is "
        f"{lowest:.3f} ({'above' if lowest > MAP_WANTED else 'not above'} the {MAP_WANTED} that shows that the task was learnt). "
        f"An iteration took {1e3 * iterations[0]:.1f} and {1e3 * iterations[1]:.1f} ms, a run {seconds[0]:.0f} and "
        f"{seconds[1]:.0f} s, where runs may have shared the machine. {first['gpu'] or first['cpu']}, torch {first['torch']}, "
        f"{first['date']}.\n"
    )
    return text


def plot(folder: Path, path: Path) -> None:
    """Every run's curve, mAP and validation losses by epoch."""
    if not (plt := pyplot()):
        return
    runs = finished(folder)
    settings = Settings(**next(iter(runs.values()))["settings"])
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    styles = {STOCK.name: ("0.3", "-"), FASTDET.name: ("C1", "--")}
    for axis, metric in zip(axes.flat, PANELS):
        for (name, seed), run in sorted(runs.items(), reverse=True):
            color, line = styles[name]
            title = next(variant.title for variant in VARIANTS if variant.name == name)
            axis.plot(
                [row["epoch"] + 1 for row in run["epochs"]],
                [row[metric] for row in run["epochs"]],
                line,
                color=color,
                linewidth=1.2,
                label=f"{title}, seed {seed}",
            )
        if metric not in (MAP, MAP50):
            axis.set_yscale("log")
        axis.set(title=NAMES[metric], xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=9)
    figure.suptitle(
        f"The same train.py, {settings.model} at {settings.image_size}x{settings.image_size}: stock and torch_fastdet"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Settings()
    parser.add_argument("--out", type=Path, help="folder of the runs' files")
    parser.add_argument("--work", type=Path, help="folder for pictures and trainings; default: under runs/benchmarks")
    parser.add_argument("--model", default="s", choices=list("nsmlx"))
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--image-size", type=int, default=defaults.image_size)
    parser.add_argument("--pictures", type=int, default=defaults.pictures)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, as many as the GPU's memory holds")
    parser.add_argument("--minutes", type=float, default=0, help="begin no run that would end later; 0: no limit")
    parser.add_argument("--device", default=None, choices=["cpu", "cuda"])
    parser.add_argument("--report", action="store_true", help="no run, the table and plot of those that are there")
    arguments = parser.parse_args()
    for name in ("epochs", "seeds", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, but 1 or more are wanted")
    settings = Settings(
        f"yolov5{arguments.model}", arguments.epochs, arguments.image_size, arguments.pictures, arguments.batch_size
    )
    if not arguments.out or not arguments.report:
        import torch

        from benchmarks.harness import environment

        arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        arguments.out = arguments.out or results_folder(environment(torch.device(arguments.device))) / "training_truth"
    folder = arguments.out.resolve()
    if not arguments.report and not run_all(arguments, folder, settings):
        return 1
    text = report(folder)
    print(text)
    (folder.parent / "training_truth.md").write_text(text)
    plot(folder, folder.parent / "training_truth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
