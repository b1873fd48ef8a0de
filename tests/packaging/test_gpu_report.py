"""A GPU report speaks of the sources alone, names what failed, and does not pass for a run that tested nothing."""

import json

import pytest

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
