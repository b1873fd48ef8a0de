"""Make every table and plot of results in the README and the docs from the JSON rows under benchmarks/results/.

``python -m benchmarks.report`` rewrites the text between ``<!-- results:NAME -->`` and ``<!-- end results -->`` in
README.md and docs/*.md, docs/headlines.png and the folders' own tables.md, and moves a new run's images that docs show
there; ``--check`` only says whether that would change anything (exit status 1). Nothing is typed into a page by hand;
if a folder's files were copied from a script's output, its ``sources.md`` says so. Each table is of the newest folder
that has its file, from the machine that was last measured with all that README shows. So a run of some benchmarks there
replaces only those, and a run on another machine none.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
OURS = "torch_fastdet"  # what the name of each of the package's variants begins with
DOCS = ROOT / "docs"
PLOT = DOCS / "headlines.png"
# These are the benchmarks' names of what users run who tune nothing; older results have "stock loop".
STOCK = ("stock", "stock decode + suppression", "eager", "stock loop")
COCO_CASE = "yolov5s, batch 64, train.py, 118,287 JPEGs of 640x480, 83 kB"  # of every epoch but the first
# Others begin here with files on the host, torch_fastdet with packed JPEGs on the GPU or less work: no ratio.
UNLIKE = re.compile(r"\d+ JPEGs of|a file's index")


class Headline(NamedTuple):
    """Hold a row of README's table and plot: a benchmark's case and the two variants that it compares."""

    title: str  # {torch} is the PyTorch of the variant before
    benchmark: str  # "h100:" before it takes it from another machine, if it was measured there
    case: str
    ours: str = OURS
    before: str = ""  # a variant, or stock
    times: int = 1  # how many of the case the row is of


COCO = 118_287  # images
EPOCH = -(-COCO // 64)
# README shows the first eight of these that were measured. `make bench` measures most of them.
HEADLINES = [
    Headline("train.py of YOLOv5, yolov5s, batch 64: an epoch of 118,287 images (COCO's size)", "dataset", COCO_CASE, times=EPOCH),
    Headline("train.py of YOLOv5, yolov5s, batch 64: an epoch of 118,287 images (COCO's size)", "h100:dataset", COCO_CASE, times=EPOCH),
    Headline("Ultralytics' trainer: an iteration of yolov8s, batch 16", "ultralytics", "yolov8s, batch 16"),
    Headline("Ultralytics' trainer: an iteration of yolo26s, batch 16", "ultralytics", "yolo26s, batch 16"),
    Headline("Ultralytics' trainer: an iteration of rtdetr-l, batch 16", "ultralytics", "rtdetr-l, batch 16"),
    Headline("val.py of YOLOv5: the whole command on 5,000 JPEGs, yolov5s", "val",
             "val.py, yolov5s, half, batch 32, 5000 JPEGs of COCO's sizes: the whole command"),
    Headline("YOLO(\"yolov8n\").predict of one 1080p image in memory", "detector",
             "YOLO(yolov8n).predict, one 1080p image in memory"),
    Headline("your own loop: a step of yolov5s, batch 16 (before: torch.compile of PyTorch {torch})", "step", "yolov5s, batch 16, loop",
             "torch_fastdet TrainStep", "stock, tuned, torch.compile, reduce-overhead"),
]  # fmt: skip
VALIDATION = ": validation's pass over 1024 images"  # of bench_ultralytics' rows
# docs/results*.md show these cases of a section, in this order; the folders' tables.md have every row.
SHOWN = {
    "gpu-dataset": (f"{COCO_CASE}, first epoch", COCO_CASE, COCO_CASE.replace("batch 64", "batch 16")),
    "h100-dataset": (f"{COCO_CASE}, first epoch", COCO_CASE),
    "gpu-train": (
        "yolov5s, batch 64, train.py's default options, JPEGs from disk",
        "yolov5s, batch 16, train.py's default options, JPEGs from disk",
        "yolov5s-seg, batch 16, segment/train.py",
    ),
    "h100-train": ("yolov5s-seg, batch 16, segment/train.py", "yolov5s-cls, batch 64, classify/train.py"),
    "gpu-distributed": (
        *(f"yolov5{name} a GPU, train.py, 2 GPUs" for name in ("s, 16", "s, 64", "m, 32")),
        "yolov5s, 64 a GPU, train.py, 4 GPUs",
    ),
    "gpu-ultralytics": (
        *("yolov8s, batch 16", "yolov8s, batch 64", "yolov8m, batch 32"),
        *("yolo11s, batch 16", "yolo12s, batch 16", "yolo26s, batch 16"),
        *("yolov8s-seg, batch 16", "yolo26s-seg, batch 16", "yolov8s-pose, batch 16"),
        *("yolov8s-obb, batch 16", "yolov8s-cls, batch 64"),
        *("rtdetr-l, batch 16", "yolov8s, batch 16 a GPU, 2 GPUs"),
        *(f"{model}, batch {batch} a GPU, 4 GPUs" for model, batch in (("yolov8s", 16), ("yolo26s", 64))),
    ),
    "h200-ultralytics": tuple(
        f"{model}, batch 16{VALIDATION}"
        for model in ("yolov8s", "yolov8s-seg", "yolov8s-pose", "yolov8s-obb", "yolo26s-seg", "rtdetr-l")
    ),
    "h100-ultralytics": (f"yolov8s-cls, batch 64{VALIDATION}",),
    "gpu-val": (
        "val.py, yolov5s, half, batch 32, 5000 JPEGs of COCO's sizes: the whole command",
        "val.py, yolov5s, half, batch 32, 5000 JPEGs of COCO's sizes: the pass over the images",
        "segment/val.py, yolov5s, half, batch 32, 1024 JPEGs of 640x640: the whole command",
    ),
    "gpu-detector": ("YOLO(yolov8n).predict, one 1080p image in memory",),
    "gpu-rtdetr": tuple(f"rtdetr-l as a predictor runs it, half, batch {batch}" for batch in (16, 1)),
    "gpu-rtdetr_training": ("rtdetr-l, batch 4", "rtdetr-x, batch 16", "rtdetr-resnet50, batch 16"),
    "gpu-training_truth_small": ("mAP50-95", "val obj loss"),
    "gpu-summary": ("yolov5s, batch 16, loop", "yolov5s, batch 64, loop", "suppression, batch 32, conf .25"),
    "cpu-summary": ("yolov5n, batch 16, train.py at 128", "validation, batch 32 of 128x128, CPU fp32"),
    "gpu-bbox_iou-floor": tuple(
        f"{what} n={n}" for n in (3000, 1000000) for what in ("CIoU loss forward+backward", "bbox_iou CIoU forward")
    ),
    "gpu-upsample-floor": tuple(
        f"{what} {shape}"
        for shape in ("NCHWfp16(64,256,40,40)", "NHWCfp16(64,256,40,40)", "NHWCfp16(16,512,20,20)")
        for what in ("forward", "backward", "cat forward+backward")
    ),
    "gpu-multi_tensor-floor": (
        *("EMA s", "SGD momentum nesterov s", "unscale + clip + SGD + EMA s"),
        *("unscale + clip + SGD + EMA n", "unscale + clip + SGD + EMA x", "clip_grad_norm_ s"),
    ),
    "gpu-loss-floor": (
        *("640x640, batch 16, 8 boxes an image", "640x640, batch 64, 8 boxes an image"),
        *("640x640, batch 16, 40 boxes an image", "segmentation, 640x640, batch 16, 8 boxes an image"),
    ),
    "gpu-bn_act-floor": (
        *(f"forward+backward {shape}" for shape in ("NHWCfp16(64,64,160,160)", "NCHWfp16(64,64,160,160)")),
        *(f"forward+backward NHWCfp16({shape})" for shape in ("64,256,40,40", "16,256,40,40")),
        "concatenation of two (64,32,160,160)",
    ),
    "gpu-stem_conv-floor": (
        *("stem 6x6, 32 outputs, batch 64", "stem 6x6, 32 outputs, batch 16"),
        *("stem 3x3, 32 outputs, batch 64", "stem 3x3, 16 outputs, batch 16"),
    ),
    "gpu-pool-floor": ("SPPF poolings (64,256,20,20)", "SPPF poolings (16,256,20,20)"),
    "gpu-v8_loss-floor": (
        *("640x640, v8 head, batch 16, 8 boxes an image", "640x640, v8 head, batch 64, 8 boxes an image"),
        "640x640, segment, batch 16, 8 boxes an image",
        *("640x640, pose, batch 16, 8 boxes an image", "640x640, obb, batch 16, 8 boxes an image"),
    ),
    "gpu-rtdetr-floor": (
        *(f"deformable attention, batch {batch}, 500 queries, fp16" for batch in (16, 4)),
        *(f"assignment, 112 problems of 300 x {targets}" for targets in (8, 30, 100)),
        *("assignment, 16 problems of 300 x 299", "loss, batch 16, fp16"),
    ),
    "gpu-masks-floor": tuple(
        f"process_mask{case}, fp16"
        for case in (
            ", 300 masks of 640x640, usual boxes",
            ", 300 masks of 640x640, boxes that cover it",
            "_native, 300 masks of 1080x1920, usual boxes",
        )
    ),
    "gpu-image-floor": (
        *("mosaic, affine, HSV, flip, batch 64 of 640x640", "mosaic, perspective, HSV, flip, batch 64 of 640x640"),
        "letterbox, batch 32 of 1080p to 640x640",
    ),
    "gpu-jpeg-floor": tuple(
        f"{n} JPEGs of 640x480, 92 kB, quality 90, {part}"
        for n in (256, 64)
        for part in ("whole", "as mosaics show them")
    ),
    "gpu-nms-floor": (
        *("suppression, batch 1, conf .25", "suppression, batch 32, conf .25", "suppression, batch 32, validation"),
        *("raw heads to detections, batch 32, conf .25", "decode, batch 32"),
    ),
}
COMPILED = "stock, compile=True"  # of bench_ultralytics' rows
# These are the families of operators on that page, each with its benchmarks.
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
    "[RT-DETR](kernels/rtdetr.md)": ("rtdetr",),
}
# These trainings' peak memory is known at two batch sizes: title, benchmark, case by batch size, and variant.
LOOP = "YOLOv5s, a loop of your own"
MEMORY = (
    (LOOP, "step", "yolov5s, batch {}, loop", "torch_fastdet TrainStep"),
    ("YOLOv8s, Ultralytics' trainer", "ultralytics", "yolov8s, batch {}", "torch_fastdet"),
)
BATCHES = (16, 64)
CARDS = (8, 12, 24, 80)
APART_MIB = 1024  # an assumption of what a card's memory leaves to CUDA, its libraries and a desktop
# These are folders of benchmarks/training_truth.py, each with a table and a chart beside it.
TRUTHS = (
    *("training_truth", "training_truth_small", "training_truth_yolov8n", "training_truth_yolo26n"),
    *("training_truth_yolov8n-seg", "training_truth_yolov8n-pose", "training_truth_yolov8n-obb"),
)
TRUTH_ROWS = ("training_truth_small", *TRUTHS[2:])  # the training of each row of the table `truths`
# These charts in docs/ show these files of the newest folder of a GPU that has them.
CHARTS = {"gpu-roofline.png": "roofline", "gpu-training_truth_yolov8n.png": "training_truth_yolov8n"}
# Each page must show these: one that lost a marker would keep its old figures for ever.
SECTIONS = {
    "README.md": ("gpu-headlines",),
    "distributed.md": ("gpu-distributed",),
    "upsample.md": ("gpu-upsample-floor",),
    "boxes.md": ("gpu-bbox_iou-floor",),
    "multi_tensor.md": ("gpu-multi_tensor-floor",),
    "yolov5_loss.md": ("gpu-loss-floor",),
    **{f"{name}.md": (f"gpu-{name}-floor",) for name in ("bn_act", "stem_conv", "pool", "v8_loss", "rtdetr")},
    **{f"{name}.md": (f"gpu-{name}-floor",) for name in ("nms", "masks", "image", "jpeg")},
    "machine.md": ("h100-machine", "gpu-memory", "gpu-small_cards"),
    "results.md": ("gpu-truths", "all-rows"),
    "results_yolov5.md": ("gpu-dataset", "h100-dataset", "gpu-train", "h100-train", "gpu-val"),
    "results_ultralytics.md": ("gpu-ultralytics", "gpu-rtdetr_training", "h200-ultralytics", "h100-ultralytics"),
    "results_prediction.md": (
        "gpu-detector",
        "gpu-predict",
        "gpu-detect",
        "gpu-serving",
        "gpu-evaluation",
        "gpu-rtdetr",
    ),
    "results_tracking.md": ("cpu-track",),
    "results_operators.md": ("gpu-summary", "gpu-operators", "cpu-summary"),
}
EDGE = re.compile(r"(?<!\w)_|_(?!\w)")  # which Markdown takes for emphasis
APART_FROM_ROWS = ("roofline", "memory_limits", "small_cards")  # JSON that is no benchmark's rows
MARKER = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)


def folders(kind: str) -> list[Path]:
    """Return the results folders of a kind of machine ("cpu", a GPU such as "h100", or "gpu" for any), oldest first."""
    found = (path for path in RESULTS.iterdir() if path.is_dir())
    of_kind = [
        path for path in found if path.name.startswith(f"{kind}-") or (kind == "gpu" and path.name[:4] != "cpu-")
    ]
    return sorted(of_kind, key=lambda path: (path.name[-10:], path.name))


def results_folder(environment: dict[str, str]) -> Path:
    """Return benchmarks/results/<machine>-<date>."""
    machine = (environment["gpu"] or "cpu").lower().replace("nvidia ", "").replace(" ", "-")
    return RESULTS / f"{machine}-{environment['date']}"


def machines_in(folder: Path) -> set[str]:
    """Return the machines on which a folder's rows were measured."""
    return {machine_of(row) for rows in load(folder).values() for row in rows}


