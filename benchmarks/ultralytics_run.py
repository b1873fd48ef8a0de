"""Run Ultralytics' own command as torch_fastdet.ultralytics starts it, with a clock.

    python -m benchmarks.ultralytics_run TIMES.json [switches] train model=yolov8s.yaml data=... epochs=3

For each epoch TIMES.json gets when each iteration ended (seconds), how long each validation's pass over the images
took, and the most memory that torch held. The clock consists of some of Ultralytics' default callbacks; nothing else
differs from the command, but that YOLO-World and YOLOE get random features of texts. On several GPUs the trainer passes
its callbacks to the processes that it starts, and the first of them writes.
"""

from __future__ import annotations

import sys
import zlib
from types import ModuleType

import torch
import torch.nn.functional as F


class Clock:
    """Time epochs. Ultralytics pickles callbacks by value, as this is ``__main__``, so they import what they need."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.ends: dict[int, list[float]] = {}
        self.passes: list[float] = []

    def note(self, trainer: object) -> None:
        import time

        self.ends.setdefault(trainer.epoch, []).append(time.perf_counter())  # type: ignore[attr-defined]

    def begin_pass(self, _: object) -> None:
        import time

        self.began = time.perf_counter()

    def end_pass(self, validator: object) -> None:
        import time

        self.passes.append(time.perf_counter() - self.began)
        self.write(validator)  # a validation alone has no other end

    def write(self, _: object) -> None:
        import json
        import os
        from pathlib import Path

        import torch

        if os.environ.get("RANK", "0") not in ("0", "-1"):
            return
        peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        found = {"ends": list(self.ends.values()), "passes": self.passes, "peak_mib": peak / 2**20}
        Path(self.file).write_text(json.dumps(found))


class RandomTexts:
    """Replace the model of texts that trainers of YOLO-World and YOLOE download. A text always has the same random features."""

    def __init__(self, _: str, device: torch.device | str | None = None) -> None:
        self.device = device

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([zlib.crc32(text.encode()) for text in texts], device=self.device)

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        features = [torch.randn(512, generator=torch.Generator().manual_seed(token)) for token in tokens.tolist()]
        return F.normalize(torch.stack(features), dim=1).to(tokens.device)


def without_downloads() -> None:
    module = ModuleType("ultralytics.nn.text_model")
    module.build_text_model = RandomTexts  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def main() -> None:
    file, *words = sys.argv[1:]
    from ultralytics.utils import callbacks

    from torch_fastdet.ultralytics.launcher import main as launch

    without_downloads()
    clock = Clock(file)
    callbacks.default_callbacks["on_train_batch_end"].append(clock.note)
    callbacks.default_callbacks["on_train_end"].append(clock.write)
    callbacks.default_callbacks["on_val_start"].append(clock.begin_pass)
    callbacks.default_callbacks["on_val_end"].append(clock.end_pass)
    launch(words)


if __name__ == "__main__":
    main()
