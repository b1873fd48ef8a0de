"""bench_ultralytics: what its names mean, which iterations count, and one real pair of trainings."""

import json

import pytest

from benchmarks import bench_ultralytics


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
