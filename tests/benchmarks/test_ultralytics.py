"""bench_ultralytics: what its names mean, which iterations count, and one real pair of trainings."""

import argparse
import json

import pytest

from benchmarks import bench_ultralytics
from benchmarks.bench_ultralytics import TASKS, WHOLE, Case, iteration_seconds


def test_names_of_cases():
    assert Case.parse("yolov8s-16") == Case("yolov8s", 16, "SGD")
    assert Case.parse("yolo26s-64-MuSGD").title == "yolo26s, batch 64, MuSGD"
    assert Case.parse("yolov8s-seg-64").title == "yolov8s-seg, batch 64"
    assert {Case.parse(name).task for name in TASKS} == {"segment", "pose", "obb", "classify"}
    assert len({Case.parse(name) for name in WHOLE + TASKS}) == len(WHOLE + TASKS)
    for wrong in ("yolov8s", "yolov8s-0", "s16", "yolov8s-16-"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{wrong} came, but a model, a batch size"):
            Case.parse(wrong)


def test_pictures_of_classes_lie_in_folders(tmp_path, monkeypatch):
    pytest.importorskip("sklearn"), pytest.importorskip("ultralytics")
    monkeypatch.setattr(bench_ultralytics, "WORK", tmp_path)
    folder = bench_ultralytics.make_data("classify", 64, 24)
    assert bench_ultralytics.make_data("classify", 64, 24) == folder
    found = [path.relative_to(folder).parts for path in folder.rglob("*.jpg")]
    assert len([parts for parts in found if parts[0] == "train"]) == 24 and {len(parts) for parts in found} == {3}
    assert {parts[1] for parts in found} <= set("0123456789")


def test_first_epoch_and_first_iterations_are_left_out():
    assert iteration_seconds([[0.0, 9.0, 99.0], [100.0, 100.5, 101.0], [110.0, 110.25], [120.0]]) == [49.5, 0.5, 0.25]


def test_wrong_arguments_are_a_sentence(monkeypatch, capsys):
    for words, sentence in (
        (["--epochs", "1"], "2 or more are expected"),
        (["--models", "s16"], "s16 came, but a model"),
    ):
        monkeypatch.setattr("sys.argv", ["bench_ultralytics", "--device", "cpu", *words])
        with pytest.raises(SystemExit):
            bench_ultralytics.main()
        assert sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_real_trainings_leave_rows(tmp_path, monkeypatch):
    pytest.importorskip("ultralytics")
    words = ["--device", "cpu", "--epochs", "2", "--pictures", "48", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench_ultralytics", *words])
    monkeypatch.setattr(bench_ultralytics, "WORK", tmp_path / "work")
    bench_ultralytics.main()
    rows = json.loads((tmp_path / "ultralytics.json").read_text())
    assert [(row["case"], row["variant"]) for row in rows] == [
        ("yolov8n, batch 16 at 128", "stock"),
        ("yolov8n, batch 16 at 128", "torch_fastdet"),
    ]
    assert all(row["median_us"] > 0 for row in rows)
    logs = sorted((tmp_path / "work").glob("ultralytics/*/*/train.log"))
    assert ["BaseTrainer.optimizer_step" in log.read_text() for log in logs] == [False, True]
