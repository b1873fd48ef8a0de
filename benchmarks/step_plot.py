"""Plot the kernels of a training step from a profile's table, for docs/kernels/step.md.

    python -m benchmarks.step_plot [--out FILE]

The table in the results' step_profile.md is of one profile by hand (torch.profiler over graph replays).
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILE, PLOT = ROOT / "benchmarks/results/h200-2026-11-26/step_profile.md", ROOT / "docs/gpu-step.png"
SECTION = "## Kernels by kind"


def rows(page: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return the table's columns, and each kind of kernel's milliseconds in each, up to the sum."""
    lines = [line for line in page.split(SECTION)[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kinds: dict[str, list[float]] = {}
    for name, *values in cells[2:]:
        if name.startswith("**"):
            break
        kinds[name.split(";")[0].split(" (")[0]] = [float(value.removesuffix(" ms")) for value in values]
    return cells[0][1:], kinds


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns, kinds = rows(PROFILE.read_text())
    figure, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    left = [0.0] * len(columns)
    colors = pyplot.get_cmap("tab20")(range(20))
    for (name, values), color in zip(kinds.items(), colors):
        axes.barh(columns, values, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, values)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f} ms", va="center")
    axes.invert_yaxis()
    axes.set_xlabel("GPU time of a step, ms")
    axes.set_title("yolov5s, 640x640, float16, NVIDIA H200")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(right=1.1 * max(left))
    axes.legend(loc="lower right", ncols=2, fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLOT, help="default: %(default)s")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
