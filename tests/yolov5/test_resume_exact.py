"""Stopped or killed, and resumed with ``resume_exact``, train.py has the bits of a training that ran to its end."""

import json
import re

import pytest

from tests.resume import limits
from tests.yolov5.conftest import TRAIN

pytestmark = pytest.mark.slow
# The first event of a process is the start of the scheduler, the second the end of its first epoch. Then come four of last.pt and the file
# beside it, and two each of best.pt and of the epoch's own file.
KILLS = {"while it writes the file beside last.pt, in its second epoch": 11, "between that file and last.pt": 5}


@pytest.fixture
def trainings(real_yolov5, data, tmp_path):
    """Return a function that trains in one run and with stopped processes, and returns both folders and each one's output."""
    checkout = real_yolov5("checkout")
    arguments = [*TRAIN, "--cfg", "yolov5n.yaml", "--data", data.boxes, "--project", tmp_path, "--save-period", 1]

    def train(epochs, device, ends, *options):
        folders, outputs = [tmp_path / "once", tmp_path / "ended"], []
        for folder, all_ends in zip(folders, ([None], [*ends, None])):
            begin = ["--device", device, "--workers", 2, "--epochs", epochs, "--name", folder.name]
            begin, printed = [*arguments, *begin, *options], []
            for end in all_ends:
                environment = {end[0]: str(end[1])} if end else {}
                checkout.environment.update(environment)
                result = checkout.program("killed.py", "train.py", *begin, "--fastdet", "--resume_exact", ok=False)
                list(map(checkout.environment.pop, environment))
                code = {"KILL": -9, "STOP": 1}[end[0]] if end else 0
                assert result.returncode == code, result.stdout[-3000:]
                printed.append(result.stdout)
                begin = ["--resume", folder / "weights/last.pt"]
            outputs.append(printed)
        return *folders, *outputs

    return train


def same_training(checkout, epochs, once, ended):
    assert (ended / "results.csv").read_text() == (once / "results.csv").read_text(), (
        "rows of epochs that were not saved"
    )
    names = [f"weights/epoch{epochs - 1}.pt", "weights/last.pt"]
    found = checkout.program("compare.py", *(folder / name for name in names for folder in (once, ended))).stdout
    assert found.splitlines()[-1] == "the same", found
    assert not list((ended / "weights").glob("*.resume")), "nothing can be resumed any more"


def saved(outputs):
    """Return what each process has saved: checksums of weights, gradients, optimizer, scaler, moving average, random states and so on."""
    return [[json.loads(state) for state in re.findall("^SAVED (.*)$", output, flags=re.M)] for output in outputs]


@pytest.mark.parametrize("gpu", ["cpu", "cuda"])
def test_stopped_training_has_the_bits_of_one_run(real_yolov5, trainings, gpu, request):
    """Four epochs equal two epochs, Ctrl-C, --resume and two more."""
    if gpu == "cuda":
        request.getfixturevalue("cuda")
    once, ended, *outputs = trainings(4, "0" if gpu == "cuda" else "cpu", [("STOP", 2)], "--multi-scale")
    same_training(real_yolov5("checkout"), 4, once, ended)
    (whole,), (first, second) = map(saved, outputs)
    assert len(first) == len(second) == 2 and first + second == whole
    parts = {"model", "ema", "optimizer", "scaler", "random", "table"}
    assert all(parts <= state.keys() for state in whole)
    kinds = {part: len({state[part] for state in whole}) for part in parts}
    assert kinds["model"] == kinds["table"] == 4 and min(kinds["optimizer"], kinds["ema"], kinds["random"]) > 2, kinds


def test_killed_training_ends_with_the_bits_of_one_run(real_yolov5, trainings):
    once, ended, _, outputs = trainings(3, "cpu", [("KILL", kill) for kill in KILLS.values()])
    same_training(real_yolov5("checkout"), 3, once, ended)
    assert [len(re.findall("resume_exact: the training goes on from", output)) for output in outputs] == [0, 1, 1]
    assert not any("resumes as without the switch" in output for output in outputs)


@pytest.mark.nightly
def test_training_that_was_over_is_not_trained_on(real_yolov5, trainings):
    """The process is killed after the last epoch's files, before last.pt is stripped. Early stopping leaves the same files."""
    once, ended, _, outputs = trainings(1, "cpu", [("KILL", 11)])
    same_training(real_yolov5("checkout"), 1, once, ended)
    assert "the training was over when it was killed, and ends now" in outputs[1]


@pytest.mark.nightly
def test_training_and_resume_under_limits(real_yolov5, trainings, tmp_path):
    checkout = real_yolov5("checkout")
    with limits(checkout.environment, tmp_path):
        once, ended, *outputs = trainings(3, "cpu", [("STOP", 1)])
    same_training(checkout, 3, once, ended)
    (whole,), (first, second) = map(saved, outputs)
    assert len(whole) == 3 and first + second == whole


def test_killed_training_ends_with_the_bits_of_one_run_on_the_gpu(real_yolov5, trainings, cuda):
    once, ended, *_ = trainings(3, "0", [("KILL", 11)])
    same_training(real_yolov5("checkout"), 3, once, ended)
