"""Makes every table and plot of results that the README and the docs show from the JSON rows under benchmarks/results/.

``python -m benchmarks.report`` rewrites what stands between ``<!-- results:NAME -->`` and ``<!-- end results -->`` in
README.md and docs/*.md, docs/headlines.png and the folders' own tables.md, and moves the pictures of a new run that docs show
there; ``--check`` only says whether that would change anything (exit status 1). Nothing is typed by hand. Each table is of the
newest folder that has its file, of the machine that was measured last with all that README shows. So a run of some benchmarks
there replaces those alone, and one of another machine none.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import string
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
OURS = "torch_fastdet"  # what the name of each variant of ours begins with
DOCS = ROOT / "docs"
PLOT = DOCS / "headlines.png"
# What users run who tune nothing, as the benchmarks call it; "stock loop" in older results.
STOCK = ("stock", "stock decode + suppression", "eager", "stock loop")
COCO_CASE = "yolov5s, batch 64, train.py, 118,287 JPEGs of 640x480, 83 kB"  # of every epoch but the first
# README's table and plot: YOLOv5s at the batch sizes of its users, a row or more of every benchmark, each of which `make bench`
# measures, for a missing one is an error. title, benchmark, case, ours. "h100:" before a benchmark takes it from another machine, if
# it was measured there.
HEADLINES = [
    ("train.py with its default options on 118,287 JPEGs (COCO's size), an iteration, yolov5s, batch 64", "dataset", COCO_CASE,
     "torch_fastdet"),
    ("the same on an H100", "h100:dataset", COCO_CASE, "torch_fastdet"),
    ("train.py with its default options, an iteration, yolov5s, batch 16, JPEGs from disk", "train",
     "yolov5s, batch 16, train.py's default options, JPEGs from disk", "torch_fastdet"),
    ("train.py with its default options, an iteration, yolov5s, batch 64, JPEGs from disk", "train",
     "yolov5s, batch 64, train.py's default options, JPEGs from disk", "torch_fastdet"),
    ("train.py on two GPUs, an iteration, yolov5s, 16 images a GPU", "distributed",
     "yolov5s, 16 a GPU, train.py, 2 GPUs", "torch_fastdet"),
    ("Ultralytics' trainer, an iteration, yolov8s, batch 16", "ultralytics", "yolov8s, batch 16", "torch_fastdet"),
    ("Ultralytics' trainer, an iteration, yolo26s, batch 16", "ultralytics", "yolo26s, batch 16", "torch_fastdet"),
    ("val.py's pass over 1,536 JPEGs, yolov5s in half precision, batch 32", "val",
     "val.py, yolov5s, half, batch 32, 1536 JPEGs of 640x640: the pass over the pictures", "torch_fastdet"),
    ("YOLO(\"yolov8n\").predict of a picture in memory", "pictures", "YOLO(yolov8n).predict, one 1080p picture in memory",
     "torch_fastdet"),
    ("Training step, yolov5s, batch 16", "step", "yolov5s, batch 16, loop", "torch_fastdet TrainStep"),
    ("Training step, yolov5s, batch 64", "step", "yolov5s, batch 64, loop", "torch_fastdet TrainStep"),
    ("YOLOv5 loss, forward + backward, batch 16", "loss", "640x640, batch 16, 8 boxes an image", "torch_fastdet"),
    ("Unscale + clip + SGD + EMA", "multi_tensor", "unscale + clip + SGD + EMA s", "torch_fastdet FusedStep"),
    ("EMA alone", "multi_tensor", "EMA s", "torch_fastdet ModelEMA.update"),
    ("CIoU loss of 3,000 pairs, forward + backward", "bbox_iou", "CIoU loss forward+backward n=3000", "torch_fastdet"),
    ("Upsample, batch 64, NHWC", "upsample", "forward NHWCfp16(64,256,40,40)", "torch_fastdet"),
    ("Upsample + concat, forward + backward", "upsample", "cat forward+backward NHWCfp16(64,256,40,40)", "torch_fastdet"),
    ("NMS, one image, conf .25", "nms", "suppression, batch 1, conf .25", "torch_fastdet list"),
    ("NMS, batch 32, validation, trained: some 6,000 candidates an image", "nms", "suppression, batch 32, sparse validation",
     "torch_fastdet list"),
    ("NMS, batch 32, validation, first epochs: 30,000 taken", "nms", "suppression, batch 32, validation", "torch_fastdet list"),
    ("Raw heads to detections, batch 32, conf .25", "nms", "raw heads to detections, batch 32, conf .25",
     "torch_fastdet list"),
]  # fmt: skip
COCO = 118_287  # pictures
# What docs/results.md shows of a section, in this order; the folders' tables.md have every row.
SHOWN = {
    "gpu-dataset": (f"{COCO_CASE}, first epoch", COCO_CASE, COCO_CASE.replace("batch 64", "batch 16")),
    "h100-dataset": (f"{COCO_CASE}, first epoch", COCO_CASE),
    "gpu-train": (
        "yolov5s, batch 64, train.py's default options, JPEGs from disk",
        "yolov5s, batch 16, train.py's default options, JPEGs from disk",
        "yolov5s-seg, batch 16, segment/train.py",
    ),
    "gpu-ultralytics": (
        *("yolov8s, batch 16", "yolov8s, batch 64", "yolo11s, batch 16", "yolo26s, batch 16"),
        *("yolov8s-seg, batch 16", "yolov8s-pose, batch 16", "yolov8s-obb, batch 16", "yolov8s-cls, batch 64"),
        "yolov8s-obb, batch 16: validation's pass over 1024 pictures",  # of all validations we gain least in it
    ),
    "gpu-val": (
        "val.py, yolov5s, half, batch 32, 5000 JPEGs of COCO's sizes: the pass over the pictures",
        "val.py, yolov5s, half, batch 32, 5000 JPEGs of COCO's sizes: the whole command",
    ),
    "gpu-training_truth_small": ("mAP50-95", "val obj loss"),
    "gpu-summary": ("yolov5s, batch 16, loop", "yolov5s, batch 64, loop", "suppression, batch 32, conf .25"),
    "cpu-summary": ("yolov5n, batch 16, train.py at 128", "validation, batch 32 of 128x128, CPU fp32"),
}
# Of bench_ultralytics' rows.
COMPILED = "stock, compile=True"
# The families of operators on that page, each with its benchmarks.
OPERATORS = {
    "[boxes](kernels/boxes.md)": ("bbox_iou",),
    "[upsample](kernels/upsample.md)": ("upsample",),
    "[BatchNorm and activation](kernels/bn_act.md), [stem](kernels/stem_conv.md), [poolings](kernels/pool.md)": (
        "bn_act",
    ),
    "[YOLOv5's loss](kernels/yolov5_loss.md)": ("loss",),
    "[Ultralytics' losses](kernels/v8_loss.md)": ("v8_loss",),
    "[optimizer and EMA](kernels/multi_tensor.md)": ("multi_tensor",),
    "[NMS and decoding](kernels/nms.md)": ("nms",),
    "[masks](kernels/masks.md)": ("masks",),
    "[letterbox](kernels/image.md) and [JPEG files](kernels/jpeg.md)": ("image", "jpeg"),
}
# Trainings whose peak memory is known at two batch sizes: what it is, benchmark, the case at a batch size, and our variant.
LOOP = "YOLOv5s, a loop of your own"
MEMORY = (
    (LOOP, "step", "yolov5s, batch {}, loop", "torch_fastdet TrainStep"),
    ("YOLOv8s, Ultralytics' trainer", "ultralytics", "yolov8s, batch {}", "torch_fastdet"),
)
BATCHES = (16, 64)
CARDS = (8, 12, 24, 80)
# Of a card's memory, what is left to CUDA, its libraries and a desktop. An assumption.
APART_MIB = 1024
# Cases of HEADLINES that are newer than the results: each is left out until a run has it.
PENDING: set[str] = set()
# What benchmarks/training_truth.py compares: its folders' names, each with a table and a picture beside it.
TRUTHS = (
    *("training_truth", "training_truth_small", "training_truth_yolov8n", "training_truth_yolo26n"),
    *("training_truth_yolov8n-seg", "training_truth_yolov8n-pose", "training_truth_yolov8n-obb"),
)
# Of a results folder: what a marker stands for, and the picture that is shown below it.
PICTURES = {
    "roofline": "roofline",
    "postprocess": "postprocess_breakdown",
    "latency": "latency_breakdown",
    **{name: name for name in TRUTHS},
}
# What each page shows: one that lost a marker would keep its old figures for ever.
SECTIONS = {
    "README.md": ("gpu-epochs", "gpu-headlines"),
    "upsample.md": ("gpu-upsample-floor",),
    "boxes.md": ("gpu-bbox_iou-floor",),
    "multi_tensor.md": ("gpu-multi_tensor-floor",),
    "yolov5_loss.md": ("gpu-loss-floor",),
    "nms.md": ("gpu-nms-floor",),
    "machine.md": ("gpu-memory",),
    "results.md": (
        *("gpu-dataset", "h100-dataset", "gpu-train", "gpu-ultralytics", "gpu-val"),
        *("gpu-training_truth_small", "gpu-summary", "gpu-operators", "cpu-summary"),
    ),
}
APART_FROM_ROWS = ("roofline", "memory_limits")  # JSON that is no benchmark's rows
Letters = dict[tuple[str, ...], str]  # what `machine_and_day` says of a run -> its letter in a table's column "run"
NO_LETTERS: Letters = {}
MARKER = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)


def folders(kind: str) -> list[Path]:
    """The results folders of a kind of machine, "cpu", a GPU such as "h100", or "gpu" for any of them, oldest first."""
    found = (path for path in RESULTS.iterdir() if path.is_dir())
    of_kind = [
        path for path in found if path.name.startswith(f"{kind}-") or (kind == "gpu" and path.name[:4] != "cpu-")
    ]
    return sorted(of_kind, key=lambda path: (path.name[-10:], path.name))


def results_folder(environment: dict[str, str]) -> Path:
    """benchmarks/results/<machine>-<date>."""
    machine = (environment["gpu"] or "cpu").lower().replace("nvidia ", "").replace(" ", "-")
    return RESULTS / f"{machine}-{environment['date']}"


def machines_in(folder: Path) -> set[str]:
    """What a folder's rows were measured on."""
    return {machine_of(row) for rows in load(folder).values() for row in rows}


