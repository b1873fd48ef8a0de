"""Measure this machine's ceilings, and how near to them torch_fastdet's operators and YOLOv5's training step run.

``python -m benchmarks.roofline`` measures the copy rate and the fp32 and fp16 (on a CPU bf16) matrix rates, and so the
ops:byte ratios. It derives bytes, operations, intensity, bound and floor of each operator and of the training step of
YOLOv5 n, s, m, l and x from the formulas in benchmarks/work.py. Measured times come from the rows that other benchmarks
wrote into --results (default: the newest folder with rows of this machine), and missing ones from older folders of the
machine. It writes roofline.json, roofline.md and roofline.png there, and what is made of them
(``benchmarks/report.py``). ``--again`` measures nothing and takes the ceilings of roofline.json.
"""

from __future__ import annotations

import argparse
import cmath
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, report, work


def _least_s(
    function: Callable[[], object], device: torch.device, repetitions: int = 20, seconds: float = 2.0
) -> float:
    """Return the shortest time, because a ceiling is what the machine can do when nothing disturbs it.

    After ``seconds`` no repetition beyond the third begins.
    """
    times: list[float] = []
    while len(times) < 3 + repetitions and (len(times) < 6 or sum(times) < seconds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[3:])


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return FLOP/s of a square matrix product of random data, large enough to fill the device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return 2 * size**3 / _least_s(lambda: torch.mm(a, b), device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def cpu_copy_rate(size: int) -> float:
    """Return bytes per second of copies that move `size` bytes, read plus write: small ones stay in the caches."""
    source = torch.randint(0, 255, (size // 2,), dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = max(1, (1 << 24) // size)

    def copies() -> None:
        for _ in range(calls):
            target.copy_(source)

    return calls * size / _least_s(copies, torch.device("cpu"))


def launch_time(device: torch.device) -> float:
    """Return seconds from one small kernel to the next inside a CUDA graph."""
    x = torch.randn(32, device=device)
    count = 200

    def kernels() -> None:
        for _ in range(count):
            x.mul_(1.0001)

    return _least_s(harness.graph(kernels), device) / count


def measure_machine(device: torch.device) -> work.Machine:
    environment = harness.environment(device)
    name = report.machine_of(environment)
    if device.type == "cuda":
        rates = {"fp32": matrix_rate(torch.float32, device), "fp16": matrix_rate(torch.float16, device)}
        return work.Machine(name, harness.copy_rate() * 1e9, rates, launch_time(device))
    # CPUs have matrix units for bfloat16, their 16-bit type; `shown` says so.
    rates = {"fp32": matrix_rate(torch.float32, device), "fp16": matrix_rate(torch.bfloat16, device)}
    copies = {1 << bits: cpu_copy_rate(1 << bits) for bits in range(14, 30, 3)}
    return work.Machine(name, cpu_copy_rate(1 << 29), rates, 0.0, copies)


def load_machine(folder: Path) -> work.Machine:
    """Return the ceilings that roofline.json holds."""
    found = json.loads((folder / "roofline.json").read_text())["machine"]
    found["cached_bytes_per_s"] = {int(size): rate for size, rate in found["cached_bytes_per_s"].items()}
    return work.Machine(**found)


def shown(unit: str, machine: work.Machine) -> str:
    """Return the name of a unit in text and plot: on a CPU "fp16" is measured in bfloat16."""
    return "bf16" if unit == "fp16" and not machine.is_gpu else unit


# The formulas map a benchmark, a pattern of case names, its groups and the size of a number to work.

CONFIDENCE = {  # of bench_nms: threshold, mean and deviation of the objectness logits
    "conf .25": (0.25, -5.0, 1.5),
    "validation": (0.001, -5.0, 1.5),
    "sparse validation": (0.001, -11.0, 1.5),
}
THOUSANDS = 30_000  # candidates of bench_nms's cases with one class


def _upsample(what: str, n: str, c: str, h: str, w: str, itemsize: int) -> work.Work:
    elements = int(n) * int(c) * int(h) * int(w)
    if what == "forward":
        return work.upsample2x(elements, itemsize)
    if what == "backward":
        return work.upsample2x_backward(elements, itemsize)
    combined = work.upsample2x_cat if what == "cat forward" else work.upsample2x_cat_step
    return combined(elements, 4 * elements, itemsize)


def _one_class(what: str, itemsize: int) -> work.Work:
    if what == "all overlap":
        return work.greedy_suppression(THOUSANDS, 1, THOUSANDS - 1)
    kept = int(what.rpartition(" ")[2])
    return work.greedy_suppression(THOUSANDS, kept, kept * (kept - 1) // 2)


def _suppression(formula: Callable[..., work.Work]) -> Callable[..., work.Work]:
    return lambda batch, name, itemsize: formula(
        int(batch), work.passing_share(*CONFIDENCE[name]), itemsize=itemsize, max_det=300
    )


def training_step(model: str, batch: str | int, itemsize: int = 2) -> work.Work:
    families = work.yolov5_training_pieces(model, int(batch), itemsize=itemsize).values()
    return sum(
        (piece for family in families for piece in family), work.Work(0, 0, "fp16" if itemsize == 2 else "fp32", 0)
    )


STEP = r"yolov5(\w), batch (\d+), (?:loop|train\.py(?: --cache ram --workers [0-9]+)?)"
FORMULAS: tuple[tuple[str, str, Callable[..., work.Work]], ...] = (
    ("bbox_iou", r"CIoU loss forward\+backward n=(\d+)", lambda n, _: work.iou_loss(int(n))),
    ("bbox_iou", r"bbox_iou CIoU forward n=(\d+)", lambda n, _: work.iou(int(n))),
    ("upsample", r"((?:cat )?(?:forward|backward|forward\+backward)) \w+fp\d+\((\d+),(\d+),(\d+),(\d+)\)", _upsample),
    (
        "image",
        r"mosaic, (?:affine|perspective), HSV, flip, batch (\d+) of (\d+)x\d+",
        lambda batch, side, _: work.augmented_images(int(batch), int(side)),
    ),
    (
        "image",
        r"letterbox, batch (\d+) of 1080p to (\d+)x\d+",
        lambda batch, side, itemsize: work.letterboxed_images(int(batch), int(side), itemsize),
    ),
    (
        "bn_act",
        r"forward\+backward \w+fp\d+\((\d+),(\d+),(\d+),(\d+)\)",
        lambda n, c, h, w, itemsize: work.batch_norm_silu(int(n) * int(c) * int(h) * int(w), itemsize),
    ),
    (
        "bn_act",
        r"concatenation of two \((\d+),(\d+),(\d+),(\d+)\)",
        lambda n, c, h, w, itemsize: work.batch_norm_silu(2 * int(n) * int(c) * int(h) * int(w), itemsize),
    ),
    (
        "bn_act",
        r"stem (\d)x\d, (\d+) outputs, batch (\d+)",
        lambda kernel, outputs, batch, itemsize: work.stem(int(batch), int(kernel), int(outputs), itemsize=itemsize),
    ),
    (
        "bn_act",
        r"SPPF poolings \((\d+),(\d+),(\d+),(\d+)\)",
        lambda n, c, h, w, itemsize: work.max_pools_cat(int(n) * int(c) * int(h) * int(w), 3, itemsize),
    ),
    (
        "multi_tensor",
        r"EMA (\w)",
        lambda model, _: work.ema(work.yolov5_parameters(model) + work.yolov5_statistics(model)),
    ),
    ("multi_tensor", r"SGD momentum nesterov (\w)", lambda model, _: work.sgd(work.yolov5_parameters(model))),
    (
        "multi_tensor",
        r"unscale \+ clip \+ SGD \+ EMA (\w)",
        lambda model, _: work.fused_step(work.yolov5_parameters(model), work.yolov5_statistics(model)),
    ),
    ("multi_tensor", r"clip_grad_norm_ (\w)", lambda model, _: work.clip(work.yolov5_parameters(model))),
    (
        "loss",
        r"640x640, batch (\d+), \d+ boxes an image",
        lambda batch, itemsize: work.yolov5_loss(int(batch), itemsize=itemsize),
    ),
    ("nms", r"suppression, batch (\d+), ([\w .]+)", _suppression(work.suppression)),
    ("nms", r"raw heads to detections, batch (\d+), ([\w .]+)", _suppression(work.yolov5_postprocess)),
    ("nms", r"decode, batch (\d+)", lambda batch, itemsize: work.yolov5_decode(int(batch), itemsize=itemsize)),
    ("nms", r"30,000 boxes, one class, (.+)", _one_class),
    (
        "nms",
        r"Ultralytics layout, batch (\d+), conf .25",  # of YOLOv5's anchors
        lambda batch, itemsize: work.ultralytics_postprocess(int(batch), work.yolov5_anchors(), itemsize=itemsize),
    ),
    (
        "nms",
        r"Ultralytics raw heads to detections, batch (\d+), conf .25",
        lambda batch, itemsize: work.ultralytics_postprocess(int(batch), itemsize=itemsize),
    ),
    (
        "masks",
        r"process_mask(?:_native)?, (\d+) masks of (\d+)x(\d+), .*, fp\d+",
        lambda n, height, width, itemsize: work.instance_masks(int(n), int(height), int(width), itemsize=itemsize),
    ),
    (
        "rtdetr",
        r"deformable attention, batch (\d+), (\d+) queries, fp\d+",
        lambda batch, queries, itemsize: work.deformable_attention(int(batch), int(queries), itemsize=itemsize),
    ),
    ("nms", r"scale_boxes, batch (\d+), (\d+) boxes", lambda batch, n, _: work.scale_boxes(int(batch) * int(n))),
    ("step", STEP, training_step),
    ("train", STEP, training_step),
)
# These cases of torch_fastdet have no formula, for these reasons.
WITHOUT = {
    ("multi_tensor", r"MuSGD step .+"): "its products depend on the weights' shapes: docs/kernels/newton_schulz.md",
    (
        "postprocess",
        r".*",
    ): "its work depends on what the trained model detects; bench_nms has the same operators on stated data",
    ("rtdetr_training", r".*"): "a whole training",
    ("detector", r".*"): "most of it is the network, which is not ours",
    ("loss", r"segmentation, .*"): "its work depends on the pixels of the boxes",
    ("nms", r"rotated boxes, .*"): "its work depends on how many boxes lie near each other",
    ("nms", r"Ultralytics layout, one image, .*"): "2.7 MB, which the CPU's caches may hold",
    (
        "train",
        r"yolov5\w-seg, batch \d+, segment/train\.py",
    ): "masks and prototypes, whose operations work.py does not count",
    ("train", r"yolov5n, batch \d+, train\.py at 128"): "a figure of the CPU, where the loader is part of the step",
    ("train", r"yolov5\w, batch \d+, train\.py's default options, .*"): "the CPU, which decodes, decides",
    ("train", r"yolov5\w-cls, batch \d+, classify/train\.py( at 64)?"): "the CPU, which decodes, decides",
    ("dataset", r"yolov5\w, batch \d+, train\.py, .*"): "files, host memory and decoding decide, too",
    (
        "jpeg",
        r".*",
    ): "chains of codes decide, each of which says where the next begins; its rows have the bytes of files and pixels",
    ("latency", r".*"): "most of it is the network, which is not ours",
    ("rtdetr", r"network in evaluation, .*"): "most of it is the network, which is not ours",
    ("rtdetr", r"assignment, .*"): "how long its searches are depends on the costs",
    (
        "rtdetr",
        r"loss, .*",
    ): "its rows have the bytes of predictions and gradients; its assignment depends on the costs",
    ("v8_loss", r".*"): "its rows have the bytes of the heads, which are its floor: docs/kernels/v8_loss.md",
    ("loader", r".*"): "the CPU, which decodes, decides",
    ("val", r".*"): "the CPU, which decodes and draws plots, decides",
    ("distributed", r".*"): "one GPU's time is its reference: benchmarks/bench_distributed.py",
    ("ultralytics", r".*"): "models of Ultralytics, whose operations work.py does not count",
}


def formula(benchmark: str, case: str, itemsize: int = 2) -> work.Work | None:
    """Return the least cost of a benchmark's case, or None."""
    for name, pattern, make in FORMULAS:
        if name == benchmark and (match := re.fullmatch(pattern, case)):
            return make(*match.groups(), itemsize)
    return None


@dataclass
class Placed:
    """Hold a case of torch_fastdet and its floor, in seconds; `variant` and `view` are those of its fastest."""

    family: str
    name: str
    work: work.Work
    floor_s: float
    measured_s: float | None = None
    variant: str = ""
    view: str = ""

    @property
    def share(self) -> float | None:
        return self.floor_s / self.measured_s if self.measured_s else None


def place(machine: work.Machine, results: dict[str, list[dict]]) -> list[Placed]:
    """List every case of torch_fastdet that has a formula, with the time of its fastest variant.

    If memory is the bound the view is cold (with a warm L2 an operator may beat memory), else the graph's replay, the
    device alone; it is the call if there is no such view.
    """
    placed = []
    for benchmark, rows in results.items():
        for case in dict.fromkeys(row["case"] for row in rows):
            ours = [row for row in rows if row["case"] == case and report.is_ours(row["variant"])]
            piece = formula(benchmark, case, 2 if ours and ours[0]["gpu"] else 4)
            if not ours or piece is None:
                continue
            views = ("cold", "graph", "call") if machine.bound(piece) == "memory" else ("graph", "call", "cold")
            view = next(view for view in views if any(row["view"] == view for row in ours))
            best = min((row for row in ours if row["view"] == view), key=lambda row: row["median_us"])
            placed.append(
                Placed(benchmark, case, piece, machine.floor_s(piece), best["median_us"] / 1e6, best["variant"], view)
            )
    for row in placed:
        if match := re.fullmatch(STEP, row.name):  # kernel after kernel, each at its own ceiling
            row.floor_s = work.yolov5_training_floor_s(match[1], int(match[2]), machine)
    return placed


def unmeasured_steps(machine: work.Machine, placed: list[Placed]) -> list[Placed]:
    """Return the models' training steps that no benchmark ran: under AMP on a GPU, in fp32 on a CPU."""
    itemsize = 2 if machine.is_gpu else 4
    there = {match[1] for row in placed if (match := re.fullmatch(STEP, row.name))}
    return [
        Placed("step", f"yolov5{model}, batch 16, loop", training_step(model, 16, itemsize),
               work.yolov5_training_floor_s(model, 16, machine, itemsize))
        for model in work.YOLOV5_MULTIPLES
        if model not in there
    ]  # fmt: skip


def ceilings(machine: work.Machine) -> str:
    text = (
        f"On {machine.name}, copies reach {machine.bytes_per_s / 1e9:,.0f} GB/s, and matrix products "
        f"{machine.flops_per_s['fp32'] / 1e12:.3g} TFLOP/s in fp32 and {machine.flops_per_s['fp16'] / 1e12:.3g} in "
        f"{shown('fp16', machine)}, which is {machine.ops_to_byte('fp32'):.1f} and {machine.ops_to_byte('fp16'):.0f} FLOP/B."
    )
    if machine.is_gpu:
        text += f" A kernel takes {machine.launch_s * 1e6:.2f} us at least."
    if machine.cached_bytes_per_s:
        sizes = (f"{rate / 1e9:,.0f} at {size / 1e6:.2g} MB" for size, rate in machine.cached_bytes_per_s.items())
        text += f" Copies that stay in the caches reach these GB/s: {', '.join(sizes)}."
    return text + "\n"


def table(machine: work.Machine, rows: list[Placed]) -> str:
    body = []
    for number, row in enumerate(rows, 1):
        measured = f"{row.measured_s * 1e6:,.1f} ({row.view})" if row.measured_s else "not measured"
        share = f"{100 * row.share:.0f}%" if row.share else "-"
        body.append([
            str(number), row.name, f"{row.work.bytes / 1e6:,.2f}", f"{row.work.flops / 1e6:,.1f}", f"{row.work.intensity:.2f}",
            machine.bound(row.work), f"{row.floor_s * 1e6:,.1f}", measured, row.variant or "-", share,
        ])  # fmt: skip
    header = ["", "case", "MB", "MFLOP", "FLOP/B", "bound", "floor us", "measured us", "variant", "of floor"]
    text = f"{ceilings(machine)}\n{report.table(header, body)}"
    if any(re.fullmatch(STEP, row.name) for row in rows):
        text += "\nA training step's floor is the sum of its kernels' floors; its bound is that of the sums of bytes and operations.\n"
    return text


TITLES = {
    "bbox_iou": "box pairs",
    "upsample": "upsample",
    "image": "images",
    "bn_act": "norm and activation",
    "multi_tensor": "optimizer",
    "loss": "loss",
    "nms": "post-processing",
    "masks": "masks",
    "rtdetr": "RT-DETR",
    "step": "training step",
    "train": "train.py",
}


def _label(axes: Any, labels: list[tuple[str, float, float, str]]) -> None:
    """Write (text, x, y, color) beside each point, where no other point or text is yet."""
    axes.figure.canvas.draw()  # places the axes
    points = 72 / axes.figure.dpi
    taken = [axes.transData.transform((x, y)) * points for _, x, y, _ in labels]
    for (text, x, y, color), (left, bottom) in zip(labels, taken[:]):
        offsets = [cmath.rect(radius, angle * math.pi / 4 + 0.4) for radius in range(10, 60, 8) for angle in range(8)]

        def room(offset: complex, left: float = left, bottom: float = bottom) -> float:
            return min(max(abs(left + offset.real - a) / 15, abs(bottom + offset.imag - b) / 11) for a, b in taken)

        offset = next((offset for offset in offsets if room(offset) >= 1), max(offsets, key=room))
        taken.append((left + offset.real, bottom + offset.imag))
        axes.annotate(text, (x, y), (offset.real, offset.imag), textcoords="offset points", ha="center", va="center",
                      fontsize=8, color=color)  # fmt: skip


def plot(machine: work.Machine, rows: list[Placed], path: Path) -> None:
    """Plot the roofline left and the share of the floor of each case right; both number cases alike."""
    if not (plt := report.pyplot()):
        return
    rows = [row for row in rows if row.measured_s]
    numbers = {id(row): number for number, row in enumerate(rows, 1)}
    present = {row.family for row in rows}  # matplotlib has ten colours
    colors = {family: f"C{index}" for index, family in enumerate(family for family in TITLES if family in present)}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(17, max(7.0, 0.8 + 0.23 * len(rows))), width_ratios=(1.1, 1), layout="constrained"
    )
    with_flops = [row for row in rows if row.work.flops]
    low = min((row.work.intensity for row in with_flops), default=0.1) / 3
    high = max(3 * machine.ops_to_byte("fp16"), *(row.work.intensity * 3 for row in with_flops)) if with_flops else 1e3
    for unit, style in (("fp16", "-"), ("fp32", "--")):
        ridge = machine.ops_to_byte(unit)
        xs = [low, ridge, high]
        name = shown(unit, machine)
        left.plot(
            xs,
            [min(machine.flops_per_s[unit], x * machine.bytes_per_s) / 1e12 for x in xs],
            style,
            color="0.35",
            label=f"ceiling, {name}: {machine.flops_per_s[unit] / 1e12:.3g} TFLOP/s from {ridge:.3g} FLOP/B",
        )
    top = machine.flops_per_s["fp32"]
    label: str | None = "ceilings of what fits into the caches"
    for rate in {machine.rate(2 * size) for size in machine.cached_bytes_per_s} - {machine.bytes_per_s}:
        left.plot([low, top / rate], [low * rate / 1e12, top / 1e12], ":", color="0.35", label=label)
        label = None
    labels = []
    for family, title in TITLES.items():
        group = [row for row in with_flops if row.family == family]
        if not group:
            continue
        xs = [row.work.intensity for row in group]
        ys = [row.work.flops / (row.measured_s or math.inf) / 1e12 for row in group]
        left.plot(xs, ys, "o", color=colors[family], markersize=5, label=title)
        labels += [(str(numbers[id(row)]), x, y, colors[family]) for row, x, y in zip(group, xs, ys)]
    left.set(
        xscale="log", yscale="log", xlim=(low, high), xlabel="operations a byte", ylabel="TFLOP/s", title=machine.name
    )
    left.grid(alpha=0.3, which="both")
    left.legend(fontsize=9, loc="lower right")

    for row in rows:
        number, share = numbers[id(row)], 100 * (row.share or 0)
        right.barh(number, share, color=colors[row.family], height=0.7)
        right.text(share + 1, number, f"{share:.0f}%", va="center", fontsize=7)
    right.set_yticks(list(numbers.values()), [f"{row.name}  {numbers[id(row)]}" for row in rows], fontsize=7)
    right.set(
        xlim=(0, 110), ylim=(len(rows) + 0.7, 0.3), xlabel="% of the floor that the formula and the ceilings allow"
    )
    right.set_title("copies have no operations: they are on this side alone", fontsize=9)
    _label(left, labels)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rounded(value: Any) -> Any:
    """Round numbers to nine digits, because the last ones of Python's sum() vary between versions."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def derive(machine: work.Machine, folder: Path) -> tuple[list[Placed], str]:
    """Return every case of a results folder with its floor, and the text that shows them."""
    benchmarks = report.load_to(folder)
    rows = place(machine, benchmarks)
    rows += unmeasured_steps(machine, rows)
    return rows, table(machine, rows) + (f"\n{report.provenance(benchmarks)}" if benchmarks else "")


def plain(machine: work.Machine, rows: list[Placed]) -> dict[str, Any]:
    """Return what roofline.json holds."""
    found = [{**row.__dict__, "work": row.work.__dict__, "share": row.share} for row in rows]
    return {"machine": machine.__dict__, "rows": _rounded(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_place(parser, "--results", "folder with the benchmarks' rows; the roofline is written there too")
    parser.add_argument("--again", action="store_true", help="text and plot of the ceilings that roofline.json holds")
    parser.add_argument(
        "--leave-pages", action="store_true", help="tables.md and pages stay: make bench makes them last"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    folder = arguments.results or report.newest_of(harness.environment(device))
    if arguments.again and not (folder / "roofline.json").exists():
        parser.error(f"--again came, but {folder} has no roofline.json: a folder that has one is expected as --results")
    machine = load_machine(folder) if arguments.again else measure_machine(device)
    rows, text = derive(machine, folder)
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "roofline.md").write_text(text)
    (folder / "roofline.json").write_text(report.as_json(plain(machine, rows)))
    plot(machine, rows, folder / "roofline.png")
    trouble = None if arguments.leave_pages else report.bring_pages(folder)
    if trouble:
        print(trouble)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
