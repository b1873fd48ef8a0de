"""Programs that try many cases, such as ``python -m tests.fuzz.operators``, and tests that run some of them."""

import argparse
import faulthandler
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="gets each case before it runs")
    return parser


def problems(options: argparse.Namespace, case: Callable[[int, random.Random], str | None]) -> int:
    """Return the number of failing cases, and print what ``case`` returns for each."""
    faulthandler.enable()
    torch.set_num_threads(1)
    found = 0
    for number in range(options.count):
        wrong = case(number, random.Random(f"{options.seed} {number}"))
        if wrong is not None:
            found += 1
            print(f"case {number}: {wrong}", flush=True)
    return found


def passes(program: str, count: int, folder: Path) -> list[int]:
    """Run tests/fuzz/<program>.py, which must find nothing wrong. Return the numbers of its last line."""
    log = folder / "cases"
    command = [sys.executable, "-m", f"tests.fuzz.{program}", "--count", str(count), "--log", str(log)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert result.returncode == 0, (result.stdout[-3000:], result.stderr[-2000:], last)
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", result.stdout.splitlines()[-1])]
