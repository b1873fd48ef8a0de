"""bench_dataset's data set and commands; what they measure is not looked at."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import OURS, Report

bench_dataset = pytest.importorskip("benchmarks.bench_dataset", reason="yolov5 is not installed")
cv2 = pytest.importorskip("cv2")
pytest.importorskip("sklearn")


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_dataset, "WORK", tmp_path)
    monkeypatch.setattr(bench_dataset, "PHOTOGRAPHS", 2)
    return tmp_path


def test_a_data_set_is_hard_links_to_few_photographs(work):
    data = bench_dataset.make_data(5, 90)
    images = sorted((data.parent / "images").iterdir())
    assert len(images) == 5 and len({path.stat().st_ino for path in images}) == 2
    assert cv2.imread(str(images[4])).shape == (480, 640, 3)
    assert [path.with_suffix(".txt").name for path in images] == [
        path.name for path in sorted((data.parent / "labels").iterdir())
    ]
    assert bench_dataset.make_data(5, 90) == data


def test_pictures_may_have_several_sizes(work):
    data = bench_dataset.make_data(3, 90, ((40, 30), (30, 41)))
    shapes = [cv2.imread(str(path)).shape[:2] for path in sorted((data.parent / "images").iterdir())]
    assert shapes == [(30, 40), (41, 30), (30, 40)]


def test_stock_runs_on_fewer_pictures_and_first_epochs_have_rows_of_their_own(work, monkeypatch, capsys):
    seen = []

    def run_train(variant, options, folder, env, show):
        seen.append((variant.title, options[options.index("--data") + 1], env["TORCH_FASTDET_CACHE"]))
        done = {0: {0: 0.0, 1: 0.1, 2: 0.7, 3: 0.9, 4: 5.0}}  # the bar is printed once more at its end
        progress = SimpleNamespace(epoch_seconds=lambda: [0.3, 0.1, 0.2], done=done, batches=4)
        return SimpleNamespace(progress=progress, replaced=("loader_optim: pictures are kept",), folder=folder)

    monkeypatch.setattr(bench_dataset, "run_train", run_train)
    monkeypatch.setattr(bench_dataset, "environment", lambda folder: {})
    report = Report("dataset", torch.device("cpu"), work)
    options = SimpleNamespace(
        model="yolov5s", pictures=4, stock_pictures=2, quality=90, epochs=3, budget="24G", workers=8
    )
    bench_dataset.measure(report, options, 64)
    assert [(title, data.rpartition("dataset-")[2]) for title, data, _ in seen] == [
        ("stock", "640x480-2-q90/data.yaml"),
        (OURS, "640x480-4-q90/data.yaml"),
    ]
    assert {cache for *_, cache in seen} == {"24G"}
    assert "epoch 1: 200.0 ms from batch to batch (median), 300.0 ms (mean)" in capsys.readouterr().out
    medians = {(row.case.endswith("first epoch"), row.variant): row.median_us for row in report.rows}
    assert medians == {
        (first, variant): 3e5 if first else 1.5e5 for first in (True, False) for variant in ("stock", OURS)
    }