def of_newest_machine(kind: str) -> list[Path]:
    """The folders of the machine of the newest one with rows: a table that mixes machines compares nothing.

    A GPU with all benchmarks of README's table goes before a newer one that has a few.
    """
    found = folders(kind)
    wanted = {benchmark for _, benchmark, *_ in HEADLINES if ":" not in benchmark}
    with_rows = [folder for folder in reversed(found) if machines_in(folder)]
    if not with_rows:
        return found
    of_same = [
        [path for path in found if path.name[:-11] == newest.name[:-11] and machines_in(path) <= machines_in(newest)]
        for newest in with_rows
    ]
    whole = (paths for paths in of_same if wanted <= {name for path in paths for name in load(path)})
    return next(whole, of_same[0])


def newest(kind: str, file: str) -> Path | None:
    """The newest folder of the newest machine that has a file. A roofline counts where it stands beside the rows it is of."""
    found = (folder for folder in reversed(of_newest_machine(kind)) if (folder / file).exists())
    return next((folder for folder in found if not file.startswith("roofline") or load(folder)), None)


def machine_of(row: dict[str, str]) -> str:
    """What a row, or an environment, was measured on."""
    return row["gpu"] or row["cpu"]


def newest_of(environment: dict[str, str]) -> Path:
    """The newest folder with rows of this very machine, or today's where there is none."""
    machine = machine_of(environment)
    for folder in reversed(folders("gpu" if environment["gpu"] else "cpu")):
        if any(machine_of(rows[0]) == machine for rows in load(folder).values()):
            return folder
    return results_folder(environment)


