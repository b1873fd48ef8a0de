"""A training that was stopped and resumed with ``resume_exact`` has the bits of one that was not."""

import json
import os
import re
import resource

import pytest

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


# Before mosaics end, where they end, and after.
@pytest.mark.parametrize(
    "arguments",
    [(), ("--workers", 2, "--stocks"), ("--workers", 2, "--optimizer", "AdamW")],
    ids=["no loader processes", "loader processes of stock", "loader processes of ours"],
)
def test_resumed_training_has_the_bits_of_one_run(program, digits, tmp_path, arguments):
    run = program("resume_exact.py", digits, tmp_path, 3, 4, 5, *arguments)
    for stop in (3, 4, 5):
        same_bits(run, stop)
    assert run["output"].count("resume_exact: goes on from") == 3
    assert len({json.dumps(parts) for parts in run["whole"].values()}) == len(run["whole"]), "nothing is trained"


def test_training_and_resume_under_limits(program, ultralytics_environment, digits, tmp_path, monkeypatch):
    """256 open files, two cores, a home that cannot be made, no nvidia-smi on the path, no visible GPU; with loader processes."""
    for name, value in {"HOME": "/proc/nowhere", "PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setitem(ultralytics_environment, name, value)
    before, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        run = program("resume_exact.py", digits, tmp_path, 3, "--workers", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.sched_setaffinity(0, cores)
    same_bits(run, 3)


def test_damaged_file_is_one_line_and_stocks_resume(program, digits, tmp_path):
    run = program("resume_exact.py", digits, tmp_path, 3, "--damage", "--stocks")
    line = r"torch_fastdet: resume_exact: the training resumes as stock's: last\.[0-9a-f]{16}\.resume is damaged\."
    assert len(re.findall(line, run["output"])) == 1
    epochs = run["resumed"]["3"]["epochs"]
    assert sorted(epochs) == sorted(run["whole"])
    assert epochs["3"]["model"] != run["whole"]["3"]["model"], (
        "stock's resume has the same bits, and the file is needless"
    )


def test_resumed_training_has_the_bits_of_one_run_on_the_gpu(program, digits, tmp_path, cuda):
    run = program("resume_exact.py", digits, tmp_path, 3, "--workers", 2, "--device", 0)
    same_bits(run, 3)
