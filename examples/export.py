"""Make a TorchScript detector with torch_fastdet's operators inside, for serve.py, draw.py and cpp/detect.cpp.

    python -m examples.export --out build/detector                        # a small network with random weights
    python -m examples.export --out build/detector --weights yolov5s.pt   # a YOLOv5 checkpoint
    python -m examples.export --out build/detector --weights best.pt --yolov5 ../yolov5

This writes detector.ts, which needs torch_fastdet but no YOLOv5 to load; images.ts, which takes uint8 images of any
sizes and returns boxes in their pixels; and image.npy and golden/, the stages of plain PyTorch with which those of the
C++ program are compared. A checkpoint needs YOLOv5's code, from the clone that holds it, the clone that --yolov5 names,
or PyPI's package yolov5.

    detect build/detector/detector.ts build/detector/image.npy --golden build/cpp
    python -m torch_fastdet.golden compare build/detector/golden build/cpp --rtol 1e-5 --atol 1e-3

--aoti also writes detector.pt2, the same detector compiled ahead of time by torch.export and AOTInductor, which needs a
C++ compiler and a minute: `detect build/detector/detector.pt2 build/detector/image.npy`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import Unusable, brief, existing, folder, run
from torch_fastdet import golden, ops
from torch_fastdet.postprocess import ImageDetector, YOLOv5PostProcess

ANCHORS = [[[1.25, 1.625], [2.0, 3.75], [4.125, 2.875]], [[1.875, 3.8125], [3.875, 2.8125], [3.6875, 7.4375]]]
STRIDES = [8.0, 16.0]
CLASSES = 10


class SmallNetwork(nn.Module):
    """Compute two levels of raw YOLOv5 head maps from an image: enough to see every part run."""

    def __init__(self, classes: int = CLASSES):
        super().__init__()
        outputs = 3 * (5 + classes)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(16, 16, 2, 2), nn.SiLU())
        self.fine = nn.Conv2d(32, outputs, 1)
        self.coarse = nn.Conv2d(16, outputs, 1)

    def forward(self, image: Tensor) -> list[Tensor]:
        fine = self.stem(image)
        coarse = self.down(fine)
        return [self.fine(ops.upsample_nearest2x_cat(coarse, fine)) * 12, self.coarse(coarse) * 12]


class Detector(nn.Module):
    """Join a network that returns raw heads and their post-processing. It can be scripted."""

    def __init__(self, network: nn.Module, postprocess: YOLOv5PostProcess):
        super().__init__()
        self.network = network
        self.postprocess = postprocess

    def forward(self, image: Tensor, letterboxes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn (images, 3, height, width) in 0..1 into detections (images, max_det, 6), counts (images,).

        With letterboxes (images, 6), rows of ops.letterbox, boxes come out in the original images' pixels.
        """
        return self.postprocess(self.network(image), letterboxes)

    @torch.jit.export
    def stages(self, image: Tensor) -> dict[str, Tensor]:
        """Return the stages of golden.yolov5_stages as this detector computes them, without candidates."""
        post = self.postprocess
        stages: dict[str, Tensor] = {}
        heads = self.network(image)
        for level, head in enumerate(heads):
            stages["raw." + str(level)] = head
        stages["decoded"] = ops.yolov5_decode(heads, post.anchors, post.strides, post.nm)
        # No overlap exceeds 1, so these are all candidates that pass, sorted.
        every = stages["decoded"].size(1)
        rows, counts = ops.yolov5_postprocess(heads, post.anchors, post.strides, post.conf_thres, 1.0, max_det=every)
        stages["sorted"] = flatten(rows, counts)
        rows, counts = post(heads)
        stages["kept"] = flatten(rows, counts)
        return stages


def flatten(rows: Tensor, counts: Tensor) -> Tensor:
    """Turn padded rows (images, capacity, 6) into (n, 7) with the image in the first column."""
    image = torch.arange(rows.size(0), device=rows.device)[:, None].expand(rows.size(0), rows.size(1))
    table = torch.cat((image[..., None].to(rows.dtype), rows), 2)
    return table[torch.arange(rows.size(1), device=rows.device)[None] < counts[:, None]]


class YOLOv5Heads(nn.Module):
    """Wrap a YOLOv5 model so that its Detect module gives its raw heads, as it does in training."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.float().eval()
        next(module for module in reversed(list(model.modules())) if hasattr(module, "anchors")).training = True

    def forward(self, image: Tensor) -> list[Tensor]:
        return list(self.model(image))


def small_detector(**options) -> Detector:
    torch.manual_seed(0)
    return Detector(SmallNetwork(), YOLOv5PostProcess(ANCHORS, STRIDES, CLASSES, **options)).eval()


def eager_yolov5_detector(model: nn.Module, **options) -> Detector:
    """Return the detector of a loaded YOLOv5 model for torch.export. TorchScript cannot compile that model."""
    return Detector(YOLOv5Heads(model), YOLOv5PostProcess.from_model(model, **options))


def yolov5_detector(model: nn.Module, image: Tensor, **options) -> Detector:
    """Return the detector of a loaded YOLOv5 model, traced with ``image``."""
    eager = eager_yolov5_detector(model, **options)
    with torch.no_grad():
        traced = torch.jit.trace(eager.network, image, check_trace=False, strict=False)
    return Detector(traced, eager.postprocess).eval()


def yolov5_folder(weights: str, given: str | None = None) -> Path | None:
    """Return the folder with YOLOv5's ``models``: the given one, the clone with the checkpoint, or PyPI's package."""
    for clone in [Path(given)] if given else Path(weights).resolve().parents:
        if (clone / "models/yolo.py").is_file():
            return clone.resolve()
    if given:
        raise Unusable(f"--yolov5 is {given}, but a clone of YOLOv5, with models/yolo.py inside, is expected")
    package = importlib.util.find_spec("yolov5")
    return Path(package.origin).parent if package and package.origin else None


def load_checkpoint(path: str, yolov5: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the model of a YOLOv5 checkpoint and the options of its training."""
    folder = yolov5_folder(path, yolov5)
    if folder:  # pickled classes are those of the top modules `models` and `utils`
        sys.path.insert(0, str(folder))
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        return checkpoint.get("ema") or checkpoint["model"], checkpoint.get("opt") or {}
    finally:
        if folder:
            sys.path.remove(str(folder))