def of_newest_machine(kind: str) -> list[Path]:
    """Return the folders of the newest machine with rows: a table that mixes machines compares nothing.

    A machine with the benchmarks of all operators is preferred to a newer one with a few, else the one with the most.
    """
    found = folders(kind)
    wanted = {name for names in OPERATORS.values() for name in names}
    with_rows = [folder for folder in reversed(found) if machines_in(folder)]
    if not with_rows:
        return found
    of_same = [
        [path for path in found if path.name[:-11] == newest.name[:-11] and machines_in(path) <= machines_in(newest)]
        for newest in with_rows
    ]
    whole = (paths for paths in of_same if wanted <= {name for path in paths for name in load(path)})
    return next(whole, max(of_same, key=lambda paths: len({name for path in paths for name in load(path)})))


def newest(kind: str, file: str) -> Path | None:
    """Return the newest folder of the newest machine that has a file; a roofline must be beside its rows."""
    found = (folder for folder in reversed(of_newest_machine(kind)) if (folder / file).exists())
    return next((folder for folder in found if not file.startswith("roofline") or load(folder)), None)


def machine_of(row: dict[str, str]) -> str:
    """Return the machine on which a row, or an environment, was measured."""
    return row["gpu"] or row["cpu"]


def newest_of(environment: dict[str, str]) -> Path:
    """Return the newest folder with rows of this very machine, or today's if there is none."""
    machine = machine_of(environment)
    for folder in reversed(folders("gpu" if environment["gpu"] else "cpu")):
        if any(machine_of(rows[0]) == machine for rows in load(folder).values()):
            return folder
    return results_folder(environment)


