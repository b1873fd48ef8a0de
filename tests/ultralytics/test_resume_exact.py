"""A training that was stopped and resumed with ``resume_exact`` has the bits of one that was not."""

import json
import re

import pytest

from tests import starter
from tests.resume import limits
from tests.ultralytics.conftest import PROGRAMS

pytestmark = pytest.mark.slow
OURS = re.compile(r"last\.[0-9a-f]{16}\.resume")


def same_bits(run, stop):
    resumed = run["resumed"][str(stop)]
    assert sorted(resumed["epochs"]) == sorted(run["whole"]), "an epoch is missing"
    differences = {
        (epoch, part): (value, resumed["epochs"][epoch][part])
        for epoch, parts in run["whole"].items()
        for part, value in parts.items()
        if resumed["epochs"][epoch][part] != value
    }
    assert not differences
    assert resumed["rows"] == run["rows"], "results.csv, but for the column of the time"
    assert sum(map(bool, map(OURS.fullmatch, resumed["beside"]))) == 1
    assert resumed["left"] == run["left"] == ["best.pt", "last.pt"]


# A training is stopped where mosaics end; every night also before and after that.
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((4, "--optimizer", "MuSGD"), id="no loader processes"),
        pytest.param((3, 4, 5, "--workers", 2, "--stocks"), id="loader processes of stock", marks=pytest.mark.nightly),
        pytest.param(
            (3, 4, 5, "--workers", 2, "--optimizer", "AdamW", "--pretrained"),
            id="loader processes of ours, pretrained",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_resumed_training_has_the_bits_of_one_run(program, digits, tmp_path, arguments):
    run = program("resume_exact.py", digits, tmp_path, *arguments)
    stops = [stop for stop in arguments if stop in (3, 4, 5)]
    for stop in stops:
        same_bits(run, stop)
    assert run["output"].count("resume_exact: the training goes on from") == len(stops)
    assert len({json.dumps(parts) for parts in run["whole"].values()}) == len(run["whole"]), "nothing is trained"


@pytest.fixture
def train(ultralytics_environment, digits, tmp_path):
    """Run killed.py. Return what each epoch has saved, and what was printed."""

    def run(name, kill=0, *options):
        command = [str(part) for part in (PROGRAMS / "killed.py", digits, tmp_path, name, *options)]
        environment = ultralytics_environment | {"KILL": str(kill)}
        result = starter.python(command, tmp_path, environment, seconds=300, apart=True)
        output = result.stdout + result.stderr
        assert result.returncode == (-9 if kill else 0), output[-3000:]
        return [json.loads(state) for state in re.findall("^SAVED (.*)$", result.stdout, flags=re.M)], output

    return run


def same_end(tmp_path, epochs):
    once, ended = (tmp_path / name for name in ("whole", "killed"))
    without_time = [
        [row.split(",")[:1] + row.split(",")[2:] for row in (folder / "results.csv").read_text().splitlines()]
        for folder in (once, ended)
    ]
    assert without_time[0] == without_time[1] and len(without_time[0]) == 1 + epochs
    left = [sorted(path.name for path in (folder / "weights").iterdir()) for folder in (once, ended)]
    assert left[0] == left[1] and "last.pt" in left[0]


def test_killed_training_ends_with_the_bits_of_one_run(train, tmp_path):
    """SIGKILL ends the second epoch while the file beside last.pt is written, then between that file and last.pt."""
    whole, _ = train("whole")
    # The first saved epoch has eight writes: four of last.pt and the file beside it, two each of best.pt and of its own file.
    killed = [train("killed", kill) for kill in (9, 3, 0)]
    assert ["resume_exact: the training goes on from" in output for _, output in killed] == [False, True, True]
    assert [states for states, _ in killed] == [whole[:2], whole[1:2], whole[1:]]
    assert len({state["model"] for state in whole}) == 3
    same_end(tmp_path, 3)


@pytest.mark.nightly
def test_training_that_was_over_is_not_trained_on(train, tmp_path):
    """The training stops early. The process is killed after that epoch's files, before the end of the training."""
    train("whole", 0, "stop_at=1")
    killed = [train("killed", kill, "stop_at=1") for kill in (8, 0)]
    assert [len(states) for states, _ in killed] == [1, 0]
    assert "the training was over when it was killed, and ends now" in killed[1][1]
    same_end(tmp_path, 1)


@pytest.mark.nightly
def test_training_and_resume_under_limits(program, ultralytics_environment, digits, tmp_path):
    with limits(ultralytics_environment, tmp_path):
        same_bits(program("resume_exact.py", digits, tmp_path, 3, "--workers", 2), 3)


def test_loader_of_ones_own_is_one_line(program, digits, tmp_path):
    errors = program("own_loaders.py", digits, tmp_path)["errors"]
    line = (
        "resume_exact cannot apply: the trainer has a data loader of its own, and one of build_dataloader is expected."
    )
    assert errors == {"plain": line, "sampler": line}


@pytest.mark.nightly
def test_damaged_file_is_one_line_and_stocks_resume(program, digits, tmp_path):
    run = program("resume_exact.py", digits, tmp_path, 3, "--damage", "--stocks")
    line = r"torch_fastdet: resume_exact: the training resumes as without the switch: last\.[0-9a-f]{16}\.resume is damaged\."
    assert len(re.findall(line, run["output"])) == 1
    epochs = run["resumed"]["3"]["epochs"]
    assert sorted(epochs) == sorted(run["whole"])
    assert epochs["3"]["model"] != run["whole"]["3"]["model"], (
        "stock's resume has the same bits, and the file is needless"
    )


def test_resumed_training_has_the_bits_of_one_run_on_the_gpu(program, digits, tmp_path, cuda):
    run = program("resume_exact.py", digits, tmp_path, 3, "--workers", 2, "--device", 0)
    same_bits(run, 3)