def as_json(found: list | dict[str, Any]) -> str:
    """JSON with a line for each row of a list, so that a run changes the lines of its own rows alone."""
    if isinstance(found, list):
        return "[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n"
    values = (
        (key, as_json(value).strip() if isinstance(value, list) else json.dumps(value)) for key, value in found.items()
    )
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {value}" for key, value in values) + "\n}\n"


def load(folder: Path) -> dict[str, list[dict]]:
    """Benchmark name -> its rows."""
    found = (path for path in sorted(folder.glob("*.json")) if path.stem not in APART_FROM_ROWS)
    return {path.stem: json.loads(path.read_text()) for path in found}


def load_to(folder: Path) -> dict[str, list[dict]]:
    """A folder's rows; for benchmarks that it does not have, those of the newest folder of the same machine before it."""
    own, known = load(folder), folders("cpu" if folder.name.startswith("cpu-") else "gpu")
    machines = {machine_of(rows[0]) for rows in own.values()}
    found: dict[str, list[dict]] = {}
    for earlier in known[: known.index(folder.resolve())] if folder.resolve() in known else []:
        found |= {k: rows for k, rows in load(earlier).items() if machine_of(rows[0]) in machines}
    return found | own


def load_newest(kind: str) -> dict[str, list[dict]]:
    """Benchmark name -> its rows, each from the newest folder of the newest machine that has it."""
    found: dict[str, list[dict]] = {}
    for folder in of_newest_machine(kind):
        found |= load(folder)
    return dict(sorted(found.items()))


def is_ours(variant: str) -> bool:
    return variant.startswith(OURS)


def _time(microseconds: float) -> str:
    if microseconds >= 1_000_000:
        return f"{microseconds / 1e6:.2f} s"
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"


def _span(row: dict) -> str:
    """A row's spread; the unit once where both ends have the same."""
    low, high = _time(row["low_us"]), _time(row["high_us"])
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def _spread(row: dict) -> list[str]:
    """A row's spread where there is one, and of how many it is, where that is known."""
    spread = [_span(row)] if row["low_us"] != row["high_us"] else []
    return spread + ([f"n = {row['n']}"] if row.get("n") else [])


def _with_span(row: dict) -> str:
    """The median and its spread."""
    spread = _spread(row)
    return _time(row["median_us"]) + (f" ({', '.join(spread)})" if spread else "")


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _number(template: str, value: float | int | None) -> str:
    return "-" if value is None else template.format(value)


SPREAD = "medians, with p10 to p90, the call's 10th to 90th percentile, beside them"
# Columns that a table has where one of its rows has a value: title, key of the row, how it is written.
OPTIONAL_COLUMNS = (
    ("n", "n", "{}"),
    ("launches", "launches", "{}"),
    ("syncs", "host_syncs", "{}"),
    ("peak MiB", "peak_mib", "{:.1f}"),
    ("mAP50", "map50", "{:.4f}"),
    ("mAP50-95", "map50_95", "{:.4f}"),
)