def as_json(found: list | dict[str, Any]) -> str:
    """Return JSON with a line for each row of a list, so that a run changes only the lines of its own rows."""
    if isinstance(found, list):
        return "[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n"
    values = (
        (key, as_json(value).strip() if isinstance(value, list) else json.dumps(value)) for key, value in found.items()
    )
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {value}" for key, value in values) + "\n}\n"


def load(folder: Path) -> dict[str, list[dict]]:
    """Map benchmark names to rows."""
    found = (path for path in sorted(folder.glob("*.json")) if path.stem not in APART_FROM_ROWS)
    return {path.stem: json.loads(path.read_text()) for path in found}


def load_to(folder: Path) -> dict[str, list[dict]]:
    """Return a folder's rows; missing benchmarks' are from the same machine's newest folder before it."""
    own, known = load(folder), folders("cpu" if folder.name.startswith("cpu-") else "gpu")
    machines = {machine_of(rows[0]) for rows in own.values()}
    found: dict[str, list[dict]] = {}
    for earlier in known[: known.index(folder.resolve())] if folder.resolve() in known else []:
        found |= {k: rows for k, rows in load(earlier).items() if machine_of(rows[0]) in machines}
    return found | own


def load_newest(kind: str) -> dict[str, list[dict]]:
    """Map benchmark names to rows, each from the newest folder of the newest machine that has it."""
    found: dict[str, list[dict]] = {}
    for folder in of_newest_machine(kind):
        found |= load(folder)
    return dict(sorted(found.items()))


