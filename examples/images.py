"""Turn images into detections for serve.py and draw.py. This needs torch, torch_fastdet and Pillow, but no YOLOv5."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from examples.command_line import Unusable, brief
from examples.export import eager_yolov5_detector, load_yolov5
from torch_fastdet import ops  # also loads the operators that the TorchScript file names

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
#: Pillow may read only these: other formats run programs (EPS runs Ghostscript), or are rare and little tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
MAX_SIZE = 16384  # of the side of a detector's images
GRAY = (114, 114, 114)  # YOLOv5's padding


class Detection(NamedTuple):
    name: str
    confidence: float
    box: list[float]  # left, top, right, bottom in the image's pixels
    corners: list[list[float]] | None = None  # of a rotated box, x and y of each; `box` is around them
    mask: np.ndarray | None = None  # (height, width) of the image, bool


def about(text: str | bytes, path: str | Path) -> tuple[int, list[str]]:
    """Return the image size and class names that export.py writes into ``path``."""
    try:
        found = json.loads(text)
        size, names = found["size"], found["names"]
        good = type(size) is int and 0 < size <= MAX_SIZE and type(names) is list and names
        if not good or not all(type(name) is str for name in names):
            raise ValueError("size and names are others")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unusable(
            f"{path} is expected as a detector.ts of export.py, with a size up to {MAX_SIZE} and names of classes in its "
            f"detector.json, but that cannot be used: {type(error).__name__}"
        ) from error
    return size, names


class ImageDetector:
    """Run a detector.ts or images.ts of export.py on images of any size; boxes are in the images' own pixels.

    For a detector.ts Pillow letterboxes images on the host; an images.ts does so itself, as OpenCV does.
    """

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        extra = {"detector.json": ""}
        try:
            self.module = torch.jit.load(str(path), map_location=device, _extra_files=extra)
        except Exception as error:  # a damaged archive makes torch raise anything, and take what memory it asks for
            raise Unusable(
                f"{path} is expected as a detector.ts of export.py, but does not load: {brief(error)}"
            ) from error
        if not extra["detector.json"]:
            raise Unusable(f"{path} is a TorchScript file, but no detector.ts of export.py: it holds no detector.json")
        self.size, self.names = about(extra["detector.json"], path)
        self.device: str = device
        self.letterboxes: bool = hasattr(self.module, "forward_batch")  # of torch_fastdet.postprocess.ImageDetector

    def name(self, label: int) -> str:
        if label >= len(self.names):
            raise Unusable(f"the detector finds class {label}, but its detector.json names {len(self.names)} classes")
        return self.names[label]

    def prepare(self, image: Image.Image) -> tuple[torch.Tensor, list[float]]:
        """Return the network's input (3, size, size), uint8, and how the image was letterboxed into it."""
        shape = [image.height, image.width]
        # Round to whole pixels, as below.
        letterbox = ops.letterbox([self.size, self.size], shape, rounding="ultralytics")
        gain_x, gain_y, left, top = letterbox[:4]
        resized = (max(round(image.width * gain_x), 1), max(round(image.height * gain_y), 1))
        canvas = Image.new("RGB", (self.size, self.size), GRAY)
        canvas.paste(image.convert("RGB").resize(resized, Image.Resampling.BILINEAR), (round(left), round(top)))
        return torch.from_numpy(np.array(canvas)).permute(2, 0, 1), letterbox

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> list[list[Detection]]:
        """Return each image's detections, best first; one batch has all images, one copy brings all to the host."""
        if not images:
            return []
        if self.letterboxes:
            detections, counts = self.module([torch.from_numpy(np.array(p.convert("RGB"))) for p in images])
        else:
            inputs, letterboxes = zip(*map(self.prepare, images))
            batch = torch.stack(inputs).to(self.device).float() / 255
            detections, counts = self.module(batch, torch.tensor(letterboxes, device=self.device))
        return [
            [Detection(self.name(int(row[5])), row[4], row[:4]) for row in rows[:count]]
            for rows, count in zip(detections.tolist(), counts.tolist())
        ]