def benchmark_table(rows: list[dict]) -> str:
    """All variants of all cases, a line each; views become columns, with the spread of the call alone."""
    views = [view for view in ("call", "graph", "cold") if any(row["view"] == view for row in rows)]
    tails = any(row.get("p99_us") is not None for row in rows)
    copies = any(row["percent_of_copy"] is not None for row in rows)
    columns = [column for column in OPTIONAL_COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    lines: dict[tuple[str, str], dict] = {}
    for row in rows:
        lines.setdefault((row["case"], row["variant"]), {})[row["view"]] = row
    body = []
    for (case, variant), by_view in lines.items():
        any_row = next(iter(by_view.values()))
        cells = [case, f"**{variant}**" if is_ours(variant) else variant]
        cells += [_time(by_view[view]["median_us"]) if view in by_view else "-" for view in views]
        cells.insert(3, _span(by_view["call"]) if "call" in by_view else "-")
        if tails:
            tail = by_view.get("call", any_row).get("p99_us")
            cells.append("-" if tail is None else _time(tail))
        if copies:
            rates = [row["percent_of_copy"] for row in by_view.values() if row["percent_of_copy"]]
            cells.append(f"{max(rates):.0f}%" if rates else "-")
        cells += [_number(template, any_row.get(key)) for _, key, template in columns]
        body.append(cells)
    views.insert(1, "p10 to p90")
    header = ["case", "variant", *views, *(["p99"] if tails else []), *(["of copy rate"] if copies else [])]
    return table(header + [title for title, _, _ in columns], body)


def comparison_table(rows: list[dict], letters: Letters = NO_LETTERS) -> str:
    """Ours beside stock: each case is a line, call to call. tables.md has other variants too."""
    rows = [row for row in rows if row["variant"] in ("stock", OURS)]
    peaks = any(row.get("peak_mib") is not None for row in rows)
    cases: dict[str, dict[bool, dict]] = {}
    for row in rows:
        if row["view"] == "call":
            cases.setdefault(row["case"], {})[is_ours(row["variant"])] = row
    body = []
    for case, found in cases.items():
        both = [found.get(ours) for ours in (False, True)]
        cells = [case, *("-" if row is None else _with_span(row) for row in both)]
        cells.append(f"{found[False]['median_us'] / found[True]['median_us']:.1f}x" if len(found) == 2 else "-")
        cells += [_number("{:,.0f}", row["peak_mib"] if row else None) for row in both] if peaks else []
        body.append(cells + _runs(letters, found.values()))
    header = ["case", "stock", OURS, "stock / ours", *(["peak MiB, stock", "peak MiB, ours"] if peaks else [])]
    return table(header + ["run"] * bool(letters), body)


def _ours(row: dict, alternative: float) -> tuple[str, str]:
    """A row of ours as (what and how long, how many times as fast as the alternative)."""
    name, time = row["variant"].removeprefix(OURS).lstrip(" ,"), _with_span(row)
    return f"{name}: {time}" if name else time, f"{alternative / row['median_us']:.1f}x"


def _beside_the_best(rows: list[dict]) -> Iterable[tuple[str, dict, list[dict]]]:
    """Each case, call to call: its name, the fastest of the others, and ours."""
    for case in dict.fromkeys(row["case"] for row in rows):
        group = [row for row in rows if row["case"] == case and row["view"] == "call"]
        ours = [row for row in group if is_ours(row["variant"])]
        others = [row for row in group if not is_ours(row["variant"])]
        if ours and others:
            yield case, min(others, key=lambda row: row["median_us"]), ours


def summary_table(benchmarks: dict[str, list[dict]], letters: Letters = NO_LETTERS) -> str:
    """Each case once, call to call, wins and losses alike: the best alternative against ours.

    A benchmark lists first the variant of ours that does just what the alternatives do (a list where they return a list). Where
    another of ours is faster, as FusedStep is for those who own their loop, it stands behind it.
    """
    body = []
    for rows in benchmarks.values():
        for case, best, ours in _beside_the_best(rows):
            fastest = min(ours, key=lambda row: row["median_us"])
            shown = [ours[0]] if fastest["median_us"] > 0.9 * ours[0]["median_us"] else [ours[0], fastest]
            times, ratios = zip(*(_ours(row, best["median_us"]) for row in shown))
            cells = [case, f"{best['variant']}: {_with_span(best)}", "; ".join(times), "; ".join(ratios)]
            body.append(cells + _runs(letters, [best, *shown]))
    return table(["case", "best alternative", "torch_fastdet", "faster by"] + ["run"] * bool(letters), body)


def operators_table(benchmarks: dict[str, list[dict]], letters: Letters = NO_LETTERS) -> str:
    """Of each family of OPERATORS the cases in which the first of ours gains most and least, or loses."""
    body = []
    for family, names in OPERATORS.items():
        # Of a network alone only our share is of interest: it is a floor, not an alternative.
        rows = [row for name in names for row in benchmarks[name] if row["variant"] != "network alone"]
        found = []
        for case, best, (ours, *_) in _beside_the_best(rows):
            name = ours["variant"].removeprefix(OURS).strip(" ,")
            times = f"{_time(ours['median_us'])}; {best['variant']}: {_time(best['median_us'])}"
            text = f"{case} ({name}): {times}" if name else f"{case}: {times}"
            found.append((best["median_us"] / ours["median_us"], text, _runs(letters, [best, ours])))
        ends = max(found), min(found)
        body.append([family, *(cell for ratio, text, run in ends for cell in (text, f"{ratio:.1f}x", *run))])
    run = ["run"] * bool(letters)
    return table(["operators", "best case", "best other / ours", *run, "worst case", "best other / ours", *run], body)


def headlines(benchmarks: dict[str, list[dict]]) -> list[dict]:
    """HEADLINES with their figures, call to call, less those that were measured without stock's packages."""
    found = []
    for title, benchmark, case, variant in HEADLINES:
        machine, _, benchmark = benchmark.rpartition(":")
        known = load_newest(machine) if machine else benchmarks
        again = f"python -m benchmarks --only {benchmark}"
        if (machine or case in PENDING) and not any(row["case"] == case for row in known.get(benchmark, [])):
            continue
        if benchmark not in known:
            gpu = next((rows[0]["gpu"] for rows in known.values()), "a GPU")
            raise FileNotFoundError(f"benchmarks/results has no {benchmark}.json of {gpu}; type there: {again}")
        by_variant = {row["variant"]: row for row in known[benchmark] if row["case"] == case and row["view"] == "call"}
        times = {name: row["median_us"] for name, row in by_variant.items()}
        if variant not in times:
            raise KeyError(
                f"{benchmark}.json of {known[benchmark][0]['date']} has no row {case}: {variant}; where that run "
                f"ended early, type: {again}; where the name is another now, mend HEADLINES in benchmarks/report.py"
            )
        others = {name: time for name, time in times.items() if not is_ours(name)}
        stock = next((name for name in STOCK if name in others), None)
        if stock is None:
            continue
        best = min(others, key=lambda name: others[name])
        spread = {
            of: {key: by_variant[name].get(key) for key in ("low_us", "high_us", "n")}
            for of, name in (("stock", stock), ("best", best), ("ours", variant))
        }
        found.append({"title": title, "stock": others[stock], "best": others[best], "ours": times[variant],
                      "best_name": "" if best == stock else best, "ours_name": variant, "spread": spread,
                      "from": [by_variant[name] for name in dict.fromkeys((stock, best, variant))]})  # fmt: skip
    return found


def _headline(row: dict, of: str) -> str:
    """A time of a headline; in brackets its spread, as short as can be, because a line has three of them."""
    time, spread = _time(row[of]), row.get("spread", {}).get(of)
    said = [text.replace(" = ", "=") for text in (_spread(spread) if spread else [])]
    if said and said[0].count(" ") == 3:  # both ends have one unit; the time mostly has the same
        said[0] = said[0].replace(" to ", "-").removesuffix(time[time.index(" ") :])
    within = ([row["best_name"]] if of == "best" else []) + ([", ".join(said)] if said else [])
    return time + (f" ({'; '.join(within)})" if within else "")


def headline_table(rows: list[dict]) -> str:
    """README's table, and the line below it: the machine of each row, as a letter where there are several."""
    measured = {"": [of_it for row in rows for of_it in row["from"]]}
    letters = letters_of(measured)
    body = [
        [row["title"], _headline(row, "stock"), _headline(row, "best") if row["best_name"] else "-",
         _headline(row, "ours"),
         f"{row['stock'] / row['ours']:.1f}x",
         f"{row['best'] / row['ours']:.1f}x" if row["best_name"] else "-",
         *_runs(letters, row["from"])]
        for row in rows
    ]  # fmt: skip
    header = ["", "stock", "best other", "torch_fastdet", "stock / ours", "best other / ours"]
    return f"{table(header + ['run'] * bool(letters), body)}\n{provenance(measured, letters=letters)}"


def epochs_of_coco() -> str:
    """README's sentences on runs on as many pictures as COCO has: seconds an epoch of the newest, and of other GPUs beside it."""
    wanted = (f"{COCO_CASE}, first epoch", OURS), (COCO_CASE, OURS), (COCO_CASE, "stock")
    runs: dict[str, tuple[dict, list[str]]] = {}  # GPU -> a row, and seconds, of its newest run; the newest GPU first
    for folder in reversed(folders("gpu")):
        times = {(row["case"], row["variant"]): row for row in load(folder).get("dataset", ())}
        if times.keys() >= set(wanted):
            seconds = [f"{times[key]['median_us'] * -(-COCO // 64) / 1e6:.0f}" for key in wanted]
            row = times[COCO_CASE, OURS]
            runs.setdefault(row["gpu"].removeprefix("NVIDIA ").split()[0], (row, seconds))
    (gpu, (row, seconds)), *others = runs.items()
    beside = (
        f" On one {other} the three times are {times[0]}, {times[1]} and {times[2]} s ({there['date']})."
        for other, (there, times) in others
    )
    counts = sorted({there["n"] + 1 if there.get("n") else 0 for there, _ in runs.values()})
    count = f" of {' or '.join(map(str, counts))} epochs" if counts[0] else ""
    text = (
        f"On one {gpu}, the unmodified YOLOv5 `train.py` with its default options trains yolov5s on a data set of COCO's size "
        f"({COCO:,} JPEGs, batch 64). Its first epoch takes {seconds[0]} s with torch_fastdet, and a later one {seconds[1]} s. Without "
        f"it (*stock*) an epoch would take {seconds[2]} s ({row['date']}).{''.join(beside)} The pictures are links to 2,048 "
        f"files, read from the page cache. Stock ran on a part of them ([how](docs/results.md#a-data-set-of-cocos-size)). Each GPU had one run{count}, on the date in brackets."
    )
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False) + "\n"


