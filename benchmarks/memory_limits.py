"""The largest batch of a YOLOv5 step that fits into 8, 12 and 24 GB, tried and not computed. GPU only.

    python -m benchmarks.memory_limits [--size s] [--cards 8 12 24]

PyTorch's allocator is limited to what such a card leaves to it (benchmarks/report.py: APART_MIB less). A batch fits if six steps run.
Batches are tried in steps of 4 from below what the table of docs/machine.md computes. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch

from benchmarks.bench_step import VARIANTS, fused_blocks
from benchmarks.harness import OURS
from benchmarks.report import APART_MIB

STEPS, WIDTH = 6, 4


def fits(make: Callable[[str, int], Callable[[], object]], size: str, batch: int) -> bool:
    try:
        step = make(size, batch)
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False


def freed() -> None:
    gc.collect()  # models hold themselves by cycles
    torch.cuda.empty_cache()


def largest(variant: str, size: str, low: int, high: int) -> int:
    """Between two batches, by halving; 0 if not even the smaller one fits."""
    best = 0
    while low <= high:
        middle = (low + high) // 2 // WIDTH * WIDTH
        with fused_blocks(variant.startswith(OURS)):
            fit = fits(VARIANTS[variant], size, middle)
        freed()
        if fit:
            best, low = middle, middle + WIDTH
        else:
            high = middle - WIDTH
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="s")
    parser.add_argument("--cards", type=int, nargs="*", default=[8, 12, 24])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing to do: memory is limited on a GPU only")
        return
    total = torch.cuda.get_device_properties(0).total_memory
    print(f"| yolov5{options.size} at 640 pixels | {' | '.join(f'{card} GB' for card in options.cards)} |")
    print("|---|" + "---|" * len(options.cards))
    for variant in ("stock", f"{OURS} TrainStep"):
        found = []
        for card in options.cards:
            torch.cuda.set_per_process_memory_fraction(((card << 10) - APART_MIB) * 2**20 / total)
            found.append(largest(variant, options.size, 2 * card, 12 * card))
        print(f"| {variant} | {' | '.join(map(str, found))} |", flush=True)


if __name__ == "__main__":
    main()
