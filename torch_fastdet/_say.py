"""The one way in which the package speaks: a line that begins with its name."""

from __future__ import annotations

import os
from typing import TextIO


def rank() -> str:
    """This process's rank in a distributed run, as torchrun tells it; "" without one."""
    value = os.environ.get("RANK", "-1")
    return "" if value == "-1" else value


def say(line: str, file: TextIO | None = None, every_rank: bool = False) -> None:
    """Print one line, to stdout unless ``file`` is given; in a distributed run on rank 0 alone, unless ``every_rank``."""
    if every_rank or rank() in ("", "0"):
        print(f"torch_fastdet: {line}", file=file, flush=True)
