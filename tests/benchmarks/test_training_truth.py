"""The comparison of several trainings: what is done again, when it stops, and what the table says."""

import json
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
)

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
