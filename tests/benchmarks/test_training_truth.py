"""The comparison of several trainings: what is done again, when it stops, and what the table says."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import training_truth
from benchmarks.training_truth import (
    FASTDET,
    MAP,
    MAP50,
    NAMES,
    STOCK,
    Settings,
    file_of,
    finished,
    report,
    run_all,
)
from examples.demo import dataset
from examples.demo.training import Progress, Run

SETTINGS = Settings("yolov5n", 2, 64, 48, 16)


def rows(value: float) -> list[dict]:
    return [{"epoch": float(epoch)} | dict.fromkeys(NAMES, value * (epoch + 1) / 2) for epoch in range(2)]


def leave(folder: Path, variant, seed: int, value: float, settings: Settings = SETTINGS) -> None:
    about = {"gpu": "", "cpu": "a CPU", "torch": "2.11.0", "date": "2026-11-21"}
    run = {"variant": variant.name, "seed": seed, "settings": settings.__dict__, **about, "seconds": 60.0, "seconds_an_iteration": 0.05, "replaced": [], "epochs": rows(value)}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, variant, seed).write_text(json.dumps(run))


def test_report_gives_the_difference_with_its_standard_error(tmp_path):
    for seed, (stock, ours) in enumerate([(0.60, 0.61), (0.66, 0.63), (0.63, 0.68)]):
        leave(tmp_path, STOCK, seed, stock)
        leave(tmp_path, FASTDET, seed, ours)
    text = report(tmp_path)
    # sqrt(0.03^2 / 3 + 0.036056^2 / 3)
    assert "| mAP50-95 | 0.6300 | torch_fastdet (3) | 0.6400 | +0.0100 | 0.0271 | +0.4 |" in text
    assert "The lowest mAP50-95 is 0.600 (not above the 0.6" in text and "a CPU, torch 2.11.0, 2026-11-21" in text
    training_truth.plot(tmp_path, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 20_000


def test_runs_of_other_settings_are_refused(tmp_path):
    leave(tmp_path, STOCK, 0, 0.5)
    with pytest.raises(SystemExit, match="name another --out"):
        finished(tmp_path, Settings("yolov5n", 3, 64, 48, 16))


@pytest.fixture
def trainings(tmp_path, monkeypatch):
    """run_all with trainings that only note that they were asked for; the second stock run fails once."""
    pytest.importorskip("yolov5")
    pytest.importorskip("ultralytics")
    begun = []

    def train(variant, data, project, env, machine, epochs, seed, model, batch_size, show):
        begun.append((variant.name, seed))
        if begun.count(("stock", 1)) == 1 and begun[-1] == ("stock", 1):
            raise RuntimeError("train.py ended with exit code 1")
        folder = Path(project, variant.name)
        folder.mkdir(parents=True)
        (folder / "train.log").write_text("WARNING NMS time limit 2.1s exceeded\n")
        return Run(variant, folder, rows(0.7) * (begun.count(("more rows", 0)) + 1), Progress(), 100.0, [])

    monkeypatch.setattr(training_truth, "train", train)
    monkeypatch.setattr(dataset, "make", lambda folder, recipe: Path(folder) / "data.yaml")

    def go(minutes: float = 0.0, jobs: int = 1) -> tuple[bool, list]:
        before = len(begun)
        arguments = Namespace(
            workers=None,
            seeds=2,
            variants=["stock", "fastdet"],
            device="cpu",
            jobs=jobs,
            minutes=minutes,
            work=tmp_path / "work",
        )
        return run_all(arguments, tmp_path / "out", SETTINGS), begun[before:]

    go.begun = begun
    return go


def test_rows_of_two_trainings_are_no_run(trainings, tmp_path, capsys):
    trainings.begun.append(("more rows", 0))  # as if another training had written into the same results.csv
    assert trainings()[0] is False
    assert "rows of the epochs [0.0, 1.0, 0.0, 1.0], but 0 to 1 are expected" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.json"))
    trainings.begun.clear()
    assert trainings(jobs=2)[0] is False and trainings()[0] is True
    assert {path.name for path in (tmp_path / "work").iterdir()} >= {SETTINGS.model}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", ["n", "yolov8n-pose"])
def test_real_trainings_leave_table_and_plot(tmp_path, monkeypatch, capsys, model):
    pytest.importorskip("yolov5")
    pytest.importorskip("ultralytics")
    sizes = ["--small", "--image-size", "64", "--pictures", "32", "--batch-size", "16", "--epochs", "1", "--seeds", "1", "--jobs", "2", "--model", model]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["training_truth", "--device", "cpu", "--out", str(tmp_path / "truth"), "--work", str(tmp_path / "work"), *sizes])  # fmt: skip
    assert training_truth.main() == 0
    runs = finished(tmp_path / "truth")
    assert set(runs) == {("stock", 0), ("fastdet", 0)}
    assert runs["fastdet", 0]["replaced"] and not runs["stock", 0]["replaced"]
    assert all(0 <= run["epochs"][0][name] <= 1 for run in runs.values() for name in (MAP, MAP50))
    text = (tmp_path / "truth.md").read_text()
    assert (tmp_path / "truth.png").exists() and "mAP50-95" in text and ("of keypoints" in text) == (model != "n")
