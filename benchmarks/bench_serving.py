"""Eight threads that each predict one image after another: yolov8s with a model for each thread, and one model through a Batcher.

    python -m benchmarks.bench_serving [--out FOLDER]

A time is what a thread waits for an image of 640x480 and its boxes on the host. GPU only.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.bench_jpeg import photograph
from benchmarks.bench_predict import BATCH, model, options
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.serving import Batcher

THREADS, IMAGES, WARM = 8, 150, 50


def play(answers: list[Callable[[np.ndarray], Any]], images: list[np.ndarray], count: int) -> list[float]:
    """Return the microseconds of each answer."""
    took: list[float] = []

    def camera(number: int) -> None:
        for k in range(count):
            began = time.perf_counter()
            answers[number](images[(6 * number + k) % len(images)]).boxes.data.cpu()
            took.append((time.perf_counter() - began) * 1e6)

    threads = [threading.Thread(target=camera, args=(number,)) for number in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def measure(report: harness.Report) -> None:
    images = [image for image in map(photograph, range(48)) if image.shape[0] == 480]
    with contextlib.redirect_stdout(io.StringIO()):
        chosen = options(report.device, images[:BATCH])

    def own() -> Callable[[np.ndarray], Any]:
        yolo = model(report.device, images[:BATCH])
        return lambda image: yolo.predict(image, **chosen)[0]

    def add(variant: str, answers: list[Callable[[np.ndarray], Any]]) -> None:
        play(answers, images, WARM)
        began = time.perf_counter()
        took = play(answers, images, IMAGES)
        rate = round(len(took) / (time.perf_counter() - began))
        p99 = round(sorted(took)[int(0.99 * len(took))], 3)
        report.add(f"{THREADS} threads", variant, "call", took, p99_us=p99, images_per_s=rate)

    add("stock, a model each", [own() for _ in range(THREADS)])
    try:
        drop_in.patch()
        add(f"{harness.OURS}, a model each", [own() for _ in range(THREADS)])
        yolo = model(report.device, images[:BATCH])
        with Batcher(lambda batch: yolo.predict(batch, **chosen), max_batch=BATCH) as batcher:
            shared = [lambda image: batcher.submit(image).result()] * THREADS
            add(f"{harness.OURS}, one Batcher", shared)
    finally:
        drop_in.unpatch()
    report.write()


if __name__ == "__main__":
    harness.run("serving", measure)
