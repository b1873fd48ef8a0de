"""bench_train's commands; what they measure is not looked at."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import Report

bench_train = pytest.importorskip("benchmarks.bench_train", reason="yolov5 is not installed")


@pytest.mark.parametrize("workers", [None, 2])
def test_a_cached_training_differs_by_its_options_alone(workers, tmp_path, monkeypatch):
    seen = []

    def run_train(variant, options, folder, env, show):
        seen.append(options)
        progress = SimpleNamespace(iteration_seconds=lambda: [0.1])
        return SimpleNamespace(progress=progress, replaced=(), folder=folder)

    monkeypatch.setattr(bench_train, "run_train", run_train)
    monkeypatch.setattr(bench_train, "yolov5_folder", lambda: tmp_path)
    monkeypatch.setattr(bench_train, "make_data", lambda count, validated: tmp_path)
    monkeypatch.setattr(bench_train, "environment", lambda folder: {})
    monkeypatch.setattr(bench_train, "WORK", tmp_path)
    report = Report("train", torch.device("cpu"), tmp_path)
    bench_train.measure_defaults(report, ["s64"], 2, ["fastdet"], 64, workers)
    cached = ["--cache", "ram", "--workers", "2"]
    for options in seen:
        assert options[options.index("--batch-size") + 1] == "64"
        assert " ".join(cached) in " ".join(options) if workers else not set(cached[:-1]) & set(options)
    cases = {row.case for row in report.rows}
    assert len(seen) == 2 and len(cases) == 1
    assert ("train.py --cache ram --workers 2" if workers else "default options, JPEGs from disk") in cases.pop()


def test_segments_are_trained_by_their_own_script(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    seen = []

    def run_train(variant, options, folder, env, show, script):
        seen.append((script, options))
        return SimpleNamespace(
            progress=SimpleNamespace(iteration_seconds=lambda: [0.1]), replaced=(), folder=folder, variant=variant
        )

    monkeypatch.setattr(bench_train, "run_train", run_train)
    monkeypatch.setattr(bench_train, "environment", lambda folder: {})
    monkeypatch.setattr(bench_train, "WORK", tmp_path)
    report = Report("train", torch.device("cpu"), tmp_path)
    bench_train.measure_segments(report, ["n16"], 2, ["fastdet"], 2)
    assert [script for script, _ in seen] == ["segment.train"] * 2
    assert {row.case for row in report.rows} == {"yolov5n-seg, batch 16, segment/train.py at 128"}
    labels = sorted((tmp_path / "digits-128-2-segment" / "labels" / "train").glob("*.txt"))
    assert len(labels) == 2 and all(len(line.split()) > 9 for line in labels[0].read_text().splitlines())
