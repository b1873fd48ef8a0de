"""Serve a TorchScript detector: names of images in, a line of JSON for each out. YOLOv5 need not be installed.

    python -m examples.export --out build/detector --weights yolov5s.pt
    python -m examples.serve build/detector/detector.ts pictures/ one-more.jpg
    mkfifo requests; python -m examples.serve build/detector/detector.ts - <> requests

A line holds "picture", and "milliseconds" (of its batch, reading included, a picture) with "detections", best first: "name",
"confidence" and "box", which is left, top, right and bottom in the image's pixels. An image that cannot be read has "error"
instead, and the loop goes on; the exit status is 1 then.

With ``-`` names come from standard input, one a line, and each is answered at once. A name is the line as it stands, without its
end: of any bytes, and with blanks where it has them. ``<>`` keeps the pipe open when a writer has
closed it: with ``<`` the first writer's end would be the program's.
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
from examples.pictures import PictureDetector, find_pictures, read


def batches(paths: Iterable[Path], size: int) -> Iterator[list[Path]]:
    paths = iter(paths)
    while batch := list(islice(paths, size)):
        yield batch


def answers(detector: PictureDetector, paths: list[Path]) -> Iterator[dict]:
    """Yield an answer for each path, in order."""
    start = time.perf_counter()
    pictures = [read(path) for path in paths]
    found = iter(detector([picture for picture in pictures if not isinstance(picture, str)]))
    milliseconds = round((time.perf_counter() - start) * 1e3 / len(paths), 2)
    for path, picture in zip(paths, pictures):
        if isinstance(picture, str):
            yield {"picture": str(path), "error": picture}
        else:
            detections = [
                {"name": d.name, "confidence": round(d.confidence, 4), "box": [round(x, 2) for x in d.box]}
                for d in next(found)
            ]
            yield {"picture": str(path), "milliseconds": milliseconds, "detections": detections}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detector", type=existing, help="detector.ts or pictures.ts")
    parser.add_argument("pictures", nargs="+", help="files and folders; - reads names from standard input")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--batch", type=positive, default=8, help="pictures at a time (from standard input: one)")
    options = parser.parse_args()
    if "-" in options.pictures and len(options.pictures) > 1:
        parser.error(f"pictures are {' '.join(options.pictures)}, but either - alone or files and folders are expected")
    detector = PictureDetector(options.detector, options.device)
    paths: Iterator[Path]
    if options.pictures == ["-"]:
        lines = (line.rstrip(b"\r\n") for line in sys.stdin.buffer)
        paths, size = (Path(os.fsdecode(line)) for line in lines if line.strip()), 1
    else:
        paths, size = iter(find_pictures(options.pictures)), options.batch
    failed = False
    for batch in batches(paths, size):
        for answer in answers(detector, batch):
            failed |= "error" in answer
            print(json.dumps(answer), flush=True)
    return int(failed)


if __name__ == "__main__":
    run(main)
