"""Train a small model with every switch, and print which objects of its trainer name torch_fastdet in a pickle."""

import json
import pickle
import sys

import torch
from ultralytics import YOLO

from torch_fastdet.ultralytics import patch

patch()
model = YOLO("yolov8n.yaml")
found, kept = {}, {}


def look(trainer):
    objects = dict(vars(trainer), step_by_step=[trainer.optimizer, trainer.ema])
    for name in ("validator", "test_loader"):
        objects |= {f"{name}.{key}": value for key, value in vars(objects.get(name) or object).items()}
    for name, value in objects.items():
        if "._" in name:  # ours, which pickles of the loader leave out
            continue
        try:
            data = pickle.dumps(value)
        except Exception:  # not the original's either: it has lambdas, generators and threads
            continue
        kept[name] = type(value).__name__
        if b"torch_fastdet" in data:
            found[name] = type(value).__name__
    torch.save([trainer.optimizer, trainer.ema, trainer.scaler, trainer.scheduler.state_dict()], sys.argv[3])


model.add_callback("on_train_epoch_end", look)
model.add_callback("on_val_end", lambda validator: kept.update(validated="yes"))
model.train(
    data=sys.argv[1],
    project=sys.argv[2],
    imgsz=32,
    epochs=1,
    batch=8,
    workers=0,
    device="cpu",
    plots=False,
    verbose=False,
)
look(model.trainer)
print(json.dumps({"found": found, "kept": kept}))
