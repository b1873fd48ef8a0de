"""Time fused networks alone in half precision and a CUDA graph: yolov8s and yolo26s, stock and with bn_act_optim.

    python -m benchmarks.bench_evaluation [--out FOLDER]

It needs a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from benchmarks import harness
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.rewrites.all_rewrites import fewer_copies

MODELS = ("yolov8s", "yolo26s")


def measure(report: harness.Report) -> None:
    from ultralytics import YOLO

    for name in MODELS:
        for batch in (16, 1):
            images = torch.rand(batch, 3, 640, 640, device=report.device).half()
            images = images.contiguous(memory_format=torch.channels_last)
            replays: dict[str, Any] = {}
            networks = []  # whose memory the graphs read
            for variant in ("stock", harness.OURS):
                try:
                    if variant != "stock":
                        drop_in.patch(bn_act_optim=True, upsample_optim=True)
                    torch.manual_seed(0)
                    network: Any = YOLO(f"{name}.yaml").model
                    network = network.to(report.device).eval().fuse(verbose=False).half()
                    networks.append(network := network.to(memory_format=torch.channels_last))
                    changed = contextlib.nullcontext() if variant == "stock" else fewer_copies(network)
                    with torch.no_grad(), changed:
                        replays[variant] = harness.graph(functools.partial(network, images))
                finally:
                    drop_in.unpatch()
            case = f"{name}, batch {batch}: the fused network alone, half, 640x640, in a CUDA graph"
            report.compare(case, replays, views=("call",), repetitions=40, inner=1)


if __name__ == "__main__":
    harness.run("evaluation", measure)
