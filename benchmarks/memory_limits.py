"""Find the largest batch of a YOLOv5 step that fits into 8, 12, 24 and 80 GB, by trying it on a GPU.

    python -m benchmarks.memory_limits [--size s] [--cards 8 12 24 80] [--out FOLDER]

PyTorch's allocator gets what such a card leaves to it (benchmarks/report.py: APART_MIB less). A batch fits if six steps
run. Batches grow by a quarter of the card's GB. docs/machine.md shows the newest memory_limits.json in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch

from benchmarks.bench_step import VARIANTS, fused_blocks
from benchmarks.harness import OURS, add_place, environment
from benchmarks.report import APART_MIB, CARDS, as_json, results_folder
from torch_fastdet.memory import is_out_of_memory

STEPS = 6
MOST_A_GB = 12  # images of a batch: more than any variant of the smallest measured size fits


def trains(variant: str, size: str, batch: int) -> bool:
    try:
        with fused_blocks(variant.startswith(OURS)):
            step = VARIANTS[variant](size, batch)
            for _ in range(STEPS):
                step()
        torch.cuda.synchronize()
        return True
    except RuntimeError as error:
        if is_out_of_memory(error):  # cuDNN and cuBLAS have words of their own for it
            return False
        raise


def largest(fits: Callable[[int], bool], width: int, most: int) -> int:
    """Return the largest multiple of ``width`` up to ``most`` that fits, found by halving, or 0."""
    low, high = 0, most // width
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * width) else (low, middle - 1)
    return low * width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="s")
    parser.add_argument("--cards", type=int, nargs="*", default=CARDS)
    add_place(parser, "--out", "folder of memory_limits.json (default: benchmarks/results/<machine>-<date>)")
    options = parser.parse_args()
    if options.device == "cpu" or not torch.cuda.is_available():
        print("nothing to do: memory is limited on a GPU only")
        return
    about = environment(torch.device("cuda"))
    total = torch.cuda.get_device_properties(0).total_memory
    file = (options.out or results_folder(about)) / "memory_limits.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for card in options.cards:
        torch.cuda.set_per_process_memory_fraction(min(1.0, ((card << 10) - APART_MIB) * 2**20 / total))
        for variant in ("stock", f"{OURS} TrainStep"):

            def fits(batch: int, variant: str = variant) -> bool:
                gc.collect()  # models hold themselves by cycles
                torch.cuda.empty_cache()
                return trains(variant, options.size, batch)

            batch = largest(fits, card // 4, MOST_A_GB * card)
            print(f"{card} GB, yolov5{options.size}, {variant}: {batch}", flush=True)
            rows.append({"size": options.size, "variant": variant, "card": card, "batch": batch, **about})
            file.write_text(as_json(rows))


if __name__ == "__main__":
    main()
