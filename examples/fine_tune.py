"""Fine-tune a detector on your own images with torch_fastdet, in YOLOv5 or in Ultralytics.

    python -m examples.fine_tune --data mine.yaml                                     # Ultralytics, from yolo11n.pt
    python -m examples.fine_tune --data mine.yaml --host yolov5 --weights yolov5s.pt
    python -m examples.fine_tune --draw 64 --out build/shapes --weights yolo11n.yaml  # no images at hand: drawn shapes

--data is the file that both frameworks read: the places of images and labels, and the class names (docs/index.md).
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import Unusable, folder, positive, run
from examples.train_step import NAMES, draw_image
from examples.yolov5_env import environment


def draw_data(folder: Path, count: int) -> Path:
    """Draw images of shapes with labels for both frameworks, a fifth for validation. Return the data set's file."""
    rng = np.random.default_rng(0)
    for index in range(count):
        split = "val" if index % 5 == 4 else "train"
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        image, labels = draw_image(rng)
        image.save(folder / f"images/{split}/{index:04d}.jpg", quality=95)
        rows = "".join(" ".join(map(str, row)) + "\n" for row in labels)
        (folder / f"labels/{split}/{index:04d}.txt").write_text(rows)
    data = folder / "data.yaml"
    data.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames: {NAMES}\n")
    return data


def with_ultralytics(data: Path, weights: str, epochs: int, size: int, out: Path, device: str | None = None) -> Path:
    """Train, validate and return the best checkpoint. Two lines are torch_fastdet's, the rest Ultralytics' own."""
    from torch_fastdet.ultralytics import patch

    patch()
    from ultralytics import YOLO

    model = YOLO(weights)
    model.train(
        data=str(data),
        epochs=epochs,
        imgsz=size,
        device=device,
        project=str(out.resolve()),
        name="train",
        exist_ok=True,
    )
    metrics = model.val(
        data=str(data), imgsz=size, device=device, project=str(out.resolve()), name="val", exist_ok=True
    )
    print(f"mAP50 {metrics.box.map50:.3f}, mAP50-95 {metrics.box.map:.3f}")
    return out / "train/weights/best.pt"


def yolov5_command(data: Path, weights: str, epochs: int, size: int, out: Path, script: str = "") -> list[str]:
    """Return the command to type: train.py (or ``script``, a checkout's) after ``python -m torch_fastdet.yolov5``."""
    start = [script] if script else ["-m", "yolov5.train"]
    model = ["--weights", weights] if weights.endswith(".pt") else ["--weights", "", "--cfg", weights]
    words = [
        "--data",
        str(data),
        *model,
        "--epochs",
        str(epochs),
        "--img",
        str(size),
        "--project",
        str(out),
        "--name",
        "train",
    ]
    return [sys.executable, "-m", "torch_fastdet.yolov5", "--fastdet", *start, *words, "--exist-ok"]


def with_yolov5(
    data: Path, weights: str, epochs: int, size: int, out: Path, device: str | None = None, script: str = ""
) -> Path:
    """Train with train.py, which also validates, and return the best checkpoint."""
    command = yolov5_command(data, weights, epochs, size, out, script)
    if device is not None:
        command += ["--device", device]
    # PyPI's package is of 2023 and needs stand-ins with a current PyTorch; a clone does not.
    if subprocess.run(command, env=None if script else environment(out / "environment")).returncode:
        raise Unusable("train.py ended with an error, which stands above")
    return out / "train/weights/best.pt"


def next_command(host: str, best: Path, out: Path, size: int, script: str = "") -> str:
    """Return the next command to type, which makes a detector of the checkpoint, or draws its detections."""
    if host == "ultralytics":
        return shlex.join(["python", "-m", "examples.draw", str(best), "images/", "--out", f"{out}/drawn"])
    clone = ["--yolov5", str(Path(script).resolve().parent)] if script else []
    words = ["--weights", str(best), *clone, "--img", str(size), "--out", f"{out}/detector"]
    return shlex.join(["python", "-m", "examples.export", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--data", type=Path, help="the file that describes your images")
    chosen.add_argument("--draw", type=positive, help="draw so many images of shapes instead")
    parser.add_argument("--host", choices=["ultralytics", "yolov5"], default="ultralytics")
    parser.add_argument("--weights", help="where to begin: a .pt file, or a .yaml model from scratch")
    parser.add_argument("--script", default="", help="YOLOv5: train.py of a checkout (default: PyPI's package)")
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--img", type=positive, default=640, help="pixels")
    parser.add_argument("--device", help="cpu, 0, ... (default: the first GPU, or the CPU)")
    parser.add_argument("--out", type=folder, default=Path("runs/fine_tune"))
    options = parser.parse_args()
    data = options.data or draw_data(options.out / "data", options.draw)
    if not data.is_file():
        raise Unusable(f"there is no file {data}")
    if options.host == "yolov5":
        weights = options.weights or "yolov5s.pt"
        best = with_yolov5(data, weights, options.epochs, options.img, options.out, options.device, options.script)
    else:
        best = with_ultralytics(
            data, options.weights or "yolo11n.pt", options.epochs, options.img, options.out, options.device
        )
    print(f"trained: {best}")
    print(f"next: {next_command(options.host, best, options.out, options.img, options.script)}")


if __name__ == "__main__":
    run(main)
