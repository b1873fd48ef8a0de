"""Train one rank with the real trainer, with or without ``cuda_graph``, and write FOLDER/<name>/<rank>.json. Started by torchrun.

    torchrun --nproc_per_node 2 tests/ultralytics/programs/ranks.py gloo|nccl DATA FOLDER stock|graphed MODEL

gloo runs on the CPU. The trainer accepts several devices only if they are GPUs, so tests/graphs/fake_gpu.py stands in for them.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ultralytics.models.rtdetr.train import RTDETRTrainer
from ultralytics.models.yolo.detect import DetectionTrainer

from tests.graphs import fake_gpu
from torch_fastdet.patching import switch
from torch_fastdet.switches.cuda_graph import ultralytics as training
from torch_fastdet.ultralytics import patch

BACKEND, DATA, FOLDER, KIND, MODEL = sys.argv[1:]
TRANSFORMER = "rtdetr" in MODEL
Trainer = RTDETRTrainer if TRANSFORMER else DetectionTrainer
RANK, SIZE = os.environ["RANK"], int(os.environ["WORLD_SIZE"])


class OnTheCpu(Trainer):
    """Trainer that does on the CPU what the original does on several GPUs."""

    def __init__(self, overrides):
        super().__init__(overrides=overrides)
        self.world_size = SIZE

    def _setup_ddp(self):
        dist.init_process_group("gloo")

    def final_eval(self):
        """Skip the final evaluation, which would take this rank's GPU whatever the trainer's device is."""


def without_devices(init):
    return lambda ddp, module, device_ids, **keywords: init(ddp, module, **keywords)


monkeypatch = pytest.MonkeyPatch()
if BACKEND == "gloo":
    monkeypatch.setattr(DistributedDataParallel, "__init__", without_devices(DistributedDataParallel.__init__))
if BACKEND == "gloo" and KIND == "graphed":
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
    monkeypatch.setattr(training, "obstacle_in_training", lambda *_: None)
if KIND == "graphed":
    patch(cuda_graph=True, channels_last=True, loss_optim=TRANSFORMER)

settings = {
    "model": f"{MODEL}.yaml",
    "data": DATA,
    "imgsz": 64,
    "epochs": 2,
    "batch": 8,  # of 16 images, on both ranks together
    "nbs": 16,  # gradients of two batches add up
    "workers": 0,
    "optimizer": "SGD",
    "warmup_epochs": 0,
    "freeze": [0],
    "amp": False,
    "device": "cpu" if BACKEND == "gloo" else ",".join(map(str, range(SIZE))),
    "plots": False,
    "verbose": False,
    "project": FOLDER,
    "name": f"{KIND}-training",
    "exist_ok": True,
}
trainer = (OnTheCpu if BACKEND == "gloo" else Trainer)(overrides=settings)
losses = []
trainer.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
trainer.train()
parameters = {name: float(p.detach().double().abs().sum()) for name, p in trainer.model.named_parameters()}
average = {name: float(v.double().abs().sum()) for name, v in trainer.ema.ema.state_dict().items()}
folder = Path(FOLDER, KIND)
folder.mkdir(exist_ok=True)
(folder / f"{RANK}.json").write_text(
    json.dumps({"losses": losses, "parameters": parameters, "average": average, "ddp": type(trainer.model).__name__})
)
