"""Provide the real YOLOv5 in three layouts, and processes that run its scripts, original or through the launcher.

* ``package``: PyPI's yolov5 (``python -m yolov5.train``);
* ``checkout``: the GitHub layout (``python train.py``), derived from the package by removing the ``yolov5.`` prefix;
* ``head``: the same, with ``bbox_iou`` imported from ultralytics.utils.metrics and ``process_batch`` in utils/metrics.py, as at the
  head of the GitHub repository.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch_fastdet
from examples.yolov5_env import environment
from tests import starter

PROGRAMS = Path(__file__).parent / "programs"
LAYOUTS = ("package", "checkout", "head")


def missing() -> str | None:
    """Return why the real scripts cannot run here, or None."""
    names = [name for name in ("yolov5", "ultralytics", "cv2", "PIL") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(names)} (requirements/yolov5.txt)" if names else None


@dataclass
class YOLOv5:
    """Hold one layout of the real code, and how a process runs it."""

    layout: str
    folder: Path  # the current folder of its processes
    prefix: str  # of its module names
    environment: dict[str, str]

    def command(self, script: str) -> list[str]:
        """Return the command of ``script``: "train", "val", "detect" or "segment/train"."""
        if self.layout == "package":
            return ["-m", f"yolov5.{script.replace('/', '.')}"]
        return [f"{script}.py"]

    def python(self, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess:
        return python(*arguments, folder=self.folder, environment=self.environment, ok=ok)

    def program(self, name: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess:
        """Run programs/``name`` as a user's own script, in the folder of this YOLOv5."""
        shutil.copyfile(PROGRAMS / name, self.folder / name)
        return self.python(name, *arguments, ok=ok)

    def stock(self, script: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess:
        return self.python(*self.command(script), *arguments, ok=ok)

    def fast(self, script: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess:
        return self.python("-m", "torch_fastdet.yolov5", *self.command(script), *arguments, ok=ok)


def python(
    *arguments: object, folder: Path, environment: dict[str, str], ok: bool = True
) -> subprocess.CompletedProcess:
    """Run Python to its end, and return stdout and stderr together."""
    result = starter.python([*map(str, arguments)], folder, environment, seconds=500)
    assert not ok or result.returncode == 0, result.stdout[-6000:]
    return result


def with_torch_fastdet(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with this very torch_fastdet importable, one thread (the models are tiny), and no distributed run."""
    ours = str(Path(torch_fastdet.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), ours]))
    distributed = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    return {k: v for k, v in environment.items() if k not in distributed} | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",  # stdout and stderr come back in the order in which they were written
        "OMP_NUM_THREADS": "1",
    }


def make(layout: str, root: Path) -> YOLOv5:
    folder = root / layout
    if layout == "package":
        folder.mkdir()
    else:
        _checkout(folder)
    if layout == "head":
        _head(folder)
    env = with_torch_fastdet(environment(root / "environment"))
    if layout != "package":
        # The package's segment scripts, from which this is made, import utils before they put the checkout on sys.path.
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    return YOLOv5(layout, folder, "yolov5." if layout == "package" else "", env)


def _checkout(folder: Path) -> None:
    package = Path(importlib.util.find_spec("yolov5").origin).parent
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__", "cli.py"))
    (folder / "__init__.py").unlink()
    for path in folder.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r"^(\s*)from yolov5 import __version__\b.*$", r"\1__version__ = '7.0.14'", text, flags=re.M)
        text = re.sub(r"^(\s*)(from|import) yolov5\.", r"\1\2 ", text, flags=re.M)
        path.write_text(text)


def _head(folder: Path) -> None:
    _edit(
        folder / "utils/loss.py",
        r"^from utils\.metrics import bbox_iou$",
        "from ultralytics.utils.metrics import bbox_iou",
    )
    _edit(
        folder / "utils/segment/loss.py",
        r"^from \.\.metrics import bbox_iou$",
        "from ultralytics.utils.metrics import bbox_iou",
    )
    metrics, val = folder / "utils/metrics.py", folder / "val.py"
    _edit(metrics, r"^def bbox_iou\(.*?(?=^def )", "")
    process_batch = re.search(r"^def process_batch\(.*?(?=^@)", val.read_text(), flags=re.M | re.S)[0]
    metrics.write_text(f"{metrics.read_text()}\n\n{process_batch}")
    _edit(val, re.escape(process_batch), "")
    _edit(
        val,
        r"^from utils\.metrics import ConfusionMatrix,",
        "from utils.metrics import ConfusionMatrix, process_batch,",
    )


def _edit(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.M | re.S)
    assert count == 1, f"{path} is not what this test knows: {pattern} is there {count} times"
    path.write_text(text)


def results(run: Path) -> dict[str, list[float]]:
    """Return the columns of a run's results.csv, epoch by epoch, without segment/train.py's last row, which is not an epoch."""
    with open(run / "results.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    rows = [{key.strip(): float(value) for key, value in row.items()} for row in rows]
    return {key: [row[key] for row in rows] for key in rows[0]}