def pyplot() -> Any:
    """matplotlib.pyplot that needs no screen; None, and a line that says so, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no PNG: matplotlib is not installed", flush=True)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_headlines(rows: list[dict], path: Path, about: str) -> bool:
    """The headline table as bars. What it shows goes into the file too, so that it can be held against the results."""
    if not (plt := pyplot()):
        return False
    figure, axes = plt.subplots(figsize=(10, 9.5), layout="constrained")
    for offset, key, label, color in (
        (-0.27, "stock", "stock", "0.75"),
        (0.0, "best", "best other", "0.5"),
        (0.27, "ours", "torch_fastdet", "C1"),
    ):
        shown = [(i + offset, row) for i, row in enumerate(rows) if key != "best" or row["best_name"]]
        axes.barh([place for place, _ in shown], [row[key] / 1e3 for _, row in shown], 0.27, color=color, label=label)
        for place, row in shown:
            ends = [row["spread"][key][end] / 1e3 for end in ("low_us", "high_us")]
            axes.plot(ends, [place, place], color="0.15", linewidth=1)
            axes.text(max(row[key] / 1e3, ends[1]), place, f" {_time(row[key])}", va="center", fontsize=7)
    axes.set(xscale="log", xlabel="milliseconds, call to call, logarithmic; thin lines: 10th to 90th percentile")
    figure.suptitle("\n".join(textwrap.fill(line, 150) for line in about.splitlines()), fontsize=8)
    titles = [textwrap.fill(row["title"], 60) for row in rows]
    axes.set_yticks(range(len(rows)), titles, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    figure.legend(loc="outside lower left", ncols=3, fontsize=8)  # beside the bars it would hide some of their figures
    figure.savefig(path, dpi=110, metadata={"torch_fastdet": _plotted(rows, about)})
    plt.close(figure)
    return True


def _plotted(rows: list[dict], about: str) -> str:
    return json.dumps([about, [{key: value for key, value in row.items() if key != "from"} for row in rows]])


def plot_is_current(rows: list[dict], path: Path, about: str) -> bool:
    return path.exists() and b"torch_fastdet\0" + _plotted(rows, about).encode() in path.read_bytes()


def floor_table(rows: list[dict]) -> str:
    """Our variants against the time that their bytes take at the copy rate of the same run."""
    lines: dict[tuple[str, str], dict] = {}
    for row in rows:
        if is_ours(row["variant"]) and row["bytes"]:
            lines.setdefault((row["case"], row["variant"]), {})[row["view"]] = row
    body = []
    for (case, variant), by_view in lines.items():
        if "graph" not in by_view:  # not the device alone
            continue
        row = by_view["graph"]
        floor = row["bytes"] / float(row["copy_gb_per_s"]) / 1e3
        cold = _time(by_view["cold"]["median_us"]) if "cold" in by_view else "-"
        body.append(
            [case, variant.removeprefix(OURS).strip(" ,") or "-", f"{row['bytes'] / 1e6:.3g} MB", _time(floor),
             _time(row["median_us"]), cold, f"{100 * floor / row['median_us']:.0f}%", str(row["launches"])]
        )  # fmt: skip
    return table(["case", "variant", "moves", "floor", "graph", "cold", "floor / graph", "launches"], body)


def largest_batch(peaks: tuple[float, float], card: int) -> int:
    """By a straight line through the peak memory in MiB at BATCHES; card is in GiB."""
    each = (peaks[1] - peaks[0]) / (BATCHES[1] - BATCHES[0])
    return int((1024 * card - APART_MIB - (peaks[0] - BATCHES[0] * each)) / each)


def memory_limits() -> list[dict]:
    """The newest rows of benchmarks/memory_limits.py, of any GPU: a limit is the same on all."""
    files = [file for folder in folders("gpu") if (file := folder / "memory_limits.json").exists()]
    return json.loads(files[-1].read_text()) if files else []


def memory_table(benchmarks: dict[str, list[dict]], limits: list[dict], letters: Letters = NO_LETTERS) -> str:
    """The largest batches of CARDS: those that were tried (``limits``), and others computed from measured peaks."""
    tried = {(LOOP, row["variant"], row["card"]): row for row in limits if row["size"] == "s"}
    rows = []
    for name, benchmark, case, ours in MEMORY:
        by_case = {(row["case"], row["variant"]): row for row in benchmarks[benchmark]}
        for variant in ("stock", ours):
            measured = [by_case[case.format(batch), variant] for batch in BATCHES]
            peaks = tuple(row["peak_mib"] for row in measured)
            fits = [tried.get((name, variant, card)) for card in CARDS]
            cells = [
                str(row["batch"]) if row else f"about {largest_batch(peaks, card)}" for card, row in zip(CARDS, fits)
            ]
            cells += _runs(letters, measured + [row for row in fits if row])
            rows.append([name, variant, *(f"{peak:,.0f} MiB" for peak in peaks), *cells])
    head = [f"measured peak, batch {batch}" for batch in BATCHES] + [f"{card} GB" for card in CARDS]
    return table(["training at 640 pixels", "variant", *head] + ["run"] * bool(letters), rows)


def machine_and_day(row: dict) -> tuple[str, ...]:
    """Machine, driver, versions and date of a row."""
    gpu = f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}, host " if row["gpu"] else ""
    return gpu + row["cpu"], f"torch {row['torch']}", f"Python {row['python']}", row["date"]


def machines(benchmarks: dict[str, list[dict]]) -> dict[tuple[str, ...], str]:
    """Machine, driver, versions, copy rates and date of benchmarks' rows, each once: what `machine_and_day` says -> its line."""
    found: dict[tuple[str, ...], set[float]] = {}
    for row in (row for rows in benchmarks.values() for row in rows):
        rates = found.setdefault(machine_and_day(row), set())
        if row.get("copy_gb_per_s"):
            rates.add(int(row["copy_gb_per_s"]) / 1000)
    lines = {}
    for key, rates in sorted(found.items(), key=lambda item: item[0][3]):
        ends = " to ".join(dict.fromkeys(f"{end(rates):.2f}" for end in (min, max) if rates))
        lines[key] = f"{', '.join(key[:3])}{f', copy rate {ends} TB/s' if ends else ''}; {key[3]}"
    return lines


