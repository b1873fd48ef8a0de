"""Provide a tiny data set and short runs of the real YOLOv5 to the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import some_slow
from tests.yolov5 import real

IMAGE = 64
SMALL = ("--img", IMAGE, "--batch", 2, "--workers", 0, "--device", "cpu")
TRAIN = (*SMALL, "--weights", "", "--epochs", 2, "--noautoanchor", "--noplots", "--seed", 1)


@pytest.fixture(scope="session")
def real_yolov5(tmp_path_factory):
    """Return a function that makes each layout of the real YOLOv5 once, by its name."""
    if reason := real.missing():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("yolov5")
    made: dict[str, real.YOLOv5] = {}

    def make(layout: str) -> real.YOLOv5:
        if layout not in made:
            made[layout] = real.make(layout, root)
        return made[layout]

    return make


@pytest.fixture(params=["package", *some_slow(["head"], ()), *some_slow(["checkout"], (), pytest.mark.nightly)])
def yolov5(request, real_yolov5) -> real.YOLOv5:
    """Run the test once in each layout. `make test` runs only PyPI's package."""
    return real_yolov5(request.param)


@dataclass
class Data:
    """Hold 8 + 4 images with red and blue rectangles, labelled as boxes and as polygons."""

    boxes: Path  # a data.yaml
    segments: Path  # another
    images: Path


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Data:
    import numpy as np
    from PIL import Image, ImageDraw

    root = tmp_path_factory.mktemp("data")
    for task in ("boxes", "segments"):
        generator = np.random.default_rng(0)
        for split, count in (("train", 8), ("val", 4)):
            images, labels = root / task / "images" / split, root / task / "labels" / split
            images.mkdir(parents=True)
            labels.mkdir(parents=True)
            for index in range(count):
                image = Image.fromarray(generator.integers(0, 90, (IMAGE, IMAGE, 3), dtype=np.uint8))
                draw, rows = ImageDraw.Draw(image), []
                for _ in range(3):
                    w, h = generator.integers(12, 30, 2)
                    x, y = generator.integers(0, IMAGE - w), generator.integers(0, IMAGE - h)
                    label = int(generator.integers(0, 2))
                    draw.rectangle((x, y, x + w - 1, y + h - 1), fill=[(60, 60, 230), (230, 60, 60)][label])
                    box = (x + w / 2, y + h / 2, w, h)
                    polygon = (x, y, x + w, y, x + w, y + h, x, y + h)
                    numbers = box if task == "boxes" else polygon
                    rows.append(" ".join([str(label), *(f"{number / IMAGE:.6f}" for number in numbers)]))
                image.save(images / f"{index}.png")
                (labels / f"{index}.txt").write_text("\n".join(rows))
        (root / f"{task}.yaml").write_text(
            f"path: {root / task}\ntrain: images/train\nval: images/val\nnc: 2\nnames: [blue, red]\n"
        )
    return Data(root / "boxes.yaml", root / "segments.yaml", root / "boxes" / "images" / "val")


@dataclass
class Run:
    folder: Path
    output: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / "weights" / "last.pt"


@pytest.fixture(scope="session")
def train(tmp_path_factory, data):
    """Return a function that trains for eight iterations, once for each distinct command."""
    made: dict[tuple, Run] = {}
    project = tmp_path_factory.mktemp("runs")

    def train(yolov5: real.YOLOv5, *flags: str, script: str = "train", stock: bool = False) -> Run:
        key = (yolov5.layout, script, stock, *flags)
        if key not in made:
            segments = script.startswith("segment")
            arguments = [*TRAIN, "--data", data.segments if segments else data.boxes]
            arguments += ["--cfg", "yolov5n-seg.yaml" if segments else "yolov5n.yaml"]
            name = f"run{len(made)}"
            start = yolov5.stock if stock else yolov5.fast
            output = start(script, *arguments, "--project", project, "--name", name, *flags).stdout
            made[key] = Run(project / name, output)
        return made[key]

    return train


SCRIPT = """
import argparse, json, multiprocessing, os, sys
{path}
from utils.loss import bbox_iou


def forty_two(queue):
    queue.put(42)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, help="the script's own epochs")
    parser.add_argument("--exit", type=int, default=0)
    opt = parser.parse_args()
    spawned = None
    if opt.epochs:
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=forty_two, args=(queue,))
        process.start()
        spawned = queue.get()
        process.join()
    main = sys.modules["__main__"]
    state = dict(
        argv=sys.argv,
        path0=sys.path[0],
        file=__file__,
        package=__package__,
        spec=getattr(__spec__, "name", None),
        loader=type(__loader__).__name__,
        cached=__cached__,
        is_main=vars(main) is globals(),
        spawned=spawned,
        rank=[os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        bbox_iou=bbox_iou.__module__,
    )
    print(json.dumps(state))
    sys.exit(opt.exit)
"""


class FakeYOLOv5:
    """Hold a checkout of a few lines, which starts quickly."""

    def __init__(self, folder: Path) -> None:
        import os

        self.folder = folder
        self.environment = real.with_torch_fastdet(dict(os.environ))
        above = "sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))"
        files = {
            "utils/__init__.py": "",
            "utils/metrics.py": (
                "def bbox_iou(box1, box2, xywh=True, GIoU=False, DIoU=False, CIoU=False, eps=1e-7):\n"
                "    from tests.references import bbox_iou as reference  # which imports torch\n\n"
                "    return reference.bbox_iou(box1, box2, xywh, GIoU, DIoU, CIoU, eps)\n"
            ),
            "utils/loss.py": "from utils.metrics import bbox_iou\n",
            "models/__init__.py": "",
            "models/yolo.py": "",
            "train.py": SCRIPT.format(path=""),
            "segment/__init__.py": "",
            "segment/train.py": SCRIPT.format(path=above),
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def hide_package(self) -> None:
        """Hide PyPI's yolov5 from imports even if it is installed."""
        hidden = self.folder.parent / "hidden"
        hidden.mkdir()
        (hidden / "yolov5.py").write_text("")
        self.environment["PYTHONPATH"] = f"{hidden}:{self.environment['PYTHONPATH']}"

    def python(self, *arguments: object, code: int = 0, folder: Path | None = None, **environment: str):
        environment = {**self.environment, **environment}
        result = real.python(*arguments, folder=folder or self.folder, environment=environment, ok=False)
        assert result.returncode == code, result.stdout
        return result


@pytest.fixture
def fake_yolov5(tmp_path) -> FakeYOLOv5:
    return FakeYOLOv5(tmp_path / "checkout")