def rows_of(kind: str, benchmark: str) -> list[dict]:
    """Return a benchmark's rows as `load_newest` has them, or another GPU's if the newest machine lacks them."""
    others = [*(folder / f"{benchmark}.json" for folder in folders(kind))][::-1]
    elsewhere = (json.loads(path.read_text()) for path in others if path.exists())
    return load_newest(kind).get(benchmark) or next(elsewhere, [])


def is_ours(variant: str) -> bool:
    return variant.startswith(OURS)


def _time(microseconds: float) -> str:
    if microseconds >= 1_000_000:
        seconds = microseconds / 1e6
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x"


def _span(row: dict) -> str:
    """Return a row's spread, with the unit once if both ends share it."""
    low, high = _time(row["low_us"]), _time(row["high_us"])
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def _spread(row: dict) -> list[str]:
    """Return a row's spread and number of values, as far as they are known. Two values have no percentiles."""
    spread = [_span(row)] if row.get("n") != 2 and row["low_us"] not in (None, row["high_us"]) else []
    return spread + ([f"n = {row['n']}"] if row.get("n") else [])


def _with_span(row: dict) -> str:
    """Return the median and its spread."""
    spread = _spread(row)
    return _time(row["median_us"]) + (f" ({', '.join(spread)})" if spread else "")


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _number(template: str, value: float | int | None) -> str:
    return "-" if value is None else template.format(value)


SPREAD = "Times are medians, with the 10th to 90th percentile in brackets,"
NOT_MEASURED = "-"
# These mark a ratio, and the sentences below a table explain them.
APART = "\\*"
BY_HAND = "†"
COMPUTED = "‡"
MARKS = {
    APART: "the two times are of different days or machines",
    BY_HAND: "the figures were copied by hand from what a script of that day printed",  # with a link to its folder's sources.md
    COMPUTED: f"the time is {EPOCH:,} times the median of an iteration",
}
# A table has these columns if one of its rows has a value: title, key of the row, format.
OPTIONAL_COLUMNS = (
    ("n", "n", "{}"),
    ("images/s", "images_per_s", "{}"),
    ("launches", "launches", "{}"),
    ("syncs", "host_syncs", "{}"),
    ("peak MiB", "peak_mib", "{:.1f}"),
    ("mAP50", "map50", "{:.4f}"),
    ("mAP50-95", "map50_95", "{:.4f}"),
)


def benchmark_table(rows: list[dict], marked: bool = False) -> str:
    """Return all variants of all cases, one per line; views are columns, with the call's spread. marked: BY_HAND."""
    views = [view for view in ("call", "graph", "cold") if any(row["view"] == view for row in rows)]
    spreads = any(row["low_us"] is not None for row in rows)
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
        mark = BY_HAND * (marked and "source" in any_row)
        cells += [_time(by_view[view]["median_us"]) + mark if view in by_view else "-" for view in views]
        call = by_view.get("call")
        if spreads:
            cells.insert(3, _span(call) if call and call["low_us"] is not None else "-")
        if tails:
            tail = (call or any_row).get("p99_us")
            cells.append("-" if tail is None else _time(tail))
        if copies:
            rates = [row["percent_of_copy"] for row in by_view.values() if row["percent_of_copy"]]
            cells.append(f"{max(rates):.0f}%" if rates else "-")
        cells += [_number(template, any_row.get(key)) for _, key, template in columns]
        body.append(cells)
    if spreads:
        views.insert(1, "p10 to p90")
    header = ["case", "variant", *views, *(["p99"] if tails else []), *(["of copy rate"] if copies else [])]
    return table(header + [title for title, _, _ in columns], body)