def machines_of(headlines: list[dict]) -> dict[tuple[str, ...], str]:
    return machines({"": [row for headline in headlines for row in headline["from"]]})


def letters_of(benchmarks: dict[str, list[dict]]) -> Letters:
    """A letter for each run that benchmarks' rows are of; none where all are of one."""
    about = machines(benchmarks)
    return dict(zip(about, string.ascii_lowercase)) if len(about) > 1 else {}


def _runs(letters: Letters, rows: Iterable[dict]) -> list[str]:
    """A line's cell in the column "run", which a table has where its rows have letters."""
    return [", ".join(sorted({letters[machine_and_day(row)] for row in rows}))] if letters else []


def _below(lines: Iterable[str], figures: str = "medians", letters: Iterable[str] = ()) -> str:
    """The machines of a table, each with its letter if it has one; what is the same of all of them stands once."""
    told, same = list(lines), []
    if len(told) > 1:
        parts = [re.split("[,;] ", line) for line in told]
        same = [part for part in parts[0] if all(part in others for others in parts)]
        told = [", ".join(part for part in of_one if part not in same) for of_one in parts]
    named = [f"{letter}: {line}" for letter, line in zip(letters, told)] or told
    return f"{'; '.join([', '.join(same)] * bool(same) + named)}; {figures} (docs/measuring.md).\n"


