"""Ultralytics' own command, as torch_fastdet.ultralytics starts it, with a clock beside it.

    python -m benchmarks.ultralytics_run TIMES.json [switches] train model=yolov8s.yaml data=... epochs=3

TIMES.json gets, for each epoch, when each iteration ended (seconds), and the most memory that torch held. The clock is one of
the trainer's default callbacks, which are Ultralytics' own way of looking on; nothing else differs from the command.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    file, *words = sys.argv[1:]
    import torch
    from ultralytics.utils import callbacks

    from torch_fastdet.ultralytics.launcher import main as launch

    ends: dict[int, list[float]] = {}

    def note(trainer: Any) -> None:
        ends.setdefault(trainer.epoch, []).append(time.perf_counter())

    callbacks.default_callbacks["on_train_batch_end"].append(note)
    launch(words)
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    Path(file).write_text(json.dumps({"ends": list(ends.values()), "peak_mib": peak / 2**20}))


if __name__ == "__main__":
    main()
