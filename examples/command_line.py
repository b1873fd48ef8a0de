"""Share what the examples' command lines need: arguments that are checked before anything runs, and one-line errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

import torch_fastdet


class Unusable(ValueError):
    """Say in one sentence why something that the user gave cannot be used."""


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run an example and end with its exit status, or with 2 and one sentence if the user can fix the problem.

    Other exceptions are errors of the program and keep their traceback.
    """
    try:
        sys.exit(main())
    except (OSError, ImportError, Unusable) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def say(line: str) -> None:
    """Print a line that may hold file names that are not UTF-8."""
    print(line.encode(errors="backslashreplace").decode(), flush=True)


def brief(error: Exception) -> str:
    """Return the first sentence of a PyTorch error, whose further advice does not fit here."""
    return " ".join(str(error).split()).split(". ")[0]


def existing(name: str) -> str:
    """Return a command line's argument that names an existing file or folder."""
    if not Path(name).exists():
        raise argparse.ArgumentTypeError(f"there is no {name}")
    return name


def folder(name: str) -> Path:
    """Return a command line's folder to write into, which exists or can be made."""
    path = Path(name)
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is a file, but a folder is expected")
    return path


def positive(text: str) -> int:
    """Return a command line's number of things, which is at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is given, but a whole number, 1 or more, is expected")
    return int(text)


def devices() -> list[str]:
    """Return what --device can name: the CPU, and GPUs that both PyTorch and torch_fastdet can use."""
    if not torch.cuda.is_available() or torch_fastdet.build_info()["cuda"] is None:
        return ["cpu"]
    return ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def usable_device(name: str) -> str:
    """Return a command line's device, which is usable here."""
    if name not in devices():
        raise argparse.ArgumentTypeError(f"{name} cannot be used here, only {', '.join(devices())}")
    return name
