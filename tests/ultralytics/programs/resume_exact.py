"""Train with ``resume_exact``, in one run and stopped and resumed, and print checksums of the whole training state after each epoch."""

import argparse
import contextlib
import json
import random
from pathlib import Path

import numpy as np
import torch
from ultralytics import YOLO

from tests.resume import checksum
from torch_fastdet.switches.resume_exact import state as training
from torch_fastdet.ultralytics import patch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project", type=Path)
parser.add_argument("stops", type=int, nargs="+", help="after how many epochs to stop, for each resumed training")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--device", default="cpu")
parser.add_argument("--model", default="yolov8n.yaml")
parser.add_argument("--pretrained", action="store_true", help="begin with the weights of a file")
parser.add_argument("--damage", action="store_true", help="spoil the file of ours before the resume")
parser.add_argument("--stocks", action="store_true", help="the switch alone, without ours for the steps")
options = parser.parse_args()
EPOCHS, CLOSE_MOSAIC = 6, 2
if options.stocks:
    patch(resume_exact=True)
else:
    patch(fastdet=True, resume_exact=True)


class Stop(Exception):
    """End a training as the loss of its machine would."""


def train(model, stop, **arguments):
    seen = {}

    def at_epoch_end(trainer):
        parts = training.take(trainer.model, trainer.optimizer, trainer.scaler, trainer.ema, trainer.stopper)
        parts |= {f"random numbers of {name}": state for name, state in parts.pop("random").items()}
        seen[trainer.epoch] = {name: checksum(value) for name, value in parts.items()}
        seen[trainer.epoch]["batches"] = checksum([batch.cpu() for batch in batches])
        batches.clear()
        if trainer.epoch + 1 == stop:
            raise Stop

    batches = []

    def at_start(trainer):
        trainer.args.workers = options.workers  # which the trainer takes for none on the CPU
        preprocess = trainer.preprocess_batch

        def noting(batch):
            batches.append(batch["img"])
            return preprocess(batch)

        trainer.preprocess_batch = noting

    model.add_callback("on_pretrain_routine_start", at_start)
    model.add_callback("on_model_save", at_epoch_end)
    with contextlib.suppress(Stop):
        model.train(**arguments)
    rows = (Path(model.trainer.save_dir) / "results.csv").read_text().splitlines()
    return seen, [row.split(",")[:1] + row.split(",")[2:] for row in rows], Path(model.trainer.save_dir) / "weights"


COMMON = {
    "data": options.data,
    "project": str(options.project),
    "imgsz": 64,
    "epochs": EPOCHS,
    "batch": 6,  # of 16 images
    "nbs": 24,  # more than an epoch: gradients are added up over its end
    "close_mosaic": CLOSE_MOSAIC,
    "mosaic": 1.0,
    "mixup": 0.5,
    "multi_scale": 0.5,
    "optimizer": options.optimizer,
    "warmup_epochs": 1,
    "amp": options.device != "cpu",
    "device": options.device,
    "seed": 3,
    "plots": False,
    "verbose": False,
}
if options.pretrained:  # stock loads it over the checkpoint, too, when it resumes
    YOLO(options.model).save(options.project / "pretrained.pt")
    COMMON["pretrained"] = str(options.project / "pretrained.pt")
whole, rows, folder = train(YOLO(options.model), None, name="whole", **COMMON)
results = {"whole": whole, "rows": rows, "left": sorted(path.name for path in folder.iterdir()), "resumed": {}}
for stop in options.stops:
    first, _, folder = train(YOLO(options.model), stop, name=f"stopped{stop}", **COMMON)
    beside = sorted(path.name for path in folder.iterdir())
    if options.damage:
        (ours,) = folder.glob("*.resume")
        data = bytearray(ours.read_bytes())
        data[len(data) // 2] ^= 1
        ours.write_bytes(bytes(data))
    with open(folder.parent / "results.csv", "a") as table:
        table.write("an epoch that was not saved\n")
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    second, rows, folder = train(YOLO(folder / "last.pt"), None, resume=True)
    left = sorted(path.name for path in folder.iterdir())
    results["resumed"][stop] = {"epochs": {**first, **second}, "rows": rows, "beside": beside, "left": left}
print(json.dumps(results))
