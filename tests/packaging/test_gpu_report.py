"""A GPU report speaks of the sources alone, names what failed, and does not pass for a run that tested nothing."""

import json
import time
from types import SimpleNamespace

import pytest

from tests import conftest
from tools import gpu_report


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for folder in gpu_report.FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "GENERATED", {tmp_path / "torch_fastdet/include", tmp_path / "torch_fastdet/share"})
    return tmp_path


def results_of(*steps):
    return {name: {"exit": 0, "passed": 3} for name in steps}


def write_report(gpu="g", **changes):
    results = results_of(*gpu_report.STEPS)
    report = {
        "date": "d",
        "gpu": gpu,
        "torch": "t",
        "passed": True,
        "results": results,
        "hashes": gpu_report.tree_hashes(),
    }
    gpu_report.report_path(gpu).write_text(json.dumps(report | changes))


def test_build_outputs_do_not_count(tree):
    before = gpu_report.tree_hashes()
    (tree / "torch_fastdet/include/x").mkdir(parents=True)
    (tree / "torch_fastdet/include/x/copy.h").write_text("")
    (tree / "torch_fastdet/libtorch_fastdet.so").write_text("")
    assert gpu_report.tree_hashes() == before


def test_processes_start_on_different_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(conftest.torch.cuda, "device_count", lambda: 2)
    for worker, order in [("gw0", "0,1"), ("gw3", "1,0")]:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        conftest.spread_over_gpus()
        assert conftest.os.environ["CUDA_VISIBLE_DEVICES"] == order
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    conftest.spread_over_gpus()
    assert conftest.os.environ["CUDA_VISIBLE_DEVICES"] == "1"  # the user's choice stays


@pytest.mark.parametrize("folder", gpu_report.FOLDERS)
def test_a_changed_source_counts(tree, folder, capsys):
    write_report()
    assert gpu_report.check() == 0
    (tree / folder / "a.py").write_text("a = 2\n")
    assert gpu_report.check() == 1
    assert f"{folder} changed since" in capsys.readouterr().out


def test_each_report_has_to_be_of_this_tree(tree, capsys):
    write_report("NVIDIA H200")
    write_report("NVIDIA H100", hashes={})
    assert gpu_report.check() == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "gpu_report-h100.json" in first and "is of another tree: csrc, torch_fastdet, tests changed" in first
    assert "gpu_report-h200.json" in second and second.endswith("is of this tree, and all GPU tests passed")


def test_failed_run(tree, capsys):
    results = results_of(*gpu_report.STEPS[:-1]) | {"pytest": {"exit": 0, "passed": 0}}
    write_report(passed=False, results=results)
    assert gpu_report.check() == 1 and "these steps failed: pytest, synccheck\n" in capsys.readouterr().out


def test_a_report_says_what_was_left_out(tree, capsys):
    left, others = ["memcheck"], results_of(*(step for step in gpu_report.STEPS if step != "memcheck"))
    write_report(results=others, without=left)
    assert gpu_report.check() == 0 and "all GPU tests passed, without memcheck" in capsys.readouterr().out
    assert gpu_report.failed_steps({"results": others, "without": left}) == []
    assert gpu_report.failed_steps({"results": others}) == ["memcheck"]


def test_a_step_out_of_time_is_stopped_with_what_it_started():
    for seconds in (1, 10):  # a busy machine may not have started the shell within the first limit
        steps, started = gpu_report.Steps(seconds), time.monotonic()
        output = steps.run("slow", ["sh", "-c", "trap 'echo stopped; exit 0' INT; echo began; sleep 50"])
        if "began" in output:
            break
    assert time.monotonic() - started < 40 and output.split() == ["began", "stopped"]
    assert steps.results["slow"]["exit"] == 124 and steps.results["slow"]["timed_out"]


PYTEST = """\
ERROR    root:log.py:1 captured output
=========================== short test summary info ============================
SKIPPED [2] tests/ops/test_nms.py:30: no GPU
FAILED tests/ops/test_nms.py::test_many[cuda-a b-c] - AssertionError: assert 1 == 2
ERROR tests/test_ema.py - ModuleNotFoundError: No module named 'x'
1 failed, 3 passed, 2 skipped, 1 error in 0.12s
========= ERROR SUMMARY: 0 errors
"""


def test_counts_and_names_of_failed_tests():
    assert gpu_report.pytest_counts("x\n3 passed, 2 skipped in 63.10s (0:01:03)\n") == {"passed": 3, "skipped": 2}
    assert gpu_report.pytest_counts(PYTEST) == {
        "failed": 1,
        "passed": 3,
        "skipped": 2,
        "error": 1,
        "failed_tests": ["tests/ops/test_nms.py::test_many[cuda-a b-c]", "tests/test_ema.py"],
    }
    googletest = "[  FAILED  ] Nms.Ties (0 ms)\n[  PASSED  ] 40 tests.\n[  FAILED  ] 1 test, listed below:\n[  FAILED  ] Nms.Ties\n"
    assert gpu_report.googletest_counts(googletest) == {"passed": 40, "failed_tests": ["Nms.Ties"]}


def test_findings_of_a_sanitizer():
    output = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at torch_fastdet::kernel(float*)+0x70
=========
1 failed in 3.10s
========= ERROR SUMMARY: 1 error
"""
    found = gpu_report.sanitizer_findings(output)
    assert found["summary"] == "1 error"
    assert [line.strip("= ") for line in found["findings"]] == [
        "Invalid __global__ write of size 4 bytes",
        "at torch_fastdet::kernel(float*)+0x70",
    ]
    assert gpu_report.sanitizer_findings("========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards\n") == {
        "summary": "0 hazards"
    }


@pytest.mark.parametrize(
    "fixtures, parameters, mark",
    [
        (["cuda"], {}, "gpu"),
        (["device"], {"device": "cuda", "dtype": "cpu"}, "gpu"),
        (["gpu", "real_yolov5"], {"gpu": "cuda"}, "gpu"),
        (["device"], {"device": "cpu"}, "cpu"),
        (["gpu"], {"gpu": "fake"}, "cpu"),
        (["yolov5", "real_yolov5"], {"yolov5": "package"}, "cpu"),
        (["tmp_path"], {}, None),
    ],
)
def test_tests_are_marked_by_their_fixtures(fixtures, parameters, mark):
    marks = []
    item = SimpleNamespace(fixturenames=fixtures, add_marker=marks.append, get_closest_marker=lambda name: None)
    item.callspec = SimpleNamespace(params=parameters)
    conftest.mark([item])
    assert marks == [mark] * (mark is not None)
