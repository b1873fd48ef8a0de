"""The commands that the pages tell a user of Ultralytics to type run, with a small data set under the pages' names."""

import re
import shlex

import pytest

from tests import starter
from tests.conftest import TWO_GPUS, gpus_missing
from tests.test_readme import OF_ULTRALYTICS, YOLO, all_commands

COMMANDS = [
    pytest.param(c, marks=TWO_GPUS if "device=" in c else pytest.mark.cpu) for c in all_commands(OF_ULTRALYTICS)
]
#: Arguments appended to a command, so that it trains one short epoch. On the CPU, unless the command names GPUs.
SHORT = {
    "train": "epochs=1 imgsz=64 batch=2 workers=0 plots=False",
    "val": "imgsz=64 workers=0 plots=False",
    "predict": "imgsz=64",
    "track": "imgsz=64",
}
FILES = """
import cv2
for name in ("yolo11n", "yolo11n-seg"):
    YOLO(f"{name}.yaml").save(f"{name}.pt")
Path("mine.yaml").write_text(Path("coco8.yaml").read_text())
film = cv2.VideoWriter("street.mp4", cv2.VideoWriter_fourcc(*"mp4v"), 10, (128, 96))
for i in range(4):
    film.write(np.full((96, 128, 3), 20 * i, np.uint8))
film.release()
"""
#: This starts the training that the command resumes, and ends it as its second epoch begins.
STOPPED = """
import os, sys
from torch_fastdet.ultralytics.launcher import main
from ultralytics.utils.callbacks.base import default_callbacks
default_callbacks["on_train_epoch_start"].append(lambda trainer: trainer.epoch and os._exit(3))
main()
"""
START = f"train model=yolo11s.yaml data=coco8.yaml --fastdet --resume_exact {SHORT['train']} epochs=2 exist_ok=True device=cpu"


@pytest.fixture(scope="module")
def folder(ultralytics_environment, tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    result = starter.python(["-c", YOLO + FILES], made, ultralytics_environment, seconds=100)
    assert result.returncode == 0, result.stdout[-3000:]
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, folder, ultralytics_environment):
    gpus = "device=" in command
    if gpus and (reason := gpus_missing()):
        pytest.skip(reason)
    environment = ultralytics_environment | ({"NCCL_NVLS_ENABLE": "0"} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    arguments = shlex.split(command)[1:]
    if "resume" in arguments:
        start = [*START.split(), f"project={folder}/runs/detect"]  # where it is outside of tests, too
        started = starter.python(["-c", STOPPED, *start], folder, environment, seconds=300)
        assert started.returncode == 3, started.stdout[-3000:]
    elif arguments[2] in SHORT:
        arguments += SHORT[arguments[2]].split() + ["device=cpu"] * (not gpus)
    result = starter.python(arguments, folder, environment, seconds=300)
    needs_gpu = re.search(r"--(bn_act_optim|cuda_graph)", command)
    assert result.returncode == (2 if needs_gpu else 0), result.stdout[-3000:]
    assert "torch_fastdet" in result.stdout, result.stdout[-3000:]
    goes_on = "resume_exact: the training goes on from" in result.stdout
    assert ("resume" in arguments) == goes_on, result.stdout[-3000:]
