"""Fixtures that run programs with the real Ultralytics package in processes of their own, on the demo's digits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.dataset import Recipe, make
from examples.yolov5_env import environment
from tests import starter
from tests.yolov5.real import with_torch_fastdet

PROGRAMS = Path(__file__).parent / "programs"
# Ultralytics writes its training log with polars (it skips the log if that fails), and tracks with lap.
STAND_INS = {
    "polars.py": "",
    "lap.py": '''
import numpy as np
from scipy.optimize import linear_sum_assignment


def lapjv(cost, extend_cost=True, cost_limit=np.inf):
    """The assignment of least cost: cost, column of each row, row of each column; -1 where it would cost too much."""
    columns, rows = np.full(cost.shape[0], -1), np.full(cost.shape[1], -1)
    for row, column in zip(*linear_sum_assignment(np.minimum(cost, 2 * cost_limit + 1))):
        if cost[row, column] <= cost_limit:
            columns[row], rows[column] = column, row
    return 0.0, columns, rows
''',
}


@pytest.fixture(scope="session")
def ultralytics_environment(tmp_path_factory) -> dict[str, str]:
    """Return environment variables of a process that has torch_fastdet and Ultralytics."""
    names = ("ultralytics", "cv2", "PIL", "sklearn", "scipy", "yaml")
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (requirements/yolov5.txt)")
    root = tmp_path_factory.mktemp("environment")
    env = with_torch_fastdet(environment(root / "environment"))
    for name, text in STAND_INS.items():
        if importlib.util.find_spec(name.removesuffix(".py")) is None:
            (root / "environment/stand_ins" / name).write_text(text.lstrip())
    return env


@pytest.fixture(scope="session")
def program(ultralytics_environment, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Run programs/<name> with torch_fastdet and Ultralytics, and return the last line of JSON that it prints, and "output"."""
    root = tmp_path_factory.mktemp("ultralytics")

    def run(name: str, *arguments: object, seconds: int = 500) -> dict[str, Any]:
        command = [str(PROGRAMS / name), *map(str, arguments)]
        result = starter.python(command, root, ultralytics_environment, seconds)
        assert result.returncode == 0, result.stdout[-6000:]
        # The report of what the switches did follows this line, as it is printed when the process ends.
        found = [line for line in result.stdout.splitlines() if line.startswith("{")]
        return json.loads(found[-1]) | {"output": result.stdout}

    return run


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """Return the data.yaml of 16 images of digits. They are also the validation images, so that a model overfits them quickly."""
    data = make(tmp_path_factory.mktemp("digits") / "data", Recipe(image_size=96, train=16, val=1))
    data.write_text(data.read_text().replace("val: images/val", "val: images/train"))
    return data


@pytest.fixture(autouse=True)
def same_threads():
    """Restore torch's number of threads, which CPU predictors and trainers set (to the same 1 under ``make test``)."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
