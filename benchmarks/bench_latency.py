"""Show where the time of an answer goes, from an image in memory to boxes on the host, and how long answers take.

    python -m benchmarks.bench_latency [--device cpu|cuda] [--calls 10000] [--only NAME ...] [--out FOLDER]

The model is yolov5s with random weights, fused, for one 1080p image at 640x640; without a GPU it is yolov5n for an
image of 360x640. The stock variant does what detect.py does: OpenCV's letterbox on the host, upload, the eager model,
decode, non_max_suppression, scale_boxes, and the rows on the host. torch_fastdet's variant is ImageDetector's parts:
upload, letterbox on the device, the traced model, one operator for decode and suppression. "one graph" replays all
between upload and download as a CUDA graph. The confidence threshold lets 100 candidates pass.

latency_breakdown.png has the stages, each timed between two synchronizations: the median of 100 answers. The table's
call view has whole answers without synchronizations in between: median, percentiles 10 and 90, and p99.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import stock
from benchmarks.bench_detector import SIDE, yolov5
from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, graph, missing, time_cpu
from benchmarks.report import machine_of, pyplot
from examples.yolov5_env import environment
from torch_fastdet import ops
from torch_fastdet.postprocess import ImageDetector

STAGES = ("letterbox", "upload", "model", "decode", "suppression", "download")
IN_ONE = "one graph"  # letterbox, model, decode and suppression
CANDIDATES = 100
# These are the stages of one answer in order: each takes the result of the one before.
Way = dict[str, Callable[[Any], Any]]


def threshold(decoded: Tensor) -> float:
    """Return the confidence that CANDIDATES anchors of one image exceed."""
    best = decoded[0, :, 4].float() * decoded[0, :, 5:].float().amax(1)
    return best.topk(CANDIDATES + 1).values[-1].item()


def stock_way(model: Any, sample: np.ndarray, device: torch.device, dtype: torch.dtype) -> Way:
    from yolov5.utils.augmentations import letterbox
    from yolov5.utils.general import non_max_suppression, scale_boxes

    head = model.model[-1]

    def resize(image: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(letterbox(image, SIDE, auto=False)[0].transpose(2, 0, 1)[::-1])

    def upload(image: np.ndarray) -> Tensor:
        return torch.from_numpy(image).to(device).to(dtype)[None] / 255

    # Detect's convolutions belong to the model; the rest of it is the decoding.
    head.forward = lambda maps: [conv(x) for conv, x in zip(head.m, maps)]
    like = torch.zeros(1, device=device, dtype=dtype)
    decode = stock.yolov5_decode(head.anchors, head.stride.tolist(), head.nc, like)
    assert decode is not None
    with torch.inference_mode():
        confidence = threshold(decode(model(upload(resize(sample)))))

    def suppress(prediction: Tensor) -> Tensor:
        rows = non_max_suppression(prediction, confidence, 0.45)[0]
        rows[:, :4] = scale_boxes((SIDE, SIDE), rows[:, :4], sample.shape).round()
        return rows

    return {
        "letterbox": resize,
        "upload": upload,
        "model": model,
        "decode": decode,
        "suppression": suppress,
        "download": Tensor.cpu,
    }


def rows_on_host(found: tuple[Tensor, Tensor]) -> Tensor:
    detections, counts = (tensor[0].cpu() for tensor in found)
    return detections[: int(counts)]


def our_way(model: Any, sample: np.ndarray, device: torch.device, half: bool, in_one: bool) -> Way:
    detector = ImageDetector.from_model(model, SIDE, bgr=True, half=half)
    post: Any = detector.postprocess
    pinned = torch.empty(sample.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(sample.shape, dtype=torch.uint8, device=device)
    plan = torch.tensor([detector._row(0, *sample.shape[:2])], device=device)
    letterboxes = torch.tensor([ops.letterbox([SIDE, SIDE], list(sample.shape[:2]))], device=device)
    dtype = torch.float16 if half else torch.float32

    def upload(image: np.ndarray) -> Tensor:
        pinned.copy_(torch.from_numpy(image))
        return there.copy_(pinned, non_blocking=True) if device.type == "cuda" else pinned

    def letterbox(image: Tensor) -> Tensor:
        return ops.image_letterbox([image.reshape(-1)], plan, [SIDE, SIDE], 3, dtype, False, False)

    with torch.inference_mode():
        heads = detector.network(letterbox(upload(sample)))
        post.conf_thres = threshold(ops.yolov5_decode(heads, post.anchors, post.strides))

    def suppress(maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        return post(maps, letterboxes)

    if not in_one:
        return {
            "upload": upload,
            "letterbox": letterbox,
            "model": detector.network,
            "suppression": suppress,
            "download": rows_on_host,
        }
    found: list[Any] = [None]

    def everything() -> None:
        found[0] = suppress(detector.network(letterbox(there)))

    with torch.inference_mode():
        replay = graph(everything)

    def answer(_: Tensor) -> tuple[Tensor, Tensor]:
        replay()
        return found[0]

    return {"upload": upload, IN_ONE: answer, "download": rows_on_host}


def answer(way: Way, image: np.ndarray) -> Any:
    value: Any = image
    for stage in way.values():
        value = stage(value)
    return value


def stages(way: Way, image: np.ndarray, wait: Callable[[], None], count: int) -> dict[str, float]:
    """Return the microseconds of each stage."""
    times: dict[str, list[float]] = {name: [] for name in way}
    for _ in range(count):
        value: Any = image
        for name, stage in way.items():
            wait()
            begun = time.perf_counter_ns()
            value = stage(value)
            wait()
            times[name].append((time.perf_counter_ns() - begun) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(report: Report, name: str, way: Way, image: np.ndarray, calls: int, case: str) -> None:
    wait = torch.cuda.synchronize if report.device.type == "cuda" else lambda: None
    with torch.inference_mode():
        for _ in range(max(3, min(calls // 10, 50))):
            answer(way, image)
        for stage, value in stages(way, image, wait, min(calls, 100)).items():
            report.add(case, name, stage, [value])
        times = time_cpu({name: lambda: answer(way, image)}, calls)[name]
    p99 = sorted(times)[int(0.99 * len(times))]
    report.add(case, name, "call", times, p99_us=round(p99, 3))
    report.write()


def plot(report: Report) -> None:
    if not (plt := pyplot()):
        return
    bars: dict[str, dict[str, float]] = {}
    for row in report.rows:
        if row.view != "call":
            bars.setdefault(row.variant, {})[row.view] = row.median_us / 1e3
    shown = [stage for stage in (*STAGES, IN_ONE) if any(stage in found for found in bars.values())]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.45 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for index, stage in enumerate(shown):
        values = [found.get(stage, 0.0) for found in bars.values()]
        axes.barh(list(bars), values, left=left, label=stage, color=f"C{index}")
        left = [a + b for a, b in zip(left, values)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.2f} ms", va="center")
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * max(left))
    axes.set_xlabel(f"ms, {report.rows[0].case.split(',')[0]}; {machine_of(report.environment)}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(shown), fontsize="small", frameon=False)
    figure.savefig(report.folder / "latency_breakdown.png", dpi=110)
    plt.close(figure)


def ways(device: torch.device, size: str, image: np.ndarray) -> dict[str, Callable[[], Way]]:
    """Return each way by name; models are made on request."""
    cpu = torch.device("cpu")

    def theirs(where: torch.device, half: bool = False) -> Way:
        model = yolov5(size, where).fuse()
        return stock_way(model.half() if half else model, image, where, torch.float16 if half else torch.float32)

    def ours(where: torch.device, half: bool = False, in_one: bool = False) -> Way:
        return our_way(yolov5(size, where).fuse(), image, where, half, in_one)

    found: dict[str, Callable[[], Way]] = {"stock, CPU": partial(theirs, cpu), f"{OURS}, CPU": partial(ours, cpu)}
    if device.type == "cuda":
        found |= {
            "stock, fp32": partial(theirs, device),
            "stock, fp16": partial(theirs, device, True),
            f"{OURS}, fp32": partial(ours, device),
            f"{OURS}, fp16": partial(ours, device, True),
            f"{OURS}, fp16, {IN_ONE}": partial(ours, device, True, True),
        }
    return found


def make_image(device: torch.device) -> np.ndarray:
    height, width = (1080, 1920) if device.type == "cuda" else (360, 640)
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--calls", type=at_least(1), help="of each way; default 10000 in fp16, 1000 in fp32, 100 on the CPU"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some ways; the folder keeps its other rows")
    options = parser.parse_args()
    if reason := missing("latency"):
        print(f"nothing to do: {reason}")
        return
    if options.prepare:
        return
    if "YOLOV5_CONFIG_DIR" not in os.environ:  # yolov5 is imported here: once more, with its stand-ins
        env = environment(WORK / "environment") | {"PYTHONWARNINGS": "ignore", "YOLOv5_VERBOSE": "false"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.bench_latency", *sys.argv[1:]], env)
    report = Report("latency", torch.device(options.device), options.out)
    image = make_image(report.device)
    size = "s" if report.device.type == "cuda" else "n"
    known = ways(report.device, size, image)
    if unknown := [name for name in options.only or [] if name not in known]:
        parser.error(f"--only is {unknown[0]}, but one of {', '.join(known)} is expected")
    if options.only:
        report.resume()
    for name in options.only or known:
        calls = options.calls or (100 if "CPU" in name else 1_000 if "fp32" in name else 10_000)
        case = f"an image of {image.shape[0]}x{image.shape[1]} to its boxes (yolov5{size}), {calls:,} calls"
        for row in [row for row in report.rows if row.variant == name]:
            report.drop(row.case, row.variant)
        measure(report, name, known[name](), image, calls, case)
    plot(report)


if __name__ == "__main__":
    main()