def _marks(rows: Iterable[dict]) -> str:
    """Return the MARKS of a ratio. Rows with a ``source`` were copied from another program's output by hand."""
    rows = list(rows)
    return APART * (len({(row.get("date"), row["cpu"].split()[-2]) for row in rows}) > 1) + BY_HAND * any(
        "source" in row for row in rows
    )


def shortened(cases: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Split off what the names of all cases share; return it and the rest of each name."""
    parts = {case: re.split(", |: ", case) for case in cases}
    first, *others = parts.values()
    same = [part for part in first if others and all(part in other for other in others)]
    if any(set(own) <= set(same) for own in parts.values()):
        same = same[1:]  # each case needs a name
    if not same:
        return "", {case: case for case in parts}
    rest = {case: ", ".join(part for part in own if part not in same) for case, own in parts.items()}
    return ", ".join(same), rest


def comparison_table(rows: list[dict]) -> str:
    """Return stock beside torch_fastdet with a line for each case, call to call. tables.md has other variants too."""
    rows = [row for row in rows if row["variant"] in ("stock", OURS)]
    peaks = any(row.get("peak_mib") for row in rows)
    cases: dict[str, dict[bool, dict]] = {}
    for row in rows:
        if row["view"] == "call":
            cases.setdefault(row["case"], {})[is_ours(row["variant"])] = row
    same, names = shortened(cases)
    body = []
    for case, found in cases.items():
        both = [found.get(ours) for ours in (False, True)]
        cells = [names[case], *(NOT_MEASURED if row is None else _with_span(row) for row in both)]
        ratio = len(found) == 2 and _ratio(found[False]["median_us"] / found[True]["median_us"]) + _marks(
            found.values()
        )
        cells.append(ratio or NOT_MEASURED)
        cells += [_number("{:,.0f}", row["peak_mib"] if row else None) for row in both] if peaks else []
        body.append(cells)
    return table([same or "case", "stock", OURS, "faster", *(["MiB, stock", f"MiB, {OURS}"] if peaks else [])], body)


def _ours(row: dict, alternative: float) -> tuple[str, str]:
    """Return a row of torch_fastdet as (variant and time, how many times as fast as the alternative)."""
    name, time = row["variant"].removeprefix(OURS).lstrip(" ,"), _with_span(row)
    return f"{name}: {time}" if name else time, _ratio(alternative / row["median_us"])


def _beside_the_best(rows: list[dict]) -> Iterable[tuple[str, dict, list[dict]]]:
    """Yield each case that is not UNLIKE, call to call: its name, the fastest alternative, and torch_fastdet's."""
    for case in dict.fromkeys(row["case"] for row in rows if not UNLIKE.match(row["case"])):
        group = [row for row in rows if row["case"] == case and row["view"] == "call"]
        ours = [row for row in group if is_ours(row["variant"])]
        others = [row for row in group if not is_ours(row["variant"])]
        if ours and others:
            yield case, min(others, key=lambda row: row["median_us"]), ours


def summary_table(benchmarks: dict[str, list[dict]]) -> str:
    """Return each case once, call to call, wins and losses alike: the best alternative beside torch_fastdet.

    A benchmark lists first the variant of torch_fastdet that does just what the alternatives do (a list if they return
    a list). A faster variant, such as FusedStep for users who own their loop, follows it.
    """
    body = []
    for rows in benchmarks.values():
        for case, best, ours in _beside_the_best(rows):
            fastest = min(ours, key=lambda row: row["median_us"])
            shown = [ours[0]] if fastest["median_us"] > 0.9 * ours[0]["median_us"] else [ours[0], fastest]
            times, ratios = zip(*(_ours(row, best["median_us"]) for row in shown))
            ratio = "; ".join(ratios) + _marks([best, *shown])
            body.append([case, f"{best['variant']}: {_with_span(best)}", "; ".join(times), ratio])
    return table(["case", "best alternative", OURS, "faster"], body)


def operators_table(benchmarks: dict[str, list[dict]]) -> str:
    """List, for each family of OPERATORS, where torch_fastdet's first variant gains most and least, or loses."""
    body = []
    for family, names in OPERATORS.items():
        # Only the share around a network is of interest: the network alone is a floor, not an alternative.
        rows = [row for name in names for row in benchmarks[name] if row["variant"] != "network alone"]
        found = []
        for case, best, (ours, *_) in _beside_the_best(rows):
            name = ours["variant"].removeprefix(OURS).strip(" ,")
            ratio = best["median_us"] / ours["median_us"]
            other = EDGE.sub(r"\_", best["variant"])
            cells = f"{case} ({name})" if name else case, f"{_time(best['median_us'])} ({other})"
            found.append((ratio, *cells, _time(ours["median_us"]), _ratio(ratio) + _marks([best, ours])))
        body += [[family, *max(found)[1:]], ["", *min(found)[1:]]]
    return table(["operators", "case", "fastest alternative", OURS, "faster"], body)


def headlines() -> list[dict]:
    """Return HEADLINES with their figures, call to call, except those without a measurement or earlier variant."""
    found = []
    for headline in HEADLINES:
        machine, _, benchmark = headline.benchmark.rpartition(":")
        rows = rows_of(machine or "gpu", benchmark)
        known = {row["variant"]: row for row in rows if row["case"] == headline.case and row["view"] == "call"}
        before = next((known[name] for name in (headline.before, *STOCK) if name in known), None)
        ours = known.get(headline.ours)
        if before is not None and ours is not None:
            times = {name: headline.times * row["median_us"] for name, row in (("before", before), ("ours", ours))}
            marks = _marks([before, ours]) + COMPUTED * (headline.times > 1)
            title = headline.title.format(torch=before["torch"].partition("+")[0])
            found.append({"title": title, **times, "marks": marks, "from": [before, ours]})
    return found[:8]


def headline_table(rows: list[dict]) -> str:
    """Return README's table and the line below it."""
    body = []
    for row in rows:
        single = [" (n = 1)" * (of_it.get("n") == 1) for of_it in row["from"]]
        before, ours = _time(row["before"]) + single[0], f"**{_time(row['ours'])}**{single[1]}"
        ratio = _ratio(row["before"] / row["ours"]) + row["marks"]
        body.append([row["title"], _gpu(row["from"][0]), before, ours, ratio])
    text = table(["", "GPU", "before", f"with {OURS}", "faster"], body)
    return measured(text, {"": [of_it for row in rows for of_it in row["from"]]})


def _gpu(row: dict) -> str:
    return row["gpu"].removeprefix("NVIDIA ").split()[0]


def pyplot() -> Any:
    """Return matplotlib.pyplot without a screen, or None, with a line that says so, if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("no PNG: matplotlib is not installed", flush=True)
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_headlines(rows: list[dict], path: Path, about: str) -> bool:
    """Plot the headline table as bars, and store its text in the file to compare it with the results."""
    if not (plt := pyplot()):
        return False
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.55 * len(rows)), layout="constrained")
    for offset, key, label, color in ((-0.2, "before", "before", "0.75"), (0.2, "ours", f"with {OURS}", "C1")):
        shares = [100 * row[key] / row["before"] for row in rows]
        axes.barh([i + offset for i in range(len(rows))], shares, 0.38, color=color, label=label)
        for i, (row, share) in enumerate(zip(rows, shares)):
            marks = row["marks"].replace(APART, "*")
            faster = f" ({_ratio(row['before'] / row['ours'])}{marks})" if key == "ours" else ""
            axes.text(share, i + offset, f" {_time(row[key])}{faster}", va="center", fontsize=10)
    titles = [textwrap.fill(f"{row['title']} ({_gpu(row['from'][0])})", 44) for row in rows]
    axes.set_yticks(range(len(rows)), titles, fontsize=10)
    axes.invert_yaxis()
    axes.set(xticks=[], xlim=(0, 122))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, fontsize=10, frameon=False)
    figure.savefig(path, dpi=150, metadata={"torch_fastdet": _plotted(rows, about)})
    plt.close(figure)
    return True


def _plotted(rows: list[dict], about: str) -> str:
    return json.dumps([about, [{key: value for key, value in row.items() if key != "from"} for row in rows]])


def plot_is_current(rows: list[dict], path: Path, about: str) -> bool:
    return path.exists() and b"torch_fastdet\0" + _plotted(rows, about).encode() in path.read_bytes()


def floor_table(rows: list[dict]) -> str:
    """Return torch_fastdet's variants against the time that their bytes take at the copy rate of the same run."""
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
        moved = float(f"{row['bytes'] / 1e6:.3g}")
        body.append(
            [case, variant.removeprefix(OURS).strip(" ,") or OURS, f"{moved:,g} MB", _time(floor),
             _time(row["median_us"]), f"{100 * floor / row['median_us']:.0f}%", str(row["launches"])]
        )  # fmt: skip
    return table(["case", "variant", "moves", "memory floor", "graph", "floor / graph", "launches"], body)


def largest_batch(peaks: tuple[float, float], card: int) -> int:
    """Estimate the largest batch from a straight line through the peak MiB at BATCHES; card is in GiB."""
    each = (peaks[1] - peaks[0]) / (BATCHES[1] - BATCHES[0])
    return int((1024 * card - APART_MIB - (peaks[0] - BATCHES[0] * each)) / each)


def of_any_gpu(name: str) -> list[dict]:
    """Return the newest rows of memory_limits.py or small_cards.py of any GPU: memory limits are the same on all."""
    files = [file for folder in folders("gpu") if (file := folder / f"{name}.json").exists()]
    return json.loads(files[-1].read_text()) if files else []


def memory_table(benchmarks: dict[str, list[dict]], limits: list[dict]) -> str:
    """Return the largest batches of CARDS: those tried (``limits``), and others computed from measured peaks."""
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
            rows.append([name, variant, *(f"{peak:,.0f}" for peak in peaks), *cells])
    head = [f"MiB, batch {batch}" for batch in BATCHES] + [f"{card} GB" for card in CARDS]
    return table(["training at 640 pixels", "variant", *head], rows)


def machine_and_day(row: dict) -> tuple[str, ...]:
    """Return the machine, driver, versions and date of a row."""
    gpu = f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}, host " if row["gpu"] else ""
    return gpu + row["cpu"], f"torch {row['torch']}", f"Python {row['python']}", row["date"]