def load_yolov5(path: str, yolov5: str | None = None) -> tuple[nn.Module, list[str], int]:
    """Return a YOLOv5 checkpoint's model, its class names and the image size of its training.

    YOLOv5 pickles whole modules, and unpickling runs what the file says: load only checkpoints that you trust.
    """
    try:
        model, trained = load_checkpoint(path, yolov5)
        masks = YOLOv5PostProcess.from_model(model).nm
        names = list(model.names.values() if isinstance(model.names, dict) else model.names)
        size = int(trained.get("imgsz", 640))
    except Unusable:
        raise
    except Exception as error:  # another file can make the unpickler raise anything
        why = f"{type(error).__name__}: {brief(error)}"
        if yolov5_folder(path, yolov5) is None:
            why += " (for YOLOv5's code type --yolov5 and the folder of a clone, or pip install yolov5)"
        raise Unusable(f"--weights is {path}, but a YOLOv5 checkpoint is expected: {why}") from error
    if masks:
        raise Unusable(f"--weights is {path}, a YOLOv5 segmentation model, but one that detects is expected")
    return model, names, size


def save(detector: nn.Module, size: int, names: list[str], path: Path) -> None:
    """Write the TorchScript file, with the image size and class names inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps({"size": size, "names": names})
    script = torch.jit.script(detector)
    with open(path, "wb") as file:  # says what is wrong with the path; torch.jit.save's own message does not name it
        torch.jit.save(script, file, _extra_files={"detector.json": about})


def package(detector: Detector, image: Tensor, path: Path, **options) -> None:
    """Write an AOTInductor package for images of this shape on this device; ``options`` are Inductor's."""
    with torch.no_grad():
        program = torch.export.export(detector, (image,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def export(detector: Detector, image: Tensor, folder: Path, names: list[str] | None = None) -> None:
    """Write detector.ts, images.ts, image.npy and golden/ into ``folder``."""
    names = names or [str(c) for c in range(detector.postprocess.nc)]
    save(detector, image.size(-1), names, folder / "detector.ts")
    images = ImageDetector(detector.network, detector.postprocess, image.size(-1)).eval()
    save(images, image.size(-1), names, folder / "images.ts")
    np.save(folder / "image.npy", image.numpy())
    post = detector.postprocess
    with torch.inference_mode():
        heads = detector.network(image)
        stages = golden.yolov5_stages(
            heads, post.anchors, post.strides, post.conf_thres, post.iou_thres, max_det=post.max_det
        )
    del stages["candidates"]
    golden.save(folder / "golden", stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=folder, required=True, help="folder to write into")
    parser.add_argument(
        "--weights", type=existing, help="YOLOv5 checkpoint; without, a small network with random weights"
    )
    parser.add_argument("--yolov5", metavar="FOLDER", help="the clone of YOLOv5 with the checkpoint's code")
    parser.add_argument("--aoti", action="store_true", help="write detector.pt2, an AOTInductor package, too")
    parser.add_argument("--img", type=int, default=320, help="height and width of the image")
    parser.add_argument("--conf", type=float, default=0.25, help="confidence threshold")
    options = parser.parse_args()
    if options.img < 32 or options.img % 32:
        parser.error(f"--img is {options.img}, but a multiple of 32 is expected")
    if not 0 <= options.conf <= 1:
        parser.error(f"--conf is {options.conf}, but a threshold between 0 and 1 is expected")
    options.out.mkdir(parents=True, exist_ok=True)
    image = torch.rand(1, 3, options.img, options.img, generator=torch.Generator().manual_seed(1))
    names = None
    if options.weights:
        model, names, _ = load_yolov5(options.weights, options.yolov5)
        detector = yolov5_detector(model, image, conf_thres=options.conf)
        eager = eager_yolov5_detector(model, conf_thres=options.conf)
    else:
        detector = eager = small_detector(conf_thres=options.conf)
    export(detector, image, options.out, names)
    print(f"wrote detector.ts, images.ts, image.npy and golden/ into {options.out}")
    if options.aoti:
        package(eager, image, options.out / "detector.pt2")
        print(f"wrote detector.pt2 into {options.out}")


if __name__ == "__main__":
    run(main)
