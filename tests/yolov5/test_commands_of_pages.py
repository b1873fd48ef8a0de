"""The commands that the pages tell a user of YOLOv5 to type run, with a small model and data set under the pages' names."""

import re
import shlex
import shutil

import pytest
import torch

from tests import starter
from tests.conftest import TWO_GPUS, gpus_missing
from tests.test_readme import OF_YOLOV5, all_commands
from tests.yolov5.conftest import IMAGE

#: Arguments appended to a command, so that it trains one short epoch. On the CPU, unless the command names GPUs.
SHORT = {
    "train.py": f"--epochs 1 --img {IMAGE} --batch 4 --workers 0 --cfg yolov5n.yaml --noautoanchor --noplots --exist-ok",
    "val.py": f"--img {IMAGE} --batch 4 --workers 0",
    "segment/val.py": f"--img {IMAGE} --batch 4 --workers 0",
    "detect.py": f"--img {IMAGE}",
}
COMMANDS = [pytest.param(c, marks=TWO_GPUS if "--device" in c else pytest.mark.cpu) for c in all_commands(OF_YOLOV5)]
MODELS = """
import sys, torch
from models.yolo import DetectionModel, SegmentationModel
torch.manual_seed(0)
for file, made in (("yolov5s.pt", DetectionModel("models/yolov5n.yaml", nc=2)), ("yolov5s-seg.pt", SegmentationModel("models/segment/yolov5n-seg.yaml", nc=2))):
    made.nc, made.names = 2, {0: "blue", 1: "red"}
    torch.save({"model": made.half(), "ema": None, "optimizer": None, "epoch": -1, "best_fitness": None, "opt": {}, "date": None}, file)
"""
#: This turns a training of one epoch into one that stopped after the first of two.
STOPPED = """
import torch, yaml
from pathlib import Path
last, options = Path("runs/train/exp/weights/last.pt"), Path("runs/train/exp/opt.yaml")
torch.save(torch.load(last, weights_only=False) | {"epoch": 0}, last)
options.write_text(yaml.safe_dump(yaml.safe_load(options.read_text()) | {"epochs": 2}))
"""


@pytest.fixture(scope="module")
def clone(real_yolov5, data):
    """Make YOLOv5's own folder layout, with the weights, images and data files that the pages name."""
    checkout = real_yolov5("checkout")
    checkout.python("-c", MODELS)
    for name in ("coco.yaml", "mine.yaml"):
        shutil.copy(data.segments, checkout.folder / name)
    shutil.copytree(data.images, checkout.folder / "images")
    return checkout


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, clone):
    gpus = "--device" in command
    if gpus and (reason := gpus_missing()):
        pytest.skip(reason)
    given, _, words = command.replace("torchrun", "python -m torch.distributed.run").partition("python ")
    arguments, device = shlex.split(words), [] if gpus else ["--device", "cpu"]
    environment = clone.environment | ({"NCCL_NVLS_ENABLE": "0"} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    if "--resume" in arguments:
        start = f"-m torch_fastdet.yolov5 train.py --data coco.yaml --weights yolov5s.pt {SHORT['train.py']}"
        for program in ([*start.split(), *device], ["-c", STOPPED]):
            starter.python(program, clone.folder, environment, seconds=300)
    elif "doctor" not in arguments:
        arguments += SHORT[next(word for word in arguments if word.endswith(".py"))].split() + device
    environment |= dict(word.split("=") for word in given.split())
    result = starter.python(arguments, clone.folder, environment, seconds=300)
    needs_gpu = re.search(r"--(bn_act_optim|channels_last|cuda_graph)", command) and not torch.cuda.is_available()
    assert result.returncode == (2 if needs_gpu else 0), result.stdout[-3000:]
    assert ("--resume" in arguments) == ("Resuming training from" in result.stdout), result.stdout[-3000:]
    assert ("torch_fastdet" in result.stdout) == ("LOG=quiet" not in command), result.stdout[-3000:]