def machines(benchmarks: dict[str, list[dict]]) -> dict[tuple[str, ...], str]:
    """Return machine, driver, versions, copy rates and date of benchmarks' rows, keyed by `machine_and_day`."""
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


def _below(lines: Iterable[str], figures: str = "medians") -> str:
    """Return the machines of a table, with what all of them share stated once."""
    told, same = list(lines), []
    if len(told) > 1:
        parts = [re.split("[,;] ", line) for line in told]
        same = [part for part in parts[0] if all(part in others for others in parts)]
        told = [", ".join(part for part in of_one if part not in same) for of_one in parts]
    return f"{'; '.join([', '.join(same)] * bool(same) + told)}; {figures}.\n"


def provenance(benchmarks: dict[str, list[dict]], figures: str = "medians") -> str:
    """Return the line below a results folder's table: every machine, driver, version and copy rate."""
    return _below(machines(benchmarks).values(), figures)


def _figures(figures: str, rows: list[dict]) -> str:
    """Return a caption about a table's figures, without percentiles that no row has, and with single values."""
    single = [row.get("n") == 1 for row in rows]
    if figures.startswith("Times are medians") and all(single):
        return "Each time is a single value"
    if figures == SPREAD and not any("n =" not in spread for row in rows for spread in _spread(row)):
        figures = "Times are medians"
    return (
        figures.replace("Times are medians", "Times are medians (single values where n = 1)")
        if any(single)
        else figures
    )


