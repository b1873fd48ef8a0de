"""Serve a TorchScript detector: names of images in, a line of JSON for each out. YOLOv5 need not be installed.

    python -m examples.export --out build/detector --weights yolov5s.pt
    python -m examples.serve build/detector/detector.ts images/ one-more.jpg
    mkfifo requests; python -m examples.serve build/detector/detector.ts - <> requests

A line holds "image", "milliseconds" (per image of its batch, reading included) and "detections", best first, with
"name", "confidence" and "box": left, top, right and bottom in the image's pixels. An image that cannot be read has
"error", and the loop goes on; the exit status is 1 then.

With ``-`` names come from standard input, one per line, and each is answered at once. A name is the whole line without
its end, of any bytes, blanks included. ``<>`` keeps the pipe open when a writer has closed it; with ``<`` the program
would end with the first writer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import existing, positive, run, usable_device
from examples.images import ImageDetector, find_images, read


def batches(paths: Iterable[Path], size: int) -> Iterator[list[Path]]:
    paths = iter(paths)
    while batch := list(islice(paths, size)):
        yield batch


def answers(detector: ImageDetector, paths: list[Path]) -> Iterator[dict]:
    """Yield an answer for each path, in order."""
    start = time.perf_counter()
    images = [read(path) for path in paths]
    found = iter(detector([image for image in images if not isinstance(image, str)]))
    milliseconds = round((time.perf_counter() - start) * 1e3 / len(paths), 2)
    for path, image in zip(paths, images):
        if isinstance(image, str):
            yield {"image": str(path), "error": image}
        else:
            detections = [
                {"name": d.name, "confidence": round(d.confidence, 4), "box": [round(x, 2) for x in d.box]}
                for d in next(found)
            ]
            yield {"image": str(path), "milliseconds": milliseconds, "detections": detections}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detector", type=existing, help="detector.ts or images.ts")
    parser.add_argument("images", nargs="+", help="files and folders; - reads names from standard input")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--batch", type=positive, default=8, help="images at a time (from standard input: one)")
    options = parser.parse_args()
    if "-" in options.images and len(options.images) > 1:
        parser.error(f"images are {' '.join(options.images)}, but either - alone or files and folders are expected")
    detector = ImageDetector(options.detector, options.device)
    paths: Iterator[Path]
    if options.images == ["-"]:
        lines = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
        paths, size = (Path(os.fsdecode(line)) for line in lines if line.strip()), 1
    else:
        paths, size = iter(find_images(options.images)), options.batch
    failed = False
    for batch in batches(paths, size):
        for answer in answers(detector, batch):
            failed |= "error" in answer
            print(json.dumps(answer), flush=True)
    return int(failed)


if __name__ == "__main__":
    run(main)
