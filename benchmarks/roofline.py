"""Roofline of this machine: its ceilings, and how near to them our operators and YOLOv5's training step run.

``python -m benchmarks.roofline`` measures the copy rate and the fp32 and fp16 matrix rates, so the ops:byte ratios; derives
bytes, operations, intensity, bound and floor of each operator and of the training step of YOLOv5 n, s, m, l and x from the
formulas in benchmarks/work.py; takes the measured time of each from the rows that the other benchmarks wrote into --results;
and writes roofline.json, roofline.md and roofline.png there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import harness, report, work


def _median_s(function: Callable[[], None], device: torch.device, repetitions: int = 10) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product of random data, large enough to fill the device."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return 2 * size**3 / _median_s(lambda: torch.mm(a, b), device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read plus write."""
    if device.type == "cuda":
        return harness.copy_rate() * 1e9
    source = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_s(lambda: target.copy_(source), device)


def launch_time(device: torch.device) -> float:
    """Seconds from one small kernel to the next inside a CUDA graph; 0 on the CPU."""
    if device.type == "cpu":
        return 0.0
    x = torch.randn(32, device=device)
    count = 200

    def kernels() -> None:
        for _ in range(count):
            x.mul_(1.0001)

    return _median_s(harness.graph(kernels), device) / count


def measure_machine(device: torch.device) -> work.Machine:
    environment = harness.environment(device)
    half = matrix_rate(torch.float16 if device.type == "cuda" else torch.bfloat16, device)
    rates = {"fp32": matrix_rate(torch.float32, device), "fp16": half}
    return work.Machine(environment["gpu"] or environment["cpu"], copy_rate(device), rates, launch_time(device))


# What a benchmark's case does, as a formula: (benchmark, text in the case's name) -> work.
FORMULAS: dict[tuple[str, str], work.Work] = {
    ("bbox_iou", "n=3,000"): work.iou_loss(3_000),
    ("bbox_iou", "n=300,000"): work.iou_loss(300_000),
    ("bbox_iou", "n=3,000,000"): work.iou_loss(3_000_000),
}


def rows_of(folder: Path) -> list[dict]:
    """Our measured rows that carry the bytes they must move, or have a formula, with their floors' ingredients."""
    found = []
    for benchmark, rows in report.load(folder).items():
        for row in rows:
            if not row["variant"].startswith(report.OURS):
                continue
            formula = next(
                (f for (name, text), f in FORMULAS.items() if name == benchmark and text in row["case"]), None
            )
            if formula is None and row["bytes"]:
                formula = work.Work(0, row["bytes"])
            if formula is not None:
                found.append({"name": f"{row['case']} ({row['variant']})", "view": row["view"], "work": formula,
                              "measured_s": row["median_us"] / 1e6})  # fmt: skip
    order = {"graph": 0, "call": 1, "cold": 2}
    best: dict[str, dict] = {}
    for row in sorted(found, key=lambda row: order[row["view"]]):
        best.setdefault(row["name"], row)  # the device alone, where it was measured
    return list(best.values())


def training_rows(machine: work.Machine, folder: Path) -> list[dict]:
    """The training step of each model: floor of its kernels, and the measured TrainStep where bench_step wrote one."""
    measured = {
        row["case"]: row for row in report.load(folder).get("step", []) if row["variant"].startswith(report.OURS)
    }
    rows = []
    for model, batch in (("n", 16), ("s", 16), ("s", 64), ("m", 32), ("l", 16), ("x", 16)):
        works = [piece for pieces in work.yolov5_training_pieces(model, batch).values() for piece in pieces]
        total = work.Work(sum(piece.flops for piece in works), sum(piece.bytes for piece in works), "fp16")
        row = next((row for case, row in measured.items() if f"yolov5{model} batch {batch}" in case), None)
        rows.append({"name": f"training step, yolov5{model} batch {batch}", "view": row["view"] if row else "-", "work": total,
                     "floor_s": work.yolov5_training_floor_s(model, batch, machine),
                     "measured_s": row["median_us"] / 1e6 if row else None})  # fmt: skip
    return rows


def table(machine: work.Machine, rows: list[dict]) -> str:
    body = []
    for row in rows:
        piece, floor, measured = row["work"], row["floor_s"], row["measured_s"]
        body.append([
            row["name"], f"{piece.bytes / 1e6:,.2f}", f"{piece.flops / 1e6:,.1f}", f"{piece.intensity:.2f}",
            machine.bound(piece), f"{floor * 1e6:,.1f}",
            f"{measured * 1e6:,.1f} ({row['view']})" if measured else "not measured",
            f"{100 * floor / measured:.0f}%" if measured else "-",
        ])  # fmt: skip
    header = ["work", "MB", "MFLOP", "FLOP/B", "bound", "floor us", "measured us", "of floor"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    ceilings = (
        f"{machine.name}: copy {machine.bytes_per_s / 1e12:.3g} TB/s, fp32 {machine.flops_per_s['fp32'] / 1e12:.3g} and fp16 "
        f"{machine.flops_per_s['fp16'] / 1e12:.3g} TFLOP/s, so {machine.ops_to_byte('fp32'):.1f} and "
        f"{machine.ops_to_byte('fp16'):.0f} FLOP/B; a kernel takes {machine.launch_s * 1e6:.2f} us at the least.\n"
    )
    return ceilings + "\n" + "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in body]) + "\n"


def plot(machine: work.Machine, rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    intensities = [10 ** (exponent / 10) for exponent in range(-20, 40)]
    for unit, style in (("fp32", "--"), ("fp16", "-")):
        ceiling = [min(machine.flops_per_s[unit], x * machine.bytes_per_s) / 1e12 for x in intensities]
        axes.plot(intensities, ceiling, style, color="gray", label=f"ceiling, {unit}")
    for row in rows:
        if row["measured_s"] and row["work"].flops:
            axes.plot(row["work"].intensity, row["work"].flops / row["measured_s"] / 1e12, "o", markersize=5)
            axes.annotate(
                row["name"][:40], (row["work"].intensity, row["work"].flops / row["measured_s"] / 1e12), fontsize=5
            )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=machine.name)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--results", type=Path, help="folder with the benchmarks' rows; the roofline is written there too"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    folder = arguments.results or harness.results_folder(harness.environment(device))
    folder.mkdir(parents=True, exist_ok=True)
    machine = measure_machine(device)
    rows = rows_of(folder)
    for row in rows:
        row["floor_s"] = machine.floor_s(row["work"])
    rows += training_rows(machine, folder)
    text = table(machine, rows)
    print(text)
    (folder / "roofline.md").write_text(text)
    plain = [{**row, "work": row["work"].__dict__} for row in rows]
    (folder / "roofline.json").write_text(json.dumps({"machine": machine.__dict__, "rows": plain}, indent=1) + "\n")
    plot(machine, rows, folder / "roofline.png")


if __name__ == "__main__":
    main()