def _sources(rows: list[dict]) -> str:
    """Return links, from the repository's root, to the sources.md of rows that were copied by hand."""
    there = sorted({results_folder(row) for row in rows if "source" in row})
    links = [f"[{folder.name}]({(folder / 'sources.md').relative_to(ROOT)})" for folder in there]
    return f" ({', '.join(links)})" if links else ""


def measured(text: str, benchmarks: dict[str, list[dict]], figures: str = "Times are medians") -> str:
    """Return a page's table and a line with GPUs or processors, PyTorch and days. tables.md has the rest."""
    rows = [row for of_it in benchmarks.values() for row in of_it]
    days = sorted({row["date"] for row in rows})
    torches = ", ".join(sorted({row["torch"].partition("+")[0] for row in rows}))
    where = re.sub(r"\b1 threads", "1 thread", ", ".join(sorted({machine_of(row) for row in rows})))
    sources = {BY_HAND: _sources(rows)}
    marks = "".join(f" {mark}: {meaning}{sources.get(mark, '')}." for mark, meaning in MARKS.items() if mark in text)
    return f"{text}\n{_figures(figures, rows)} on {where}, torch {torches}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}.{marks}\n"


def tables(folder: Path) -> str:
    """Return a whole results folder as Markdown."""
    benchmarks = load(folder)
    parts = [provenance(benchmarks, "medians, with the 10th to 90th percentile beside them"), summary_table(benchmarks)]
    for name, rows in benchmarks.items():
        parts += [f"### {name}\n", benchmark_table(rows)]
    for page in ("sources", "roofline", *TRUTHS):
        if (folder / f"{page}.md").exists():
            parts += [f"### {page}\n", (folder / f"{page}.md").read_text()]
    return "\n".join(parts)


def charts() -> dict[Path, Path]:
    """Map charts in docs/ to a new run's, which move there: mkdocs shows no others, and git keeps one copy."""
    found = {}
    for shown, what in CHARTS.items():
        folder = newest("gpu", f"{what}.md")
        if folder and (folder / f"{what}.png").exists():
            found[DOCS / shown] = folder / f"{what}.png"
    return found


def truths() -> str:
    """Return the mAP of each training of TRUTH_ROWS, stock and torch_fastdet, from training_truth.py's tables."""
    body, told = [], []
    for name in TRUTH_ROWS:
        lines = (newest("gpu", f"{name}.md") or RESULTS).joinpath(f"{name}.md").read_text().splitlines()
        cells = next(line for line in lines if line.startswith("| mAP50-95 |")).strip("| ").split(" | ")
        seeds = re.findall(r"\((\d+)\)", lines[0] + cells[2])
        whole = next(line for line in lines if line and line[0] != "|")
        about = whole.partition("; ")[0]
        told.append(whole.rpartition(". ")[2].removesuffix(".").split(", "))  # GPU, torch, day
        body.append([about, " and ".join(dict.fromkeys(seeds)), cells[1], *cells[3:6]])
    gpus, torches, days = (sorted(set(each)) for each in zip(*told))
    head = ["training", "seeds each", "stock, mAP50-95", OURS, "difference", "standard error"]
    day = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return f"{table(head, body)}\nThey ran on {', '.join(gpus)}, {', '.join(torches).partition('+')[0]}, {day}.\n"