class YOLOv5Detector(ImageDetector):
    """Run a YOLOv5 checkpoint's detection model at the image size of its training."""

    def __init__(self, path: str | Path, device: str = "cpu", yolov5: str | None = None) -> None:
        model, self.names, self.size = load_yolov5(str(path), yolov5)
        self.module = eager_yolov5_detector(model).to(device)  # not eval(): the head gives its raw maps
        self.device, self.letterboxes = device, False


TASKS = ("detect", "segment", "pose", "obb")


class UltralyticsDetector:
    """Run an Ultralytics model that finds boxes, rotated boxes or masks, with torch_fastdet's operators."""

    def __init__(self, path: str | Path, device: str = "cpu") -> None:
        try:
            from ultralytics import YOLO
            from ultralytics.nn.tasks import BaseModel

            from torch_fastdet import ultralytics as drop_in
        except ImportError as error:
            raise Unusable(f"{path} is a model of Ultralytics, whose package cannot be imported: {error}") from error
        try:
            self.model = YOLO(str(path))
            if not isinstance(self.model.model, BaseModel):  # it loads any pickled module
                raise TypeError(f"it holds a {type(self.model.model).__name__}")
            if self.model.task not in TASKS:
                raise TypeError(f"its task is {self.model.task}, but one of {', '.join(TASKS)} is expected")
            self.names: list[str] = [self.model.names[i] for i in sorted(self.model.names)]
        except Exception as error:  # another file can make the unpickler raise anything
            why = f"{type(error).__name__}: {brief(error)}"
            wanted = "a detector.ts of export.py or a model of Ultralytics"
            raise Unusable(f"{path} is expected as {wanted}, but does not load: {why}") from error
        drop_in.patch(nms_optim=True, mask_optim=True, predict_optim=True)
        self.device: str = device

    def __call__(self, images: list[Image.Image]) -> list[list[Detection]]:
        """Return each image's detections, best first."""
        found = []
        for image in images:
            (result,) = self.model.predict(image, device=self.device, retina_masks=True, verbose=False)
            found.append(list(detections_of(result, self.names)))
        return found


def detections_of(result: Any, names: Sequence[str]) -> Iterator[Detection]:
    """Return what a result of Ultralytics contains for one image."""
    rotated = result.obb is not None
    boxes = result.obb if rotated else result.boxes
    corners = boxes.xyxyxyxy.tolist() if rotated else [None] * len(boxes)
    masks = [None] * len(boxes) if result.masks is None else result.masks.data.cpu().numpy() > 0
    for label, confidence, box, own_corners, mask in zip(boxes.cls, boxes.conf, boxes.xyxy, corners, masks):
        yield Detection(names[int(label)], float(confidence), box.tolist(), own_corners, mask)


def is_yolov5(path: str | Path) -> bool:
    """Return whether a checkpoint holds classes of YOLOv5, without running code of the file."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # no checkpoint at all, which whoever loads it says
        return False
    return any(name.removeprefix("yolov5.").startswith("models.") for name in names)


def detector_of(
    path: str | Path, device: str = "cpu", yolov5: str | None = None
) -> ImageDetector | UltralyticsDetector:
    """Return a file's detector: of YOLOv5 or Ultralytics if its name ends with .pt, else one of export.py."""
    if not str(path).endswith(".pt"):
        return ImageDetector(path, device)
    return YOLOv5Detector(path, device, yolov5) if is_yolov5(path) else UltralyticsDetector(path, device)


def read(path: Path) -> Image.Image | str:
    """Return the image, or the reason why there is none."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError(f"{path} is not a file")
        with Image.open(path, formats=FORMATS) as image:
            return ImageOps.exif_transpose(image).convert("RGB")  # a telephone's upright, as OpenCV reads it
    except Exception as error:  # a broken file can make Pillow raise anything
        return f"{type(error).__name__}: {error}"


def find_images(sources: list[str | Path]) -> list[Path]:
    """Return the files among ``sources`` and the images in their folders, in order; at least one."""
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            found += sorted(path for path in source.iterdir() if path.suffix.lower() in SUFFIXES)
        else:
            found.append(source)
    if not found:
        raise Unusable(f"{', '.join(map(str, sources))}: found no images ({', '.join(sorted(SUFFIXES))})")
    return found
