"""Draws the detections of a TorchScript detector on pictures.

    python -m examples.export --out build/detector --weights yolov5s.pt
    python -m examples.draw build/detector/detector.ts pictures/ --out build/drawn

writes a PNG of each picture into --out: a box in its class's color, with name and confidence. A picture that cannot be read, or
whose PNG would have the name of one that is drawn (a.jpg beside a.png), is said, and the others are drawn; the exit status is 1
then. A PNG of an earlier run is replaced; an --out where one of the pictures themselves would be is refused.
"""

from __future__ import annotations

import argparse
import colorsys
import sys
from pathlib import Path

from PIL import Image, ImageDraw

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import existing, folder, run, usable_device
from examples.pictures import Detection, PictureDetector, find_pictures, read


def color(index: int) -> tuple[int, int, int]:
    """Bright colors, far apart for neighbouring classes."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618 % 1, 1.0, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw(picture: Image.Image, detections: list[Detection], names: list[str]) -> Image.Image:
    """A copy of the picture with the detections on it, the best ones on top."""
    result = picture.convert("RGB")
    canvas = ImageDraw.Draw(result)
    width = max(1, round(min(result.size) / 200))
    for name, confidence, box in reversed(detections):
        left, top, right, bottom = (round(x) for x in box)
        ink = color(names.index(name))
        canvas.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=ink, width=width)
        label = canvas.textbbox((left, top), f"{name} {confidence:.2f}", anchor="lb" if top >= 12 else "lt")
        canvas.rectangle(label, fill=ink)
        canvas.text(label[:2], f"{name} {confidence:.2f}", fill="black", anchor="lt")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detector", type=existing, help="detector.ts")
    parser.add_argument("pictures", type=existing, nargs="+", help="files and folders")
    parser.add_argument("--out", type=folder, required=True, help="folder for the drawn pictures")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    options = parser.parse_args()
    paths = find_pictures(options.pictures)
    targets = [options.out / f"{path.stem}.png" for path in paths]
    if same := {target.resolve() for target in targets} & {path.resolve() for path in paths}:
        parser.error(f"--out is {options.out}, which would overwrite {min(same)}, but another folder is wanted")
    detector = PictureDetector(options.detector, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn: dict[Path, Path] = {}  # what was written -> of which picture
    failed = False
    for path, target in zip(paths, targets):
        picture = read(path)
        if isinstance(picture, str) or target in drawn:
            why = picture if isinstance(picture, str) else f"{target} is of {drawn[target]} already"
            print(f"{path}: not drawn, {why}", flush=True)
            failed = True
            continue
        (detections,) = detector([picture])
        draw(picture, detections, detector.names).save(target)
        drawn[target] = path
        print(f"{path}: {len(detections)} detections -> {target}", flush=True)
    return int(failed)


if __name__ == "__main__":
    run(main)