def provenance(benchmarks: dict[str, list[dict]], figures: str = "medians", letters: Letters = NO_LETTERS) -> str:
    """The line below a table of these benchmarks, with the letters of its column "run"."""
    return "Runs: " * bool(letters) + _below(machines(benchmarks).values(), figures, letters.values())


def tables(folder: Path) -> str:
    """The whole of a results folder as Markdown."""
    benchmarks = load(folder)
    parts = [provenance(benchmarks, SPREAD), summary_table(benchmarks)]
    for name, rows in benchmarks.items():
        parts += [f"### {name}\n", benchmark_table(rows)]
    for page in ("roofline", *TRUTHS):
        if (folder / f"{page}.md").exists():
            parts += [f"### {page}\n", (folder / f"{page}.md").read_text()]
    return "\n".join(parts)


def pictures() -> dict[Path, Path]:
    """Pictures in docs/ -> those of a new run, which go there. mkdocs shows nothing from outside of docs/, and git keeps them once."""
    found = {}
    for kind in ("gpu", "cpu"):
        for what in PICTURES:
            if source := _picture_of(kind, what):
                found[_shown(kind, what)] = source
    return found


def _shown(kind: str, what: str) -> Path:
    return DOCS / f"{kind}-{PICTURES[what]}.png"


def _picture_of(kind: str, what: str) -> Path | None:
    """A section's picture, where the folder that its table is of has one."""
    folder = newest(kind, f"{what}.md") or newest(kind, f"{what}.json")
    path = folder / f"{PICTURES[what]}.png" if folder and what in PICTURES else None
    return path if path and path.exists() else None


def _picture(kind: str, what: str) -> str:
    """The line that shows a section's picture, where there is one."""
    there = what in PICTURES and (_picture_of(kind, what) or _shown(kind, what).exists())
    return f"\n![{what}, {kind.upper()}]({_shown(kind, what).name})\n" if there else ""


