"""Use a class index that the model does not have, in the last iteration of a training and in the last batch of its validation.

The CPU operator raises such an error at once, so a stand-in delays it: its status arrives when something waits for it.
"""

import argparse
import json

import pytest
import torch
from ultralytics import YOLO

from tests import late_gpu
from torch_fastdet.switches.loss import ultralytics as loss
from torch_fastdet.ultralytics import patch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
ON_CPU = options.device == "cpu"
IMAGES, BATCH = 16, 8  # of training, and of validation in batches twice as large


def make_late(monkeypatch, now):
    stock = loss.TargetStatus.note
    late_gpu.install(monkeypatch)

    def note(state, status, rows):
        if now["bad"]:  # what the operator has for row 0, column 1
            status = torch.tensor([1, (1 << 62) - 1, 0, 0])
        stock(state, status.as_subclass(late_gpu.OnGpu), rows)

    monkeypatch.setattr(loss.TargetStatus, "note", note)


def train(where):
    """Return the error that ends a training of one epoch."""
    now = {"bad": False, "train": 0, "val": 0}
    last = {"train": IMAGES // BATCH, "val": IMAGES // (2 * BATCH)}

    def broken(kind, preprocess):
        def preprocess_batch(batch):
            batch = preprocess(batch)
            now[kind] += 1
            now["bad"] = kind == where and now[kind] == last[kind]
            if now["bad"] and not ON_CPU:
                batch["cls"][0] = 99
            return batch

        return preprocess_batch

    def at_start(trainer):
        trainer.preprocess_batch = broken("train", trainer.preprocess_batch)
        trainer.validator.preprocess = broken("val", trainer.validator.preprocess)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if ON_CPU:
            make_late(monkeypatch, now)
        model = YOLO("yolov8n.yaml")
        model.add_callback("on_train_start", at_start)
        try:
            model.train(
                data=options.data,
                project=options.project,
                name=where,
                imgsz=64,
                epochs=1,
                batch=BATCH,
                workers=0,
                optimizer="SGD",
                amp=False,
                device=options.device,
                val=where == "val",
                plots=False,
                verbose=False,
            )
        except ValueError as error:
            return {"error": str(error), "calls": now}
    return {"error": None, "calls": now}


patch(loss_optim=True)
print(json.dumps({where: train(where) for where in ("train", "val")}))
