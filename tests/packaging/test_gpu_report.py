"""tests/gpu_report.json speaks of the sources alone, and does not pass for a run that tested nothing."""

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
    monkeypatch.setattr(gpu_report, "REPORT", tmp_path / "tests/gpu_report.json")
    return tmp_path


def write_report(**changes):
    results = {"build": {"exit": 0, "passed": 1}, "pytest": {"exit": 0, "passed": 3}}
    report = {
        "date": "d",
        "gpu": "g",
        "torch": "t",
        "passed": True,
        "results": results,
        "hashes": gpu_report.tree_hashes(),
    }
    gpu_report.REPORT.write_text(json.dumps(report | changes))


def test_build_outputs_do_not_count(tree):
    before = gpu_report.tree_hashes()
    (tree / "torch_fastdet/include/x").mkdir(parents=True)
    (tree / "torch_fastdet/include/x/copy.h").write_text("")
    (tree / "torch_fastdet/libtorch_fastdet.so").write_text("")
    assert gpu_report.tree_hashes() == before


@pytest.mark.parametrize("folder", gpu_report.FOLDERS)
def test_a_changed_source_counts(tree, folder, capsys):
    write_report()
    assert gpu_report.check() == 0
    (tree / folder / "a.py").write_text("a = 2\n")
    assert gpu_report.check() == 1
    assert f"{folder} changed since" in capsys.readouterr().out


def test_no_report(tree, capsys):
    assert gpu_report.check() == 1 and "make test-gpu" in capsys.readouterr().out


def test_failed_run(tree, capsys):
    write_report(passed=False, results={"pytest": {"exit": 0, "passed": 0}})
    assert gpu_report.check() == 1 and "these steps failed: pytest" in capsys.readouterr().out


def test_counts():
    assert gpu_report.pytest_counts("x\n3 passed, 2 skipped in 0.1s\n") == {"passed": 3, "skipped": 2}
