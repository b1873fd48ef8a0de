"""The picture of examples.demo.picture: its labels, and the whole command, tiny."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from examples.demo import picture

cv2 = pytest.importorskip("cv2", exc_type=ImportError)
for package in ("ultralytics", "sklearn"):
    pytest.importorskip(package, exc_type=ImportError)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_command(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    words = ["--size", 64, "--train", 4, "--epochs", 1, "--batch", 4, "--device", "cpu", "--out", tmp_path]
    command = [sys.executable, "-m", "examples.demo.picture", *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    logs = "".join(log.read_text()[-2000:] for log in tmp_path.glob("*.log"))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:] + logs
    assert Image.open(tmp_path / "picture.png").size == (3 * picture.SHOWN, picture.SHOWN + picture.CAPTION)
    assert all(f"\n{name}: " in f"\n{result.stdout}" for name in picture.PANELS)
    assert (tmp_path / "seg.log").read_text().count("torch_fastdet: ") > 3
