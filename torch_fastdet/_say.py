"""The one way in which the package speaks: a line that begins with its name."""

from __future__ import annotations

import os
from typing import TextIO


def say(line: str, file: TextIO | None = None) -> None:
    """Print one line, to stdout unless ``file`` is given, and once in a distributed run."""
    if os.environ.get("RANK", "-1") in ("-1", "0"):
        print(f"torch_fastdet: {line}", file=file, flush=True)
