"""Time uint8 images to boxes in their pixels: ImageDetector and its network alone, and YOLO(...).predict.

    python -m benchmarks.bench_detector [--device cpu|cuda] [--out FOLDER]

ImageDetector is a scripted file of YOLOv5 (yolov5s in half precision on a GPU, yolov5n in float32 on the CPU) with
random weights. Its difference to "network alone" is letterbox, post-processing and scaling. predict of yolov8n gets one
image of 1080p in memory, and on a GPU also one JPEG file of 640x480 and one of 4000x3000. Blocks of calls alternate
between stock, two switches, and all of patch() with its CUDA graphs; rows hold median, percentiles 10 and 90, and p99.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from torch_fastdet.postprocess import ImageDetector

SIDE = 640


def yolov5(size: str, device: torch.device) -> Any:
    from yolov5.models import yolo

    torch.manual_seed(0)
    return yolo.DetectionModel(str(Path(yolo.__file__).parent / f"yolov5{size}.yaml"), ch=3, nc=80).to(device).eval()


def bench_detector(report: harness.Report, images: int, **options: Any) -> None:
    """Measure 1080p images on the device, in one call or one graph."""
    cuda = report.device.type == "cuda"
    size, height, width = ("s", 1080, 1920) if cuda else ("n", 360, 640)
    module = torch.jit.script(ImageDetector.from_model(yolov5(size, report.device), SIDE, half=cuda))
    frames = torch.randint(0, 256, (images, height, width, 3), dtype=torch.uint8, device=report.device)
    batch = torch.rand(images, 3, SIDE, SIDE, device=report.device, dtype=torch.float16 if cuda else torch.float32)
    report.compare(
        f"images to boxes, yolov5{size}, batch {images}",
        {
            "network alone": lambda: module.network(batch),
            "torch_fastdet": lambda: module.forward_batch(frames),
        },
        views=("call", "graph"),
        **options,
    )


# These are the switches that predict runs with.
PREDICTING: dict[str, dict[str, bool] | None] = {
    "stock": None,
    f"{harness.OURS}, no graphs": {"predict_optim": True, "nms_optim": True},
    harness.OURS: {},
}
BLOCKS = 5


def latencies(predict: Any, count: int) -> list[float]:
    """Return the microseconds of each call, which ends on the host."""
    for _ in range(max(count // 10, 5)):  # the third captures
        predict()
    return harness.time_cpu({"predict": predict}, count)["predict"]


def jpeg(width: int, height: int) -> Path:
    """Return a file of an enlarged photograph with noise."""
    import cv2
    import numpy as np

    from benchmarks.bench_jpeg import photograph

    path = harness.WORK / f"photograph-{width}x{height}.jpg"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0).normal(0, 2, (height, width, 3))
        large = cv2.resize(photograph(0), (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(path), np.clip(large + noise, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])
    return path


def bench_predict(report: harness.Report, count: int, source: Any, what: str) -> None:
    from ultralytics import YOLO

    from torch_fastdet import ultralytics as drop_in

    torch.manual_seed(0)
    model = YOLO("yolov8n.yaml")
    predict: Any = partial(model.predict, source, imgsz=SIDE, device=str(report.device), verbose=False, save=False)
    times: dict[str, list[float]] = {variant: [] for variant in PREDICTING}
    speeds: dict[str, list[dict[str, float]]] = {variant: [] for variant in PREDICTING}  # its own, in milliseconds
    for _ in range(BLOCKS):
        for variant, switches in PREDICTING.items():
            with contextlib.redirect_stdout(io.StringIO()):
                try:
                    if switches is not None:
                        drop_in.patch(**switches)
                    times[variant] += latencies(predict, count // BLOCKS)
                    speeds[variant] += [predict()[0].speed for _ in range(10)]
                finally:
                    drop_in.unpatch()
    case = f"YOLO(yolov8n).predict, one {what}"
    for variant, values in times.items():
        p99 = sorted(values)[int(0.99 * len(values))]
        report.add(case, variant, "call", values, p99_us=round(p99, 3))
        parts = ", ".join(
            f"{name} {statistics.median(part[name] for part in speeds[variant]):.2f}" for name in speeds[variant][0]
        )
        print(
            f"predict, {variant}: p50 {report.rows[-1].median_us / 1e3:.2f} ms, p99 {p99 / 1e3:.2f} ms; {parts}",
            flush=True,
        )
    report.write()


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    if report.prepare:
        return
    with torch.inference_mode():
        for images in (1, 32) if cuda else (1,):
            bench_detector(report, images, repetitions=10, inner=3 if cuda else 1, warmup=3)
    image = torch.randint(0, 256, (1080, 1920, 3), dtype=torch.uint8).numpy()
    bench_predict(report, 1000 if cuda else 10, image, "1080p image in memory")
    if cuda:
        for width, height, count in ((640, 480, 500), (4000, 3000, 50)):
            bench_predict(report, count, jpeg(width, height), f"JPEG file of {width}x{height}")


if __name__ == "__main__":
    harness.run("detector", measure)
