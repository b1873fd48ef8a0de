"""By examples/fine_tune.py and its notebook both frameworks learn from drawn images on a CPU."""

import importlib.machinery
import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import export, fine_tune, yolov5_env
from examples.command_line import Unusable, run
from examples.yolov5_env import environment
from torch_fastdet.ultralytics import host

EXAMPLES = Path(fine_tune.__file__).parent


@pytest.mark.parametrize("host", ["yolov5", "ultralytics"])
def test_the_next_command_is_understood(tmp_path, monkeypatch, host):
    """The command works whatever the folder's name, and if the checkpoint lies outside the clone that trained it."""
    script = tmp_path / "a clone/train.py"
    (script.parent / "models").mkdir(parents=True)
    (script.parent / "models/yolo.py").touch()
    best = tmp_path / "my runs/train/weights/best.pt"
    best.parent.mkdir(parents=True)
    best.touch()
    python, *words = shlex.split(fine_tune.next_command(host, best, tmp_path / "my runs", 320, str(script)))
    assert python == "python" and words[:2] == ["-m", "examples.export" if host == "yolov5" else "examples.draw"]
    seen = {}
    if host == "yolov5":

        def load(*arguments):
            seen["folder"] = export.yolov5_folder(*arguments)
            raise Unusable("enough")

        monkeypatch.setattr(export, "load_yolov5", load)
        monkeypatch.setattr(sys, "argv", words[1:])
        with pytest.raises(Unusable, match="enough"):
            export.main()
        assert seen["folder"] == script.parent
    else:
        assert words[2] == str(best)


def test_without_ultralytics_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "_is_installed", lambda: False)
    (tmp_path / "data.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["fine_tune.py", "--data", str(tmp_path / "data.yaml"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run(fine_tune.main)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("fine_tune.py: error: ") and "pip install ultralytics" in line


def test_stand_ins_beside_yolov5(tmp_path, monkeypatch):
    """make puts stand-ins into .venv, so that a user's own ``python -m yolov5.train`` starts there. Installed packages stay."""
    (tmp_path / "yolov5").mkdir()
    (tmp_path / "yolov5/__init__.py").touch()
    found = {"yolov5": importlib.machinery.ModuleSpec("yolov5", None, origin=str(tmp_path / "yolov5/__init__.py"))}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    yolov5_env.main()
    assert (tmp_path / "roboflow/core/version.py").is_file() and (tmp_path / "huggingface_hub/__init__.py").is_file()
    found["roboflow"] = found["huggingface_hub"] = found["yolov5"]
    (tmp_path / "roboflow/__init__.py").write_text("the real one")
    yolov5_env.main()
    assert (tmp_path / "roboflow/__init__.py").read_text() == "the real one"


@pytest.mark.slow
@pytest.mark.cpu
def test_notebook(tmp_path):
    """Its cells run one after another in the notebook's folder, as in Jupyter, and train in both frameworks."""
    for package in ("ultralytics", "yolov5"):
        pytest.importorskip(package, exc_type=ImportError)
    cells = json.loads((EXAMPLES / "fine_tune.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    whole = "IMAGES, EPOCHS, SIZE = 200, 40, 64"
    assert whole in code
    code = code.replace(whole, "IMAGES, EPOCHS, SIZE = 20, 1, 64")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "cells").mkdir()
    env = environment(tmp_path / "environment") | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path / "cells", env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    runs = tmp_path / "cells/fine_tune_runs"
    assert (runs / "ultralytics/train/weights/best.pt").is_file() and (runs / "yolov5/train/weights/best.pt").is_file()
    assert "nms_optim" in result.stderr and "mAP50" in result.stdout
