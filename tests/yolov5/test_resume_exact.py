"""train.py with ``resume_exact``: killed and resumed, it ends with the bits of a training that was not killed."""

import re

import pytest

from tests.yolov5.conftest import TRAIN

pytestmark = pytest.mark.slow
EPOCHS = 3
# The first event of a process is the scheduler's beginning, the second the end of its first epoch. Then come four of last.pt and the
# file beside it, and two of best.pt and of each epoch's own file.
KILLS = {"while it writes the file beside last.pt, in its second epoch": 11, "between that file and last.pt": 5}


@pytest.fixture(scope="module")
def trainings(real_yolov5, data, tmp_path_factory):
    """Trains at once and with kills; the processes of the latter, and both folders."""
    checkout, project = real_yolov5("checkout"), tmp_path_factory.mktemp("exact")
    arguments = [*TRAIN, "--cfg", "yolov5n.yaml", "--data", data.boxes, "--project", project]
    arguments += ["--epochs", EPOCHS, "--save-period", 1]

    def train(device, workers, kills=()):
        flags = ["--fastdet", "--resume_exact"]
        place = ["--device", device, "--workers", workers]
        checkout.program("killed.py", *arguments, *place, "--name", f"once{device}", *flags)
        outputs, begin = [], [*arguments, *place, "--name", f"killed{device}"]
        for kill in (*kills, 0):
            checkout.environment["KILL"] = str(kill)
            result = checkout.program("killed.py", *begin, *flags, ok=not kill)
            assert result.returncode == (-9 if kill else 0), result.stdout[-3000:]
            outputs.append(result.stdout)
            begin = ["--resume", project / f"killed{device}" / "weights/last.pt"]
        del checkout.environment["KILL"]
        return project / f"once{device}", project / f"killed{device}", outputs

    return train


def same_training(checkout, once, killed):
    assert (killed / "results.csv").read_text() == (once / "results.csv").read_text(), (
        "rows of epochs that were not saved"
    )
    names = [f"weights/epoch{EPOCHS - 1}.pt", "weights/last.pt"]
    found = checkout.program("compare.py", *(folder / name for name in names for folder in (once, killed))).stdout
    assert found.splitlines()[-1] == "the same", found
    assert not list((killed / "weights").glob("*.resume")), "nothing can be resumed any more"


def test_killed_training_ends_with_the_bits_of_one_run(real_yolov5, trainings):
    once, killed, outputs = trainings("cpu", 2, KILLS.values())
    same_training(real_yolov5("checkout"), once, killed)
    assert [len(re.findall("resume_exact: goes on from", output)) for output in outputs] == [0, 1, 1]
    assert not any("resumes as stock's" in output for output in outputs)


def test_killed_training_ends_with_the_bits_of_one_run_on_the_gpu(real_yolov5, trainings, cuda):
    once, killed, _ = trainings("0", 2, (11,))
    same_training(real_yolov5("checkout"), once, killed)