def section(name: str) -> str:
    """What a marker stands for: gpu-epochs, gpu-headlines, gpu-memory, <gpu|cpu>-summary, -operators, -roofline, -training_truth, -<benchmark>, -<benchmark>-floor."""
    kind, _, what = name.partition("-")
    shown = SHOWN.get(name)
    if folder := newest(kind, f"{what}.md"):  # roofline, training_truth
        lines = (folder / f"{what}.md").read_text().splitlines(keepends=True)
        if shown:
            lines[2:] = [line for line in lines[2:] if line[0] != "|" or line[2:].split(" | ")[0] in shown]
        return "".join(lines) + _picture(kind, what)
    benchmarks = load_newest(kind)
    if shown:
        benchmarks = {
            of: [row for case in shown for row in rows if row["case"] == case] for of, rows in benchmarks.items()
        }
    if what == "summary":
        letters = letters_of(benchmarks)
        return f"{summary_table(benchmarks, letters)}\n{provenance(benchmarks, SPREAD, letters)}"
    if what == "operators":
        measured_in = {name: benchmarks[name] for names in OPERATORS.values() for name in names}
        letters = letters_of(measured_in)
        return f"{operators_table(benchmarks, letters)}\n{provenance(measured_in, letters=letters)}"
    if what == "epochs":
        return epochs_of_coco()
    if what == "headlines":
        return headline_table(headlines(benchmarks))
    if what == "memory":
        limits = [row for row in memory_limits() if row["size"] == "s"]
        cases = {
            (of, case.format(batch), name)
            for _, of, case, ours in MEMORY
            for batch in BATCHES
            for name in ("stock", ours)
        }
        measured_in = {
            name: [row for row in benchmarks[name] if (name, row["case"], row["variant"]) in cases]
            for name in dict.fromkeys(row[1] for row in MEMORY)
        } | {"": limits}
        letters = letters_of(measured_in)
        below = provenance(measured_in, "peaks of reserved memory", letters)
        return f"{memory_table(benchmarks, limits, letters)}\n{below}"
    floor, what = what.endswith("-floor"), what.removesuffix("-floor")
    if what not in benchmarks:
        command = "python -m benchmarks.training_truth" if what in TRUTHS else "make bench"
        return f"Not measured yet: `{command}` on such a machine writes it.\n"
    of_it = {what: benchmarks[what]}
    if floor:
        return f"{floor_table(benchmarks[what])}\n{provenance(of_it)}"
    if {row["variant"] for row in benchmarks[what]} <= {"stock", OURS, COMPILED}:
        letters = letters_of(of_it)
        text, below = comparison_table(benchmarks[what], letters), provenance(of_it, SPREAD, letters)
    else:
        text, below = benchmark_table(benchmarks[what]), provenance(of_it, SPREAD)
    return f"{text}\n{below}{_picture(kind, what)}"


def rendered(page: Path) -> str:
    """A page with its generated sections up to date."""
    text = page.read_text()
    there = {name for _, name, _ in MARKER.findall(text)}
    if absent := [name for name in SECTIONS.get(page.name, ()) if name not in there]:
        raise KeyError(
            f"{page.name} has no <!-- results:{absent[0]} --> with its <!-- end results -->, which are expected"
        )
    return MARKER.sub(lambda found: f"{found.group(1)}\n{section(found.group(2))}\n{found.group(3)}", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def bring(check: bool = False) -> list[str]:
    """Brings the results into tables, pages and pictures, and names those that were out of date. check: names them only."""
    stale = []
    texts = {folder / "tables.md": tables(folder) for folder in [*folders("gpu"), *folders("cpu")] if load(folder)}
    for path, text in (texts | {page: rendered(page) for page in pages()}).items():
        if not path.exists() or path.read_text() != text:
            stale.append(f"{path.parent.name}/{path.name}" if path in texts else path.name)
            if not check:
                path.write_text(text)
    rows = headlines(load_newest("gpu"))
    about = _below(machines_of(rows).values()).strip()
    if not plot_is_current(rows, PLOT, about) and (check or plot_headlines(rows, PLOT, about)):
        stale.append(PLOT.name)
    for shown, source in pictures().items():
        stale.append(shown.name)
        if not check:
            shutil.move(source, shown)
    return stale


def bring_pages(folder: Path) -> str | None:
    """Writes a results folder's tables.md; pages show the newest under benchmarks/results. What stands in the way, or None."""
    folder = folder.resolve()
    if not load(folder):
        return None
    (folder / "tables.md").write_text(tables(folder))
    print(f"wrote {folder / 'tables.md'}")
    if not folder.is_relative_to(RESULTS):
        return None
    try:
        stale = bring()
    except (FileNotFoundError, KeyError) as error:
        return f"README.md and docs/ are as they were: {error.args[0]}"
    print(f"rewrote from benchmarks/results: {', '.join(stale) or 'nothing, all is up to date'}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 where a page is out of date"
    )
    check = parser.parse_args().check
    try:
        stale = bring(check)
    except (FileNotFoundError, KeyError) as error:
        print(f"README.md and docs/ are as they were: {error.args[0]}")
        return 1
    if stale:
        print(f"{'out of date' if check else 'rewrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
