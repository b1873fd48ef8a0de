"""Run trainings one after the other in one process, with all switches, and print what the process holds after each.

On the CPU tests/graphs/fake_gpu.py stands in for graphs.
"""

import argparse
import gc
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from ultralytics import YOLO

from tests.graphs import fake_gpu
from tests.images.leftovers import open_memories
from torch_fastdet import memory
from torch_fastdet.patching import switch
from torch_fastdet.switches.cuda_graph import ultralytics as training
from torch_fastdet.ultralytics import patch, unpatch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("count", type=int)
parser.add_argument("--device", default="cpu")
parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no training begins")
parser.add_argument("--stock", action="store_true", help="without our switches")
options = parser.parse_args()
SWITCHES = ("cuda_graph", "channels_last", "multi_tensor_optimizer", "loss_optim", "loader_optim", "bn_act_optim")


def held() -> dict[str, int]:
    """Return the counts that a training must not change. Threads of deleted loaders take a moment to end."""
    gc.collect()
    end = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.05)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "gpu_kib": torch.cuda.memory_allocated() >> 10 if options.device != "cpu" else 0,
        "files": len(os.listdir("/proc/self/fd")),
        "memories": open_memories(),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "owners": len(memory.owners()),
    }


def train() -> None:
    YOLO("yolov8n.yaml", task="detect").train(
        data=options.data, project=options.project, name="run", exist_ok=True, device=options.device, seed=0,
        imgsz=64, epochs=1, batch=8, workers=1, optimizer="SGD", amp=False, val=False, plots=False, verbose=False, save=False,
    )  # fmt: skip


found, begin = [], time.monotonic()
with pytest.MonkeyPatch.context() as monkeypatch:
    if options.device == "cpu":
        fake_gpu.install(monkeypatch)
        monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
        monkeypatch.setattr(training, "obstacle_in_training", lambda *_: None)
    for number in range(options.count):
        if time.monotonic() - begin > options.seconds:
            break
        if not options.stock:
            patch(**dict.fromkeys(SWITCHES, True))
        try:
            train()
        finally:
            unpatch()
        found.append(held())
        print(number, found[-1], flush=True)
print(json.dumps({"found": found}))
