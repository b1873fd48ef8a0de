"""The commands that the pages tell a user of Ultralytics to type run, with a small data set under the pages' names."""

import re
import shlex

import pytest

from tests import starter
from tests.test_readme import OF_ULTRALYTICS, YOLO, all_commands

COMMANDS = all_commands(OF_ULTRALYTICS)
#: Arguments appended to a command, so that it trains one short epoch on the CPU.
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


@pytest.fixture(scope="module")
def folder(ultralytics_environment, tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    result = starter.python(["-c", YOLO + FILES], made, ultralytics_environment, seconds=100)
    assert result.returncode == 0, result.stdout[-3000:]
    return made


@pytest.mark.nightly
@pytest.mark.cpu
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, folder, ultralytics_environment):
    arguments = shlex.split(command)[1:]
    if arguments[2] in SHORT:
        arguments += [*SHORT[arguments[2]].split(), "device=cpu"]
    environment = ultralytics_environment | {"CUDA_VISIBLE_DEVICES": ""}
    result = starter.python(arguments, folder, environment, seconds=300)
    needs_gpu = re.search(r"--(bn_act_optim|cuda_graph)", command)
    assert result.returncode == (2 if needs_gpu else 0), result.stdout[-3000:]
    assert "torch_fastdet" in result.stdout, result.stdout[-3000:]
