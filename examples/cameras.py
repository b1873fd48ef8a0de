"""Play eight cameras on one GPU, with a model that all share through a Batcher and with a model for each camera.

    python -m examples.cameras --model yolov8s.pt --cameras 8 --frames 300 --device 0 clips/*.mp4

A camera is a thread that plays a video file, or random images, as fast as it gets answers. It needs Ultralytics.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cv2
import numpy as np

from torch_fastdet.serving import Batcher
from torch_fastdet.ultralytics import patch

Answer = Callable[[np.ndarray], Any]


def frames(path: str | None, seed: int) -> Iterator[np.ndarray]:
    """Yield the frames of a file again and again, or without a file 16 random ones."""
    rng = np.random.default_rng(seed)
    known: list[Any] = [rng.integers(0, 256, (480, 640, 3), dtype=np.uint8) for _ in range(16)] if path is None else []
    if path is not None:
        clip = cv2.VideoCapture(path)
        while (read := clip.read())[0]:
            known.append(read[1])
        clip.release()
        if not known:
            raise SystemExit(f"cameras: {path} has no frames that OpenCV reads")
    return itertools.cycle(known)


def cameras(paths: list[str], count: int) -> list[Iterator[np.ndarray]]:
    """Return the frames of ``count`` cameras, which play the files in turn."""
    return [frames(paths[i % len(paths)] if paths else None, i) for i in range(count)]


def play(answers: list[Answer], images: Sequence[Iterator[np.ndarray]], count: int) -> tuple[float, np.ndarray]:
    """Let each camera ask for ``count`` images; return images per second, and the milliseconds of each answer."""
    took = np.zeros((len(answers), count))
    start = threading.Barrier(len(answers) + 1)
    failed: list[BaseException] = []

    def camera(number: int, answer: Answer, own: Iterator[np.ndarray]) -> None:
        start.wait()
        try:
            for i in range(count):
                began = time.perf_counter()
                answer(next(own))
                took[number, i] = time.perf_counter() - began
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=camera, args=each) for each in zip(itertools.count(), answers, images)]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return took.size / (time.perf_counter() - began), took * 1e3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.cameras", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="video", help="files to play, one after another over the cameras")
    parser.add_argument("--model", default="yolov8s.yaml", help="an Ultralytics model")
    parser.add_argument("--cameras", type=int, default=8)
    parser.add_argument("--frames", type=int, default=200, help="of each camera")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--device", default="0")
    opt = parser.parse_args(argv)
    from ultralytics import YOLO

    patch()
    model: Any = YOLO(opt.model)
    options = {
        "imgsz": opt.imgsz,
        "device": opt.device,
        "quantize": None if opt.device == "cpu" else 16,
        "verbose": False,
    }

    def own_model() -> Answer:
        own: Any = copy.deepcopy(model)
        return lambda image: own.predict(image, **options)[0]

    print(f"{opt.cameras} cameras, {opt.model}   frames/s   p50 ms   p99 ms")
    with Batcher(lambda images: model.predict(images, **options), max_batch=16) as batcher:
        for name, answers in (
            ("a model each", [own_model() for _ in range(opt.cameras)]),
            ("one Batcher", [lambda image: batcher.submit(image).result()] * opt.cameras),
        ):
            play(answers, cameras(opt.paths, opt.cameras), min(opt.frames, 20))  # graphs are captured
            rate, took = play(answers, cameras(opt.paths, opt.cameras), opt.frames)
            print(f"{name:20} {rate:10.0f} {np.percentile(took, 50):8.1f} {np.percentile(took, 99):8.1f}", flush=True)


if __name__ == "__main__":
    main()
