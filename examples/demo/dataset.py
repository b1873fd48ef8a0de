"""Make a small real detection problem that needs no download: handwritten digits on photographs, as a YOLO data set.

The digits are scikit-learn's 1,797 scans of 8x8 pixels, the photographs the four that come inside the wheels of
scikit-learn (china, flower) and ultralytics (bus, zidane). One fifth of the digits is kept for validation; four
photographs are too few to keep one back, so both splits take their crops from all of them.

The same recipe gives the same bytes: every image has its own random stream, named by seed, split and index.

    python -m examples.demo.dataset runs/digits --image-size 640

With another ``task`` labels are what that YOLO task reads: outlines of the ink ("segment"), its uppermost, lowermost,
leftmost and rightmost points ("pose"), or the corners of digits that are turned by any angle ("obb").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

DRAWN_SIZE = 128  # the sizes below are for images of this size, and grow with them
DIGIT_SIZES = (22, 44)
CROP_SIZES = (96, 192)
JPEG_QUALITY = 95
VISIBLE = 64  # of ink
TASKS = ("detect", "segment", "pose", "obb")
VERSION = 2  # raise when the images change, so that old ones are made again


@dataclass(frozen=True)
class Recipe:
    image_size: int = DRAWN_SIZE
    train: int = 1024
    val: int = 128
    min_digits: int = 3
    max_digits: int = 7
    seed: int = 0
    task: str = "detect"


@dataclass(frozen=True)
class Sources:
    digits: np.ndarray  # (n, 8, 8) uint8, 0 is paper and 255 is ink
    classes: np.ndarray  # (n,)
    photographs: list[Image.Image]


def load_sources() -> dict[str, Sources]:
    """Return the digits and photographs of each split; the splits share no digit."""
    from sklearn.datasets import load_digits, load_sample_images

    spec = importlib.util.find_spec("ultralytics")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the demo's photographs bus.jpg and zidane.jpg come with ultralytics, which is not installed; "
            "type: pip install --no-deps -r requirements/yolov5.txt"
        )
    assets = Path(spec.origin).parent / "assets"
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    photographs += [Image.open(assets / name).convert("RGB") for name in ("bus.jpg", "zidane.jpg")]

    scans = load_digits()
    digits = np.round(scans.images * (255 / 16)).astype(np.uint8)
    shuffled = np.random.default_rng(0).permutation(len(digits))
    first_val = len(digits) * 4 // 5
    return {
        split: Sources(digits[chosen], scans.target[chosen], photographs)
        for split, chosen in (("train", shuffled[:first_val]), ("val", shuffled[first_val:]))
    }


def _background(rng: np.random.Generator, sources: Sources, size: int) -> np.ndarray:
    photograph = sources.photographs[rng.integers(len(sources.photographs))]
    side = int(rng.integers(CROP_SIZES[0], CROP_SIZES[1] + 1))
    side = min(side, photograph.width, photograph.height)
    x = int(rng.integers(photograph.width - side + 1))
    y = int(rng.integers(photograph.height - side + 1))
    box = (x, y, x + side, y + side)
    return np.array(photograph.resize((size, size), Image.Resampling.BICUBIC, box=box))


def _ink(rng: np.random.Generator, digit: np.ndarray, scale: float) -> np.ndarray:
    """Return the digit at a random size."""
    side = int(rng.integers(round(DIGIT_SIZES[0] * scale), round(DIGIT_SIZES[1] * scale) + 1))
    return np.array(Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC))


def _cut(ink: np.ndarray) -> np.ndarray:
    """Return the visible part of a digit."""
    visible = ink > VISIBLE
    rows, columns = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _turned(rng: np.random.Generator, ink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ink turned by any angle, and its four corners, (4, 2) in pixels."""
    degrees = float(rng.uniform(0, 360))
    turned = np.array(Image.fromarray(ink).rotate(degrees, Image.Resampling.BICUBIC, expand=True))
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (np.array(ink.shape[::-1]) / 2)
    return turned, corners @ np.array([(cos, -sin), (sin, cos)]) + np.array(turned.shape[::-1]) / 2


