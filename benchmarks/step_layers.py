"""Tabulate and plot where a training step's time goes along YOLOv5s, layer by layer, for docs/kernels/step.md.

    python -m benchmarks.step_layers [--out FILE]

This measures nothing. Convolutions have the times of step_profile.md's table of layouts (float16, NHWC, batch 16), the
stem by cuDNN on squares. Floors are benchmarks/work.py at benchmarks/roofline.py's ceilings. BatchNorm and SiLU take
eight passes at the copy rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks import work

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200-2026-11-26"
PROFILE, CEILINGS, PLOT = (
    RESULTS / "step_profile.md",
    RESULTS / "roofline.json",
    ROOT / "docs" / "gpu-step-layers.png",
)
BATCH, IMAGE = 16, 640
#: These are yolov5s' layers in order, with their numbers of convolutions.
LAYERS = (
    ("0 Conv 6x6, the stem", 1),
    ("1 Conv", 1),
    ("2 C3", 5),
    ("3 Conv", 1),
    ("4 C3, 2 bottlenecks", 7),
    ("5 Conv", 1),
    ("6 C3, 3 bottlenecks", 9),
    ("7 Conv", 1),
    ("8 C3", 5),
    ("9 SPPF", 2),
    ("10 Conv", 1),
    ("13 C3", 5),
    ("14 Conv", 1),
    ("17 C3", 5),
    ("18 Conv", 1),
    ("20 C3", 5),
    ("21 Conv", 1),
    ("23 C3", 5),
    ("24 Detect", 3),
)


class Layer(NamedTuple):
    name: str
    size: int  # of the output's side; of the largest for Detect
    measured: float  # ms of its convolutions
    memory: float  # ms of their bytes at the copy rate,
    arithmetic: float  # and of their operations at the matrix units' rate
    floor: float  # each convolution's larger one
    passes: float  # ms of eight passes over what BatchNorm and activation read and write


def measured_times() -> dict[tuple[int, int, int, int, int], float]:
    """Map (inputs, outputs, kernel, stride, side of the output) to ms of a convolution in float16 and NHWC."""
    found = {}
    row = re.compile(r"\| \((\d+), (\d+), (\d+), \d+\) to (\d+), (\d)x\d(?: stride (\d))? \|(.*)\|")
    for line in PROFILE.read_text().splitlines():
        if match := row.match(line):
            _, inputs, side, outputs, kernel = map(int, match.groups()[:5])
            stride = int(match[6] or 1)
            found[inputs, outputs, kernel, stride, side // stride] = float(match[7].split("|")[3].split("/")[1])
    stem = re.search(r"\| 6x6, 32 outputs \| 16 \|.*\| ([\d.]+) \+ ([\d.]+) ms \|", PROFILE.read_text())
    assert stem is not None
    found[3, 32, 6, 2, IMAGE // 2] = float(stem[1]) + float(stem[2])  # on squares
    return found


def layers(machine: work.Machine) -> list[Layer]:
    times = measured_times()
    convolutions = iter(work.yolov5_convolutions("s", IMAGE))
    result = []
    for name, count in LAYERS:
        parts = list(itertools.islice(convolutions, count))
        works = [(part, part.forward(BATCH)) for part in parts]
        # Count forward and the gradients of input and weights; images have none.
        passes = [(w, 2 if part.inputs == 3 else 3) for part, w in works]
        elements = sum(part.output_elements(BATCH) for part in parts if part.activated)
        result.append(
            Layer(
                name,
                max(part.size for part in parts),
                sum(times[part.inputs, part.outputs, part.kernel, part.stride, part.size] for part in parts),
                1e3 * sum(n * machine.times(w)["memory"] for w, n in passes),
                1e3 * sum(n * machine.times(w)["arithmetic"] for w, n in passes),
                1e3 * sum(n * machine.floor_s(w) for w, n in passes),
                1e3 * work.batch_norm_silu(elements).bytes / machine.bytes_per_s,
            )
        )
    assert next(convolutions, None) is None
    return result


def table(found: list[Layer]) -> str:
    lines = [
        "| layer | output | convolutions alone | their floor | bytes / operations | BatchNorm + SiLU, eight passes |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {x.name} | {x.size}x{x.size} | {x.measured:.3f} ms | {x.floor:.3f} ms | {x.memory:.3f} / {x.arithmetic:.3f} ms | "
        f"{x.passes:.3f} ms |"
        for x in found
    ]
    sums = [sum(getattr(x, field) for x in found) for field in ("measured", "floor", "memory", "arithmetic", "passes")]
    lines.append("| **all** | | **{:.2f} ms** | **{:.2f} ms** | {:.2f} / {:.2f} ms | **{:.2f} ms** |".format(*sums))
    return "\n".join(lines)


def draw(found: list[Layer], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.6), layout="constrained")
    names = [f"{x.name} ({x.size})" for x in found]
    rest = [max(0.0, x.measured - x.floor) for x in found]
    floors, passes = [x.floor for x in found], [x.passes for x in found]
    axes.barh(names, floors, color="tab:blue", label="convolutions: floor")
    axes.barh(names, rest, left=floors, color="lightsteelblue", label="convolutions: above the floor, each alone")
    measured = [a + b for a, b in zip(floors, rest)]
    axes.barh(names, passes, left=measured, color="tab:orange", label="BatchNorm + SiLU: eight passes at the copy rate")
    axes.invert_yaxis()
    axes.set_xlabel("ms of a training step")
    axes.set_title("yolov5s, 640x640, batch 16, float16, NVIDIA H200; in brackets the side of the output")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLOT, help="the plot; default: %(default)s")
    path = parser.parse_args().out
    machine = work.Machine(**json.loads(CEILINGS.read_text())["machine"])
    found = layers(machine)
    print(table(found))
    draw(found, path)


if __name__ == "__main__":
    main()
