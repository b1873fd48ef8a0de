"""Draw the boxes, masks and rotated boxes that freshly trained models find in one image, side by side.

    python -m examples.demo.figure --out runs/figure                       # on a GPU about a minute
    python -m examples.demo.figure --out runs/figure --size 160 --train 512 --epochs 12 --batch 16

This draws turned digits on photographs, labeled with outlines and rotated boxes; trains yolov8n-seg and yolov8n-obb on
them from scratch, side by side, with all of torch_fastdet's switches; and writes figure.png, in which examples/draw.py
has drawn what they find in a validation image. Nothing is downloaded. seg.log and obb.log have the trainings' output.
OpenCV and Ultralytics are needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.command_line import devices, folder, positive, run, usable_device
from examples.demo import dataset
from examples.yolov5_env import environment

SHOWN = 480  # pixels of the side of a panel, whatever size the models were trained at
CAPTION = 24
LARGEST_TURN = 45  # degrees: a six that is turned much further is a nine
TASKS = {"seg": "segment", "obb": "obb"}
PANELS = ("boxes", "masks", "rotated boxes")

Points = np.ndarray  # (n, 2), x and y


def turned(ink: np.ndarray, degrees: float) -> tuple[np.ndarray, Points]:
    """Return the ink turned counterclockwise and cut to its visible part, and the corners of its upright box."""
    height, width = ink.shape
    image = Image.fromarray(ink).rotate(degrees, Image.Resampling.BICUBIC, expand=True)
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [width / 2, height / 2]
    corners = corners @ [[cosine, -sine], [sine, cosine]] + [image.width / 2, image.height / 2]
    pixels = np.array(image)
    rows, columns = np.flatnonzero((pixels > 64).any(1)), np.flatnonzero((pixels > 64).any(0))
    left, top = columns[0], rows[0]
    return pixels[top : rows[-1] + 1, left : columns[-1] + 1], corners - [left, top]


def outline(ink: np.ndarray) -> Points:
    """Return the outer edge of the largest piece of the ink."""
    import cv2

    pieces, _ = cv2.findContours((ink > 64).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    return max(pieces, key=cv2.contourArea)[:, 0].astype(float) + 0.5


def draw(
    size: int, split: str, index: int, sources: dataset.Sources
) -> tuple[np.ndarray, dict[str, list[tuple[int, Points]]]]:
    """Draw one image (size, size, 3) and its labels for each task: class and points in pixels."""
    rng = np.random.default_rng([0, ("train", "val").index(split), index])
    image = dataset._background(rng, sources, size)
    boxes: list[tuple[int, ...]] = []
    labels: dict[str, list[tuple[int, Points]]] = {task: [] for task in TASKS}
    for _ in range(int(rng.integers(3, 7))):
        chosen = int(rng.integers(len(sources.digits)))
        ink = dataset._ink(rng, sources.digits[chosen], size / dataset.DRAWN_SIZE)
        ink, corners = turned(ink, float(rng.uniform(-LARGEST_TURN, LARGEST_TURN)))
        box = dataset._free_place(rng, boxes, ink.shape[1], ink.shape[0], size)
        if box is None:
            break
        dataset._blend(rng, image, ink, box)
        boxes.append(box)
        for task, points in (("seg", outline(ink)), ("obb", corners)):
            labels[task].append((int(sources.classes[chosen]), points + box[:2]))
    return image, labels


def make(root: Path, size: int, counts: dict[str, int]) -> dict[str, Path]:
    """Write a data set for each task, of the same images, and return the data.yaml of each."""
    found = {}
    for task in TASKS:
        shutil.rmtree(root / task, ignore_errors=True)
        for split in counts:
            for name in ("images", "labels"):
                (root / task / name / split).mkdir(parents=True)
        names = "\n".join(f'  {digit}: "{digit}"' for digit in range(10))
        found[task] = root / task / "data.yaml"
        where = json.dumps(str(root / task))
        found[task].write_text(f"path: {where}\ntrain: images/train\nval: images/val\nnames:\n{names}\n")
    sources = dataset.load_sources()
    for split, count in counts.items():
        for index in range(count):
            image, labels = draw(size, split, index, sources[split])
            for task in TASKS:
                Image.fromarray(image).save(root / task / f"images/{split}/{index:05d}.jpg", quality=95)
                lines = (
                    " ".join([str(label), *(f"{value:.6f}" for value in np.clip(points / size, 0, 1).ravel())])
                    for label, points in labels[task]
                )
                (root / task / f"labels/{split}/{index:05d}.txt").write_text("\n".join(lines) + "\n")
    return found


def train(options: argparse.Namespace, data: dict[str, Path], env: dict[str, str]) -> dict[str, Path]:
    """Train a model for each task, side by side, and return their weights."""
    running = {}
    gpu = options.device != "cpu"
    for task, command in TASKS.items():
        words = {
            "model": f"yolov8n-{task}.yaml", "data": data[task], "imgsz": options.size, "batch": options.batch,
            "epochs": options.epochs, "device": (options.device.partition(":")[2] or "0") if gpu else "cpu",
            "workers": min(6, (os.cpu_count() or 2) // 2) if gpu else 0, "cache": "ram", "optimizer": "AdamW",
            "lr0": 0.002, "warmup_epochs": 1, "mosaic": 0, "fliplr": 0, "erasing": 0, "seed": 0, "val": False,
            "plots": False, "project": options.out, "name": f"train-{task}", "exist_ok": True,
        }  # fmt: skip
        line = [sys.executable, "-m", "torch_fastdet.ultralytics", "--fastdet", command, "train"]
        with open(options.out / f"{task}.log", "w") as log:
            running[task] = subprocess.Popen(
                [*line, *(f"{key}={value}" for key, value in words.items())],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    codes = {task: process.wait() for task, process in running.items()}
    for task, code in codes.items():
        if code:
            raise RuntimeError(f"the training of yolov8n-{task} ended with status {code}; see {options.out}/{task}.log")
    return {task: options.out / f"train-{task}/weights/last.pt" for task in TASKS}


def panels(image: Image.Image, weights: dict[str, Path], device: str) -> Image.Image:
    """Return the image three times, with the models' detections."""
    from examples.draw import draw as drawn
    from examples.images import UltralyticsDetector

    seg, obb = (UltralyticsDetector(weights[task], device) for task in TASKS)
    (masks,), (rotated,) = seg([image]), obb([image])
    boxes = [found._replace(mask=None) for found in masks]
    result = Image.new("RGB", (len(PANELS) * SHOWN, SHOWN + CAPTION), "white")
    for i, (found, names) in enumerate([(boxes, seg.names), (masks, seg.names), (rotated, obb.names)]):
        print(f"{PANELS[i]}: {', '.join(f'{one.name} {one.confidence:.2f}' for one in found) or 'nothing'}")
        result.paste(drawn(image, found, names), (i * SHOWN, CAPTION))
        middle = i * SHOWN + SHOWN / 2, CAPTION / 2
        ImageDraw.Draw(result).text(middle, PANELS[i], "black", ImageFont.load_default(16), "mm")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.figure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=folder, required=True, help="folder to write into")
    parser.add_argument("--size", type=positive, default=320, help="side of the images to train on (default: 320)")
    parser.add_argument("--train", type=positive, default=1024, help="how many of them (default: 1024)")
    parser.add_argument("--epochs", type=positive, default=30, help="default: 30")
    parser.add_argument("--batch", type=positive, default=32, help="default: 32")
    parser.add_argument("--index", type=int, default=0, help="which validation image to draw (default: 0)")
    parser.add_argument("--device", type=usable_device, help="default: cuda if it can be used, else cpu")
    options = parser.parse_args()
    options.device = options.device or devices()[min(1, len(devices()) - 1)]
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    env = environment(options.out / "environment") | {"PYTHONWARNINGS": "ignore"}
    data = make(options.out / "data", options.size, {"train": options.train, "val": 8})
    weights = train(options, data, env)
    os.environ.update(env)  # this process imports Ultralytics, too
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    image, _ = draw(SHOWN, "val", options.index, dataset.load_sources()["val"])
    panels(Image.fromarray(image), weights, options.device).save(options.out / "figure.png")
    print(f"wrote {options.out / 'figure.png'}")


if __name__ == "__main__":
    run(main)