def _points(task: str, ink: np.ndarray) -> np.ndarray:
    """Return the points of the ink that a task labels, (n, 2) in pixels."""
    visible = ink > VISIBLE
    if task == "segment":
        import cv2  # which Ultralytics needs

        outlines, _ = cv2.findContours(visible.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        return max(outlines, key=cv2.contourArea)[:, 0].astype(np.float64)
    y, x = np.nonzero(visible)
    extreme = [y.argmin(), y.argmax(), x.argmin(), x.argmax()]
    return np.stack((x[extreme], y[extreme]), 1) + 0.5


def _free_place(rng: np.random.Generator, taken: list[tuple[int, ...]], width: int, height: int, size: int):
    """Return where a box fits beside others: (left, top, right, bottom), or None after many tries."""
    for _ in range(50):
        x, y = int(rng.integers(size - width + 1)), int(rng.integers(size - height + 1))
        box = (x, y, x + width, y + height)
        if all(box[0] >= b[2] or b[0] >= box[2] or box[1] >= b[3] or b[1] >= box[3] for b in taken):
            return box
    return None


def _blend(rng: np.random.Generator, image: np.ndarray, ink: np.ndarray, box: tuple[int, ...]) -> None:
    """Draw the ink in a random color, dark on a bright background and bright on a dark one, in exact integers."""
    patch = image[box[1] : box[3], box[0] : box[2]]
    low, high = (0, 70) if patch.mean(dtype=np.float64) > 127.5 else (186, 256)
    colour = rng.integers(low, high, size=3)
    alpha = ink[..., None].astype(np.int64)
    patch[:] = (patch * (255 - alpha) + colour * alpha + 127) // 255


def _label(task: str, box: tuple[int, ...], points: np.ndarray | None, size: int) -> tuple[float, ...]:
    """Return the text after the class in a label's line."""
    left, top, right, bottom = (edge / size for edge in box)
    rectangle = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
    if points is None:
        return rectangle
    where = ((points + box[:2]) / size).clip(0, 1)
    if task != "pose":
        return tuple(where.reshape(-1).tolist())
    return *rectangle, *np.pad(where, ((0, 0), (0, 1)), constant_values=2).reshape(-1).tolist()


def draw(recipe: Recipe, sources: Sources, split: str, index: int) -> tuple[np.ndarray, list[tuple[float, ...]]]:
    """Draw one image (size, size, 3) uint8 RGB and its labels, normalized as YOLO wants them: (class, x, y, width,
    height), or those of the recipe's task."""
    size = recipe.image_size
    rng = np.random.default_rng([recipe.seed, ("train", "val").index(split), index])
    while True:  # again with the next numbers of the stream where the digits did not fit
        image = _background(rng, sources, size)
        boxes: list[tuple[int, ...]] = []
        labels: list[tuple[float, ...]] = []
        for _ in range(int(rng.integers(recipe.min_digits, recipe.max_digits + 1))):
            chosen = int(rng.integers(len(sources.digits)))
            ink, points = _cut(_ink(rng, sources.digits[chosen], size / DRAWN_SIZE)), None
            if recipe.task == "obb":
                ink, points = _turned(rng, ink)
            elif recipe.task != "detect":
                points = _points(recipe.task, ink)
            box = _free_place(rng, boxes, ink.shape[1], ink.shape[0], size)
            if box is None:
                break
            _blend(rng, image, ink, box)
            boxes.append(box)
            labels.append((int(sources.classes[chosen]), *_label(recipe.task, box, points, size)))
        else:
            return image, labels


def make(folder: str | Path, recipe: Recipe | None = None) -> Path:
    """Write the data set (images/, labels/, data.yaml) unless it exists already, and return the path of data.yaml.

    data.yaml has the folder's absolute path, which train.py needs; all else depends only on the recipe.
    """
    recipe = recipe or Recipe()
    if recipe.task not in TASKS:
        raise ValueError(f"task is {recipe.task!r}, but one of {', '.join(TASKS)} is expected")
    folder = Path(folder).resolve()
    data, stamp = folder / "data.yaml", folder / "recipe.json"
    wanted = json.dumps({"version": VERSION, "folder": str(folder), **asdict(recipe)}, indent=2) + "\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return data
    if folder.exists() and any(folder.iterdir()) and not stamp.exists() and not (folder / "images").exists():
        raise FileExistsError(f"{folder} holds something else than this data set; name an empty folder")
    for name in ("images", "labels"):
        shutil.rmtree(folder / name, ignore_errors=True)
    stamp.unlink(missing_ok=True)

    for split, sources in load_sources().items():
        for name in ("images", "labels"):
            (folder / name / split).mkdir(parents=True)
        for index in range(getattr(recipe, split)):
            image, labels = draw(recipe, sources, split, index)
            Image.fromarray(image).save(folder / f"images/{split}/{index:05d}.jpg", quality=JPEG_QUALITY)
            text = "".join(f"{label[0]} " + " ".join(f"{value:.6f}" for value in label[1:]) + "\n" for label in labels)
            (folder / f"labels/{split}/{index:05d}.txt").write_text(text)
    names = "\n".join(f'  {digit}: "{digit}"' for digit in range(10))
    keypoints = "kpt_shape: [4, 3]\nflip_idx: [0, 1, 3, 2]\n" if recipe.task == "pose" else ""
    data.write_text(
        f"path: {json.dumps(str(folder))}\ntrain: images/train\nval: images/val\n{keypoints}names:\n{names}\n"
    )
    stamp.write_text(wanted)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in asdict(Recipe()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    print(make(arguments.pop("folder"), Recipe(**arguments)))


if __name__ == "__main__":
    main()
