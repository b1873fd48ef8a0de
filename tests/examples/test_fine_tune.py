"""examples/fine_tune.py and its notebook: both hosts learn from drawn pictures, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import fine_tune
from examples.yolov5_env import environment

EXAMPLES = Path(fine_tune.__file__).parent


def test_drawn_data(tmp_path):
    data = fine_tune.draw_data(tmp_path / "data", 10)
    assert [len(list((tmp_path / f"data/images/{split}").glob("*.jpg"))) for split in ("train", "val")] == [8, 2]
    rows = (tmp_path / "data/labels/val/0004.txt").read_text().splitlines()
    assert rows and all(len(row.split()) == 5 for row in rows) and "names: ['square'" in data.read_text()


@pytest.mark.parametrize(
    "weights, words", [("a.pt", ["--weights", "a.pt"]), ("a.yaml", ["--weights", "", "--cfg", "a.yaml"])]
)
def test_command_of_yolov5(tmp_path, weights, words):
    command = fine_tune.yolov5_command(tmp_path / "d.yaml", weights, 3, 640, tmp_path, "there/train.py")
    assert command[1:5] == ["-m", "torch_fastdet.yolov5", "--fastdet", "there/train.py"]
    assert command[7 : 7 + len(words)] == words


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("host, model", [("ultralytics", "yolo11n.yaml"), ("yolov5", "yolov5n.yaml")])
def test_script(tmp_path, host, model):
    pytest.importorskip(host, exc_type=ImportError)
    env = environment(tmp_path / "environment") | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = f"--host {host} --draw 10 --epochs 1 --img 64 --weights {model} --device cpu --out {tmp_path}/out".split()
    command = [sys.executable, "-m", "examples.fine_tune", *words]
    result = subprocess.run(command, cwd=EXAMPLES.parent, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (tmp_path / "out/train/weights/best.pt").is_file() and "trained: " in result.stdout


@pytest.mark.slow
@pytest.mark.cpu
def test_notebook(tmp_path):
    """Its cells, one after another, as Jupyter runs them in the notebook's folder; it trains in both hosts."""
    for package in ("ultralytics", "yolov5"):
        pytest.importorskip(package, exc_type=ImportError)
    cells = json.loads((EXAMPLES / "fine_tune.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "cells").mkdir()
    env = environment(tmp_path / "environment") | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path / "cells", env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    runs = tmp_path / "cells/fine_tune_runs"
    assert (runs / "ultralytics/train/weights/best.pt").is_file() and (runs / "yolov5/train/weights/best.pt").is_file()
    assert "nms_optim" in result.stderr and "mAP50" in result.stdout
