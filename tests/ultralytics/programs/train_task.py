"""Trains yolov8n-seg, -pose or -obb on the digits from scratch, with stock's loss or ours; prints the losses of each epoch.

The labels are octagons inside of the digits' boxes, the boxes' corners as keypoints, or rhombs inside of the boxes.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from ultralytics import YOLO

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("task", choices=("seg", "pose", "obb"))
parser.add_argument("--patch", action="store_true")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()

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
        lines.append(f"{label} " + " ".join(shapes[options.task]))
    file.write_text("\n".join(lines) + "\n")
text = Path(options.data).read_text().replace(str(source), str(target))
data = target / "task.yaml"
data.write_text(text + ("\nkpt_shape: [4, 3]\nflip_idx: [1, 0, 3, 2]\n" if options.task == "pose" else "\n"))

replaced = ()
if options.patch:
    from torch_fastdet.ultralytics import patch

    replaced = patch(loss_optim=True)

stock_topk = torch.topk


def topk(values, k, dim=-1, largest=True, **rest):
    """Ties by index, as on a GPU: on the CPU their order is unspecified."""
    if values.is_cuda:
        return stock_topk(values, k, dim=dim, largest=largest, **rest)
    values, indices = values.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


torch.topk = topk
model = YOLO(f"yolov8n-{options.task}.yaml")
losses, criteria = [], []


def at_epoch_end(trainer):
    losses.append({name: float(loss) for name, loss in trainer.tloss.items()})
    criteria.append(f"{type(trainer.model.criterion).__module__}.{type(trainer.model.criterion).__name__}")


model.add_callback("on_train_epoch_end", at_epoch_end)
model.train(
    data=str(data),
    project=options.project,
    imgsz=96,
    epochs=2,
    batch=8,
    workers=0,
    optimizer="SGD",
    lr0=0.002,
    amp=False,
    device=options.device,
    seed=0,
    plots=False,
    verbose=False,
    mosaic=0,
    hsv_h=0,
    hsv_s=0,
    hsv_v=0,
)
print(json.dumps({"losses": losses, "criteria": criteria}))
