"""``python -m torch_fastdet benchmark`` prints one table of real trainings, original and torch_fastdet."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from examples.yolov5_env import environment
from torch_fastdet.ultralytics import benchmark


def test_the_first_epoch_does_not_count():
    clock = benchmark.Clock(3)
    clock.ends = {0: [0.0, 9.0], 1: [10.0, 10.5, 11.0], 2: [20.0, 20.3, 20.6]}
    assert clock.seconds() == pytest.approx((1.0 + 0.6) / 4)
    clock.busy = 0.2  # the last one was profiled
    assert clock.seconds() == pytest.approx(0.5)


def test_the_table_says_what_memory_is_used_for():
    keys = ["iteration", "busy", "validation", "frame", "arrays", "folder", "paths", "video"]
    keys += ["tracking", "still", "objects"]
    stock = dict.fromkeys(keys) | {"peak": 2048.0, "graphs": 0.0, "images": 0.0}
    ours = dict.fromkeys(keys) | {"peak": 1024.0, "graphs": 512.0, "images": 256.0}
    assert benchmark.table(benchmark.parser().parse_args([]), stock, ours).splitlines()[2:] == [
        "| memory of the GPU, at most | 2048 MiB | 1024 MiB |  |",
        "| of it, CUDA graphs | 0 MiB (0%) | 512 MiB (50%) |  |",
        "| of it, decoded images | 0 MiB (0%) | 256 MiB (25%) |  |",
    ]


@pytest.mark.parametrize(
    "words, said", [(["--epochs", "2"], "--epochs is 2, but at least 3"), (["--images", "9"], "32")]
)
def test_options_that_measure_nothing(words, said, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(words)
    assert said in capsys.readouterr().err


def test_a_run_that_fails_shows_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(
        benchmark.subprocess, "run", lambda *_, stdout, **__: stdout.write("why\n") and SimpleNamespace(returncode=3)
    )
    with pytest.raises(SystemExit, match="why\ntorch_fastdet: benchmark: the run of stock ended with status 3"):
        benchmark.in_its_own_process("stock", [], tmp_path / "data.yaml", tmp_path)


def test_rt_detr_is_measured_as_itself(tmp_path, monkeypatch):
    """YOLO() does not build it from a file of its layers."""
    made = []
    ultralytics = pytest.importorskip("ultralytics", exc_type=ImportError)
    monkeypatch.setattr(ultralytics, "RTDETR", lambda name: made.append(name))
    options = benchmark.parser().parse_args(["--model", "rtdetr-l"])
    with pytest.raises(AttributeError, match="add_callback"):
        benchmark.measure("stock", options, "data.yaml", tmp_path)
    assert made == ["rtdetr-l.yaml"]


@pytest.mark.nightly
@pytest.mark.cpu
def test_on_a_cpu(tmp_path):
    pytest.importorskip("ultralytics", exc_type=ImportError)
    words = [
        "--device",
        "cpu",
        "--model",
        "yolov8n",
        "--imgsz",
        "64",
        "--images",
        "16",
        "--batch",
        "8",
        "--epochs",
        "3",
    ]
    command = [sys.executable, "-m", "torch_fastdet", "benchmark", *words]
    environment(tmp_path / "environment")  # its font alone: the rest has to be installed, as a user has it
    config = str(tmp_path / "environment/config")
    env = os.environ | {"YOLO_CONFIG_DIR": config, "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = re.findall(
        r"^\| (.*?) \| [\d.e+]+ (?:ms|s) \| [\d.e+]+ (?:ms|s) \| [\d.]+x \|$", result.stdout, re.MULTILINE
    )
    assert len(rows) == 9 and "CPU" in result.stdout and "torch_fastdet" in result.stdout
    assert not list(tmp_path.glob("runs*"))
