"""Train yolov5n on a few images until it finds them, and save an original checkpoint: overfit.py PREFIX DATA OUT [TASK].

Batch statistics are computed over all images after the first third of the steps, and stay fixed from then on.
"""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

prefix, data, out = sys.argv[1:4]
STEPS = 90
yolo = importlib.import_module(f"{prefix}models.yolo")
loss = importlib.import_module(f"{prefix}utils.loss")
content = yaml.safe_load(Path(data).read_text())
folder = Path(content["path"])
images, targets = [], []
for index, path in enumerate(sorted((folder / content["train"]).iterdir())):
    images.append(np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1))
    text = (folder / content["train"].replace("images", "labels") / f"{path.stem}.txt").read_text()
    targets += [[index, *map(float, line.split())] for line in text.splitlines()]
batch, targets = torch.from_numpy(np.stack(images)).float() / 255, torch.tensor(targets)

torch.manual_seed(0)
model = yolo.Model(str(Path(yolo.__file__).parent / "yolov5n.yaml"), nc=len(content["names"])).train()
model.names = [
    str(name) for name in (content["names"].values() if isinstance(content["names"], dict) else content["names"])
]
model.nc = len(content["names"])
model.hyp = {"cls_pw": 1.0, "obj_pw": 1.0, "fl_gamma": 0.0, "box": 0.05, "obj": 1.0, "cls": 2.0, "anchor_t": 4.0}
compute_loss = loss.ComputeLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
for step in range(STEPS):
    if step == STEPS // 3:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = 1.0
        with torch.no_grad():
            model(batch)
        for norm in norms:
            norm.eval()
    optimizer.param_groups[0]["lr"] = 3e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / STEPS)) / 2)
    optimizer.zero_grad()
    total, items = compute_loss(model(batch), targets)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
    optimizer.step()
print(f"losses {items.tolist()}")
for norm in norms:
    norm.momentum = 0.03
torch.save({"epoch": -1, "best_fitness": None, "ema": None, "model": model.eval().half(), "optimizer": None}, out)
