"""device="auto" of suppression: where it computes, what it measures and keeps, and that the rows are those of the CPU."""

from __future__ import annotations

import json

import pytest
import torch

from torch_fastdet import crossover, suppression


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that has not measured yet, whose GPU is faster from 1,000 elements on; returns what is measured."""
    measured = []

    def measure(layout, many, device):
        measured.append((layout, many))
        if layout == "ultralytics":
            return [(100, 1.0, 2.0), (900, 1.0, 2.0)] if many else [(100, 2.0, 1.0), (900, 2.0, 1.0)]
        return [(100, 1.0, 2.0), (200, 2.0, 1.0), (500, 1.0, 2.0), (2000, 2.0, 1.0), (9000, 2.0, 1.0)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(crossover, "_known", {})
    monkeypatch.setattr(crossover, "_machine", lambda device: "a machine")
    monkeypatch.setattr(crossover, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return measured


def test_measures_once_and_keeps_the_answer(machine, monkeypatch, capsys):
    assert crossover.crossover() == pytest.approx(1000)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "from 1,000 elements on" in said and str(crossover.cache_file()) in said
    assert crossover.crossover() == pytest.approx(1000)
    monkeypatch.setattr(crossover, "_known", {})  # another process
    assert crossover.crossover() == pytest.approx(1000)
    assert machine == [("yolov5", False)] and capsys.readouterr().err == ""
    assert crossover.crossover("ultralytics", many=True) == float("inf") and "at no size" in capsys.readouterr().err
    assert crossover.crossover("ultralytics") == 0 and "at every size" in capsys.readouterr().err
    assert len(json.loads(crossover.cache_file().read_text())) == 3
    monkeypatch.setattr(crossover, "_known", {})
    assert crossover.crossover("ultralytics", many=True) == float("inf") and len(machine) == 3
    monkeypatch.setattr(crossover, "_machine", lambda device: "another machine")
    assert crossover.crossover() == pytest.approx(1000) and len(machine) == 4
    with pytest.raises(ValueError, match="layout is 'yolo', but 'yolov5' or 'ultralytics' is expected"):
        crossover.crossover("yolo")


@pytest.mark.parametrize(
    "text", ["", "no json", "[1]", '{"a": 1}', "[" * 100_000, *(f'{{"KEY": {v}}}' for v in ("NaN", "true", "-1"))]
)
def test_a_broken_file_is_measured_again(machine, text):
    crossover.cache_file().parent.mkdir()
    crossover.cache_file().write_text(text.replace("KEY", crossover._key("yolov5", False, torch.device("cuda"))))
    assert crossover.crossover() == pytest.approx(1000) and len(machine) == 1
    assert list(json.loads(crossover.cache_file().read_text()).values())[-1] == pytest.approx(1000)
    assert [path.name for path in crossover.cache_file().parent.iterdir()] == ["crossover.json"]


def test_a_folder_that_cannot_be_written_is_said(machine, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert crossover.crossover() == pytest.approx(1000)
    assert "cannot be kept: " in capsys.readouterr().err
    monkeypatch.setattr(crossover, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    crossover.cache_file().mkdir(parents=True)
    assert crossover.crossover() == pytest.approx(1000) and "cannot be kept: " in capsys.readouterr().err
    assert list(crossover.cache_file().parent.iterdir()) == [crossover.cache_file()]  # and no temporary file


def test_a_machine_without_a_home_directory(machine, monkeypatch, capsys):
    def missing(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(crossover.Path, "expanduser", missing)
    assert crossover.crossover() == pytest.approx(1000)
    assert "cannot be kept: Could not determine home directory." in capsys.readouterr().err


def test_what_is_no_gpu_is_an_error(machine, monkeypatch):
    with pytest.raises(ValueError, match="crossover: device is 'cpu', but an NVIDIA GPU is expected"):
        crossover.crossover(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="crossover: this machine has none, but an NVIDIA GPU is expected"):
        crossover.crossover()
    assert not machine


def test_auto_asks_for_predictions_on_the_host_alone(machine, monkeypatch):
    small, large = torch.zeros(1, 10, 85), torch.zeros(1, 20, 85)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert crossover.faster_device(large, "yolov5", 0.25, False).type == "cpu" and not machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert crossover.faster_device(small, "yolov5", 0.25, False) == torch.device("cpu")
    assert crossover.faster_device(large, "yolov5", 0.25, False) == torch.device("cuda", 0)
    assert crossover.faster_device(large.to("meta"), "yolov5", 0.25, False).type == "meta"
    assert crossover.faster_device(large, "ultralytics", 0.25, False).type == "cuda"
    assert crossover.faster_device(large, "ultralytics", 0.001, False).type == "cpu"
    assert crossover.faster_device(large, "ultralytics", 0.25, True).type == "cpu"
    assert machine == [("yolov5", False), ("ultralytics", False), ("ultralytics", True)]
    monkeypatch.setattr(crossover, "lost_cuda_in_fork", lambda: True)  # a loader's process of a program that uses CUDA
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("it would start CUDA, which is an error there")
    )
    assert crossover.faster_device(large, "yolov5", 0.25, False) == torch.device("cpu")


def test_the_table_of_a_machine(machine, monkeypatch):
    monkeypatch.setattr(crossover, "SIZES", ((1, 2100), (2, 25200)))
    monkeypatch.setattr(crossover, "measure", lambda layout, many, device: [(1, 0.001, 0.002), (2, 0.5, 0.1 + many)])
    lines = crossover._table(torch.device("cuda")).splitlines()
    assert lines[0] == "a machine" and len(lines) == 4 + 2 * 2 * 2
    assert lines[-1] == "| ultralytics | many | 2 x 25,200 | 500.00 | 1100.00 |"


def predictions():
    yield suppression.yolov5_non_max_suppression, crossover._prediction("yolov5", False, 2, 300), {}
    yield suppression.ultralytics_non_max_suppression, crossover._prediction("ultralytics", True, 2, 300), {}


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "auto"])
def test_the_host_computes_where_it_is_asked_to(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for suppress, prediction, options in predictions():
        wanted = suppress(prediction, **options)
        found = suppress(prediction, device=device, **options)
        assert sum(map(len, wanted)) > 0
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("device", ["gpu", 1.5, object()])
def test_what_is_no_device_is_an_error(device):
    for suppress, prediction, _ in predictions():
        with pytest.raises(
            ValueError, match=r"non_max_suppression: device is .*, but None, 'auto' or a device is expected"
        ):
            suppress(prediction, device=device)


def test_rows_of_the_gpu_are_those_of_the_host(cuda, machine):
    for suppress, prediction, options in predictions():
        wanted = suppress(prediction, **options)
        for device in ("auto", cuda):
            found = suppress(prediction, device=device, **options)
            assert all(rows.device.type == "cpu" and torch.equal(rows, other) for rows, other in zip(found, wanted))
    boxes = crossover._prediction("ultralytics", True, 1, 200)
    rows, kept = suppression.ultralytics_non_max_suppression(boxes, return_idxs=True, device=cuda)
    wanted_rows, wanted_kept = suppression.ultralytics_non_max_suppression(boxes, return_idxs=True)
    assert (
        torch.equal(rows[0], wanted_rows[0]) and torch.equal(kept[0], wanted_kept[0]) and kept[0].device.type == "cpu"
    )


@pytest.mark.parametrize("layout", ["yolov5", "ultralytics"])
def test_what_is_measured_is_what_runs(monkeypatch, layout):
    """The measured calls find the detections of the stock signature."""
    found = []
    monkeypatch.setattr(crossover, "SIZES", ((1, 525),))
    monkeypatch.setattr(crossover, "_seconds", lambda call: found.append(call()) or 1.0)
    crossover.measure(layout, True, torch.device("cpu"))
    suppress = getattr(suppression, f"{layout}_non_max_suppression")
    wanted = suppress(crossover._prediction(layout, True, 1, 525), 0.001, multi_label=True)[0]
    for detections, counts in found:
        assert counts == [len(wanted)] != [0] and torch.equal(detections[0, : counts[0]], wanted)


@pytest.mark.alone
def test_a_real_measurement(cuda, monkeypatch):
    monkeypatch.setattr(crossover, "SIZES", ((1, 525), (1, 2100)))
    times = crossover.measure("ultralytics", False, torch.device("cuda"))
    assert [numbers for numbers, _, _ in times] == [525 * 84, 2100 * 84]
    assert all(cpu > 0 and gpu > 0 for _, cpu, gpu in times)