def folder_list() -> str:
    """List every results folder that has pages, newest first, with links from the repository's root."""
    lines = []
    for folder in sorted(
        [*folders("gpu"), *folders("cpu")], key=lambda path: (path.name[-10:], path.name), reverse=True
    ):
        machine, day = folder.name[:-11].split("-")[0].upper(), folder.name[-10:]
        names = sorted((path.stem for path in folder.glob("*.md")), key=lambda name: (name != "tables", name))
        links = [f"[{name}]({(folder / name).relative_to(ROOT)}.md)" for name in names]
        if links:  # plots alone, which git ignores, are those of this machine
            lines.append(f"- {machine}, {day}: {', '.join(links)}")
    return "\n".join(lines) + "\n"


def section(name: str) -> str:
    """Return a marker's text: all-rows, gpu-headlines, gpu-memory, gpu-rates, gpu-truths, <gpu|h100|cpu>-summary,
    -operators, -<benchmark>, -<benchmark>-floor, or a file of a folder."""
    if name == "all-rows":
        return folder_list()
    kind, _, what = name.partition("-")
    shown = SHOWN.get(name)
    if what == "small_cards":
        from benchmarks.small_cards import small_table

        rows = of_any_gpu(what)
        return measured(
            small_table(rows), {what: rows}, "The batch is the largest that fits, and the speed was measured"
        )
    if what == "rates" and (folder := newest(kind, "roofline.md")):
        rates = (folder / "roofline.md").read_text().partition("\n")[0]
        return f"{rates} [All cases](benchmarks/results/{folder.name}/roofline.md) have a table.\n"
    if folder := newest(kind, f"{what}.md"):  # roofline, training_truth, machine
        lines = (folder / f"{what}.md").read_text().splitlines(keepends=True)
        if shown:
            lines[2:] = [line for line in lines[2:] if line[0] != "|" or line[2:].split(" | ")[0] in shown]
        return "".join(lines)
    benchmarks = load_newest(kind)
    if shown:
        benchmarks = {
            of: [row for case in shown for row in rows if row["case"] == case] for of, rows in benchmarks.items()
        }
    if what == "truths":
        return truths()
    if what == "summary":
        return measured(summary_table(benchmarks), benchmarks, SPREAD)
    if what == "operators":
        of_families = {name: benchmarks[name] for names in OPERATORS.values() for name in names}
        return measured(operators_table(benchmarks), of_families)
    if what == "headlines":
        return headline_table(headlines())
    if what == "memory":
        limits = [row for row in of_any_gpu("memory_limits") if row["size"] == "s"]
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
        return measured(memory_table(benchmarks, limits), measured_in, "Memory is the peak that PyTorch reserved")
    floor, what = what.endswith("-floor"), what.removesuffix("-floor")
    if floor and shown and what not in benchmarks:  # a page whose cases are a part of another benchmark
        benchmarks = {what: [row for rows in benchmarks.values() for row in rows]}
    if not floor and not shown:
        benchmarks[what] = rows_of(kind, what)
    if not benchmarks.get(what):
        command = "python -m benchmarks.training_truth" if what in TRUTHS else "make bench"
        return f"Not measured yet: `{command}` on such a machine writes it.\n"
    of_it = {what: benchmarks[what]}
    if floor:
        return measured(floor_table(benchmarks[what]), of_it)
    figures = next((row["figures"] for row in benchmarks[what] if "figures" in row), SPREAD)  # rows of other programs
    variants = {row["variant"] for row in benchmarks[what]}
    compared = variants <= {"stock", OURS, COMPILED} or shown
    text = comparison_table(benchmarks[what]) if compared else benchmark_table(benchmarks[what], marked=True)
    return measured(text, of_it, figures)


def rendered(page: Path) -> str:
    """Return a page with its generated sections up to date."""
    text = page.read_text()
    there = {name for _, name, _ in MARKER.findall(text)}
    if absent := [name for name in SECTIONS.get(page.name, ()) if name not in there]:
        raise KeyError(
            f"{page.name} has no <!-- results:{absent[0]} --> with its <!-- end results -->, which are expected"
        )

    def shown(found: re.Match[str]) -> str:
        said = section(found[2]).replace(
            "](benchmarks/", f"]({'../' * (len(page.relative_to(ROOT).parts) - 1)}benchmarks/"
        )
        return f"{found[1]}\n{said}\n{found[3]}"

    return MARKER.sub(shown, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def bring(check: bool = False) -> list[str]:
    """Bring the results into tables, pages and charts, and name those that were out of date. check: only name them."""
    stale = []
    texts = {folder / "tables.md": tables(folder) for folder in [*folders("gpu"), *folders("cpu")] if load(folder)}
    for path, text in (texts | {page: rendered(page) for page in pages()}).items():
        if not path.exists() or path.read_text() != text:
            stale.append(f"{path.parent.name}/{path.name}" if path in texts else path.name)
            if not check:
                path.write_text(text)
    rows = headlines()
    about = headline_table(rows).splitlines()[-1]
    if not plot_is_current(rows, PLOT, about) and (check or plot_headlines(rows, PLOT, about)):
        stale.append(PLOT.name)
    for shown, source in charts().items():
        stale.append(shown.name)
        if not check:
            shutil.move(source, shown)
    return stale


def bring_pages(folder: Path) -> str | None:
    """Write a results folder's tables.md; pages show the newest. Return what prevents that, or None."""
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
