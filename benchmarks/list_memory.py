"""Memory that YOLO(...).predict of a long list of file names takes, beside stock's of a folder, both with stream=True.

    python -m benchmarks.list_memory [--names 100000] [--device cpu|cuda]

Each row is a process of its own: the most memory that it and PyTorch on its GPU held. The model and the files are those of bench_predict.
Stock decodes a list before its first batch, and takes it as one batch, so its list is short.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.bench_jpeg import photograph
from benchmarks.bench_predict import BATCH, DIFFERENT, FILES, LISTED, folder, model, options
from benchmarks.harness import OURS, add_place, at_least, missing


def measure(variant: str, source: str, count: int, device: torch.device) -> dict[str, int]:
    """Predict, and return MiB of this process."""
    from torch_fastdet import ultralytics as drop_in

    names = folder(FILES if device.type == "cuda" else DIFFERENT)
    images = [photograph(number) for number in range(BATCH)]
    with contextlib.redirect_stdout(io.StringIO()):
        chosen = options(device, images)
    if variant == OURS:
        drop_in.patch()
    given = str(Path(names[0]).parent) if source == "a folder" else (names * (count // len(names) + 1))[:count]
    results = model(device, images).predict(given, batch=BATCH, stream=True, **chosen)
    assert sum(1 for _ in results) == count
    on_gpu = torch.cuda.max_memory_reserved() >> 20 if device.type == "cuda" else 0
    return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "gpu": on_gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=at_least(1), default=100_000, help="of torch_fastdet's list (default: 100000)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    add_place(parser, "--out", argparse.SUPPRESS)
    chosen = parser.parse_args()
    if reason := missing("predict"):
        print(f"nothing to do: {reason}")
        return
    if chosen.measure:
        variant, source, count = chosen.measure
        print(json.dumps(measure(variant, source, int(count), torch.device(chosen.device))))
        return
    files = len(folder(FILES if chosen.device == "cuda" else DIFFERENT))
    print(f"{'':44} {'host, MiB':>10} {'GPU, MiB':>10}")
    for variant, source, count in (
        ("stock", "a folder", files),
        (OURS, "a folder", files),
        ("stock", "a list", min(files, LISTED)),
        (OURS, "a list", min(files, LISTED)),
        (OURS, "a list", chosen.names),
    ):
        command = [sys.executable, "-m", "benchmarks.list_memory", "--device", chosen.device]
        command += ["--measure", variant, source, str(count)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(run.stdout.splitlines()[-1])
        print(f"{f'{variant}, {source} of {count:,}':44} {found['host']:>10,} {found['gpu']:>10,}", flush=True)


if __name__ == "__main__":
    main()
