"""Draw the detections of a detector on images: boxes, rotated boxes and masks.

    python -m examples.export --out build/detector --weights yolov5s.pt
    python -m examples.draw build/detector/detector.ts images/ --out build/drawn
    python -m examples.draw yolo11n-seg.pt images/ --also yolo11n-obb.pt --out build/drawn

This writes a PNG of each image into --out with a box in its class's color, with name and confidence, and what else the
detector knows: a mask as a tint, a rotated box for the upright one. A detector is a detector.ts or images.ts of
export.py, an Ultralytics model (.pt), whose package must be installed, or a YOLOv5 checkpoint (.pt) that detects, whose
code is found as export.py says. --also names further detectors for the same images. An image that cannot be read, or
whose PNG would have the name of another (a.jpg beside a.png), is reported, and the others are drawn; the exit status is
1 then. A PNG of an earlier run is replaced; an --out that holds one of the images is refused.
"""

from __future__ import annotations

import argparse
import colorsys
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import existing, folder, run, say, usable_device
from examples.images import Detection, detector_of, find_images, read


def color(index: int) -> tuple[int, int, int]:
    """Return bright colors, far apart for neighboring classes."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618 % 1, 1.0, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def tint(image: Image.Image, mask: np.ndarray, ink: tuple[int, int, int]) -> Image.Image:
    """Return the image with a mask's pixels halfway to a color."""
    pixels = np.array(image)
    pixels[mask] = (pixels[mask].astype(np.uint16) + np.array(ink, np.uint16)) // 2
    return Image.fromarray(pixels)


def draw(image: Image.Image, detections: list[Detection], names: list[str]) -> Image.Image:
    """Return a copy of the image with the detections, the best ones on top; masks lie below all boxes."""
    result = image.convert("RGB")
    for found in reversed(detections):
        if found.mask is not None:
            result = tint(result, found.mask, color(names.index(found.name)))
    canvas = ImageDraw.Draw(result)
    width = max(1, round(min(result.size) / 200))
    letters = max(10, round(min(result.size) / 32))
    font = ImageFont.load_default(letters)
    for found in reversed(detections):
        left, top, right, bottom = (round(x) for x in found.box)
        ink = color(names.index(found.name))
        if found.corners is None:
            canvas.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=ink, width=width)
        else:
            points = [(x, y) for x, y in found.corners]
            canvas.line([*points, points[0]], fill=ink, width=width)
        text = f"{found.name} {found.confidence:.2f}"
        label = canvas.textbbox((left, top), text, font, "lb" if top >= 1.2 * letters else "lt")
        canvas.rectangle(label, fill=ink)
        bright = 0.3 * ink[0] + 0.6 * ink[1] + 0.1 * ink[2] > 110
        canvas.text(label[:2], text, "black" if bright else "white", font, "lt")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detector", type=existing, help="detector.ts, images.ts, or a .pt of YOLOv5 or Ultralytics")
    parser.add_argument("images", type=existing, nargs="+", help="files and folders")
    parser.add_argument(
        "--also", type=existing, action="append", default=[], help="a further detector; may be repeated"
    )
    parser.add_argument("--yolov5", metavar="FOLDER", help="the clone of YOLOv5 with a checkpoint's code")
    parser.add_argument("--out", type=folder, required=True, help="folder for the drawn images")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args()
    paths = find_images(options.images)
    targets = [options.out / f"{path.stem}.png" for path in paths]
    if same := {target.resolve() for target in targets} & {path.resolve() for path in paths}:
        parser.error(f"--out is {options.out}, which would overwrite {min(same)}, but another folder is expected")
    detectors = [detector_of(path, options.device, options.yolov5) for path in (options.detector, *options.also)]
    options.out.mkdir(parents=True, exist_ok=True)
    drawn: dict[Path, Path] = {}  # what was written -> of which image
    failed = False
    for path, target in zip(paths, targets):
        image = read(path)
        if isinstance(image, str) or target in drawn:
            why = image if isinstance(image, str) else f"{target} is of {drawn[target]} already"
            say(f"{path}: not drawn, {why}")
            failed = True
            continue
        result, count = image, 0
        for detector in detectors:
            (detections,) = detector([image])
            result = draw(result, detections, detector.names)
            count += len(detections)
        result.save(target)
        drawn[target] = path
        say(f"{path}: {count} detections -> {target}")
    return int(failed)


if __name__ == "__main__":
    run(main)
