"""Let eight threads predict images one by one with yolov8s: a model for each thread, and one model in a Batcher.

    python -m benchmarks.bench_serving [--out FOLDER]

A time is what a thread waits for the boxes of an image of 640x480 on the host. It needs a GPU.
"""

from __future__ import annotations

import contextlib
import io
import itertools

from benchmarks import harness
from benchmarks.bench_jpeg import photograph
from benchmarks.bench_predict import BATCH, model, options
from examples.cameras import Answer, play
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.serving import Batcher

THREADS, IMAGES, WARM = 8, 150, 50


def measure(report: harness.Report) -> None:
    images = [image for image in map(photograph, range(48)) if image.shape[0] == 480]
    with contextlib.redirect_stdout(io.StringIO()):
        chosen = options(report.device, images[:BATCH])

    def own() -> Answer:
        yolo = model(report.device, images[:BATCH])
        return lambda image: yolo.predict(image, **chosen)[0].boxes.data.cpu()

    def add(variant: str, answers: list[Answer]) -> None:
        # Each thread begins elsewhere, so that their images differ.
        own_images = [itertools.cycle(images[(6 * i) % len(images) :] + images) for i in range(THREADS)]
        play(answers, own_images, WARM)
        rate, took = play(answers, own_images, IMAGES)
        times = sorted((1e3 * took).ravel().tolist())
        p99 = round(times[int(0.99 * len(times))], 3)
        report.add(f"{THREADS} threads", variant, "call", times, p99_us=p99, images_per_s=round(rate))

    add("stock, a model each", [own() for _ in range(THREADS)])
    try:
        drop_in.patch()
        add(f"{harness.OURS}, a model each", [own() for _ in range(THREADS)])
        yolo = model(report.device, images[:BATCH])
        with Batcher(lambda batch: yolo.predict(batch, **chosen), max_batch=BATCH) as batcher:
            shared = [lambda image: batcher.submit(image).result().boxes.data.cpu()] * THREADS
            add(f"{harness.OURS}, one Batcher", shared)
    finally:
        drop_in.unpatch()
    report.write()


if __name__ == "__main__":
    harness.run("serving", measure)
