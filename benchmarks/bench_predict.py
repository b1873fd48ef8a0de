"""Time YOLO(...).predict end to end by source, stock and with patch(), in microseconds per image.

    python -m benchmarks.bench_predict [--device cpu|cuda] [--out FOLDER]

The model is yolov8s, on a GPU in half precision (on a CPU yolov8n), with random weights and the confidence at which it
finds about five boxes per image. Results are read as users read them: their boxes come to the host. Sources are a
folder of JPEG files and a list of their names in batches of 16, 64 arrays in batches of 16, and one array.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks import harness
from benchmarks.bench_jpeg import photograph

BATCH = 16
FILES, LISTED = 1536, 512
DIFFERENT = 48
VARIANTS = ("stock", harness.OURS)


def folder(files: int) -> list[str]:
    """Return the names of JPEG files of DIFFERENT photographs, about 100 kB each."""
    made = harness.WORK / f"predict-{files}"
    made.mkdir(parents=True, exist_ok=True)
    names = [str(made / f"{number:04d}.jpg") for number in range(files)]
    for number, name in enumerate(names):
        if os.path.exists(name):
            continue
        if number < DIFFERENT:
            cv2.imwrite(name, photograph(number), [cv2.IMWRITE_JPEG_QUALITY, 90])
        else:
            os.link(names[number % DIFFERENT], name)
    return names


def model(device: torch.device, images: list[np.ndarray]) -> Any:
    """Return a new model whose scores differ: its norms have the statistics of the images."""
    from ultralytics import YOLO

    torch.manual_seed(0)
    made: Any = YOLO("yolov8s.yaml" if device.type == "cuda" else "yolov8n.yaml")
    for module in made.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        small = [torch.from_numpy(cv2.resize(image[..., ::-1], (640, 640))) for image in images]
        made.model.train()(torch.stack(small).permute(0, 3, 1, 2) / 255)
        for branch in made.model.model[-1].cv3:
            branch[-1].weight.mul_(0.1)
            branch[-1].bias.zero_()
    made.model.eval()
    return made


def options(device: torch.device, images: list[np.ndarray]) -> dict[str, Any]:
    """Return options of ``predict`` with which the model finds some boxes."""
    chosen: dict[str, Any] = {
        "imgsz": 640,
        "quantize": 16 if device.type == "cuda" else None,
        "device": str(device),
        "verbose": False,
        "iou": 0.5,
    }
    found = model(device, images).predict(images, conf=0.5, max_det=3000, **chosen)
    scores = torch.cat([result.boxes.conf for result in found]).sort(descending=True).values
    return {**chosen, "conf": float(scores[min(5 * len(images), len(scores) - 1)])}


def measure(report: harness.Report) -> None:
    from torch_fastdet import ultralytics as drop_in

    if report.prepare:
        return
    cuda = report.device.type == "cuda"
    names = folder(FILES if cuda else 8)
    listed = names[:LISTED]
    images: list[Any] = [cv2.imread(name) for name in (names[:DIFFERENT] * 64)[: 64 if cuda else 4]]
    with contextlib.redirect_stdout(io.StringIO()):
        chosen = options(report.device, images[:BATCH])
    sources: dict[str, tuple[Any, int]] = {
        f"a folder of {len(names):,} JPEGs, batch {BATCH}, stream=True": (str(Path(names[0]).parent), len(names)),
        f"a list of {len(listed)} file names, batch {BATCH}, stream=True": (listed, len(listed)),
        f"{len(images)} arrays, batch {BATCH}": (images, len(images)),
        "one array": (images[0], 1),
    }
    network = "yolov8s, half" if cuda else "yolov8n"
    times: dict[tuple[str, str], list[float]] = {(case, variant): [] for case in sources for variant in VARIANTS}
    for variant in VARIANTS * 3:
        try:
            if variant != "stock":
                drop_in.patch()
            # A model stays patched or not as it was when its layers were fused.
            yolo = model(report.device, images[:BATCH])
            yolo.predict(images[0], **chosen)
            for case, (source, count) in sources.items():
                warm = 4 if cuda and variant != "stock" else 0  # the third captures
                repeat = 1 if not cuda or (variant == "stock" and count > 64) else 100 if count == 1 else 6
                for number in range(warm + repeat):
                    began = time.perf_counter()
                    for result in yolo.predict(source, batch=BATCH, stream=True, **chosen):
                        result.boxes.data.cpu()
                    if number >= warm:
                        times[case, variant].append((time.perf_counter() - began) * 1e6 / count)
        finally:
            drop_in.unpatch()
    for (case, variant), values in times.items():
        report.add(f"predict, {network}, about 5 boxes an image: {case}", variant, "call", values)
    report.write()


if __name__ == "__main__":
    harness.run("predict", measure)
