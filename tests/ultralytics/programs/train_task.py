"""Train a nano model of a task or a family from scratch on the digits, first without and then with patch(), and print the losses of each
epoch. On a GPU it trains in mixed precision.

The labels are octagons inside the digits' boxes, the boxes' corners as keypoints, or rhombs inside the boxes.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from ultralytics import RTDETR, YOLO

from benchmarks.ultralytics_run import without_downloads
from torch_fastdet.ultralytics import patch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("model", help="as in yolov8n-seg")
parser.add_argument("--device", default="cpu")
parser.add_argument("--unlabelled", action="store_true", help="images without any object")
options = parser.parse_args()
task = options.model.partition("-")[2]

source, target = Path(options.data).parent, Path(options.project, "data")
shutil.copytree(source, target, dirs_exist_ok=True)
for file in target.rglob("*.cache"):
    file.unlink()
for file in target.glob("labels/*/*.txt"):
    lines = []
    for line in file.read_text().splitlines():
        label, x, y, w, h = line.split()
        x, y, w, h = map(float, (x, y, w, h))
        octagon = [(1, 3), (3, 1), (5, 1), (7, 3), (7, 5), (5, 7), (3, 7), (1, 5)]
        octagon_shape = [f"{x + (a / 8 - 0.5) * w} {y + (b / 8 - 0.5) * h}" for a, b in octagon]
        corners = [f"{x + a * w / 2} {y + b * h / 2} 2" for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
        rhomb = [f"{x + a * w / 2} {y + b * h / 2}" for a, b in ((-0.2, -1), (1, -0.2), (0.2, 1), (-1, 0.2))]
        shapes = {"seg": octagon_shape, "pose": [f"{x} {y} {w} {h}", *corners], "obb": rhomb}
        lines.append(f"{label} " + " ".join(shapes[task]) if task in shapes else line)
    file.write_text("" if options.unlabelled else "\n".join(lines) + "\n")
text = Path(options.data).read_text().replace(str(source), str(target))
data = target / "task.yaml"
data.write_text(text + ("\nkpt_shape: [4, 3]\nflip_idx: [1, 0, 3, 2]\n" if task == "pose" else "\n"))

stock_topk = torch.topk


def topk(values, k, dim=-1, largest=True, **rest):
    """Break ties by index as a GPU does, because their order on the CPU is unspecified."""
    if values.is_cuda:
        return stock_topk(values, k, dim=dim, largest=largest, **rest)
    values, indices = values.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


torch.topk = topk
without_downloads()


def train():
    kind = RTDETR if "rtdetr" in options.model else YOLO
    model, losses, criteria = kind(f"{options.model}.yaml"), [], []

    def at_epoch_end(trainer):
        losses.append({name: float(loss) for name, loss in trainer.tloss.items()})
        criterion = trainer.model.criterion
        criteria.append(str(type(getattr(criterion, "one2one", criterion))))

    model.add_callback("on_train_epoch_end", at_epoch_end)
    augmentation = dict.fromkeys(("mosaic", "hsv_h", "hsv_s", "hsv_v"), 0)
    model.train(
        data=str(data),
        project=options.project,
        imgsz=96,
        epochs=2,
        batch=8,
        workers=0,
        optimizer="SGD",
        lr0=0.002,
        amp=options.device != "cpu",
        device=options.device,
        seed=0,
        plots=False,
        verbose=False,
        **augmentation,
    )
    return {"losses": losses, "criteria": criteria}


stock = train()
lines = patch()
print(json.dumps({"stock": stock, "ours": train(), "lines": lines}))
