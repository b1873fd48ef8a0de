"""``python -m benchmarks`` (make bench): every benchmark on this machine, into one folder, then the tables made from it.

--device cpu|cuda   default: the GPU where there is one
--only NAME ...     some benchmarks: bbox_iou, upsample, ...
--out FOLDER        default: benchmarks/results/<machine>-<date>
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import harness, report

HERE = Path(__file__).resolve().parent


def main() -> int:
    names = [path.stem.removeprefix("bench_") for path in sorted(HERE.glob("bench_*.py"))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.out or harness.results_folder(harness.environment(torch.device(arguments.device)))
    failed = []
    for name in arguments.only:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--device", arguments.device, "--out", str(folder)]
        status = subprocess.run(command, cwd=HERE.parent).returncode
        print(f"== {name}: exit status {status}, {time.monotonic() - started:.0f} s", flush=True)
        failed += [name] * (status != 0)
    if (folder / "roofline.json").exists() or arguments.device == "cuda":
        command = [sys.executable, "-m", "benchmarks.roofline", "--results", str(folder)]
        if subprocess.run(command, cwd=HERE.parent).returncode != 0:
            failed.append("roofline")
    (folder / "tables.md").write_text(report.tables(folder))
    print(f"wrote {folder / 'tables.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
