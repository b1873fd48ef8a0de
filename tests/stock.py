"""Take the original functions out of the installed packages without importing the modules around them.

``yolov5.utils.general`` and ``ultralytics.utils.nms`` import OpenCV, pandas and more, but the functions need only torch and torchvision. To
serve as an oracle, they get no time limit and a stable sort.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import logging
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch


def _package(name: str) -> Path:
    """Return the folder of an installed package, found without importing it; skip the test where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _definitions(file: Path, names: set[str], namespace: dict) -> None:
    tree = ast.parse(file.read_text())
    body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names]
    module = ast.Module(body=[*ast.parse("from __future__ import annotations").body, *body], type_ignores=[])
    exec(compile(module, str(file), "exec"), namespace)


def _namespace() -> dict:
    import numpy
    import torchvision

    return {
        "torch": torch,
        "np": numpy,
        "torchvision": torchvision,
        "sys": sys,
        "time": types.SimpleNamespace(time=lambda: 0.0),
        "LOGGER": logging.getLogger("stock"),
        "NOT_MACOS14": True,
        "empty_like": torch.empty_like,
    }


@contextlib.contextmanager
def _stable():
    plain = torch.Tensor.argsort

    def argsort(self, dim=-1, descending=False):
        return plain(self, dim=dim, descending=descending, stable=True)

    with mock.patch.object(torch.Tensor, "argsort", argsort), mock.patch.object(torch, "argsort", argsort):
        yield


def _stabilised(function):
    def call(*args, **kwargs):
        with _stable():
            return function(*args, **kwargs)

    return call


def yolov5(stable: bool = True) -> types.SimpleNamespace:
    """Return non_max_suppression and scale_boxes of the installed yolov5."""
    names = _namespace()
    file = _package("yolov5") / "utils/general.py"
    _definitions(file, {"non_max_suppression", "xywh2xyxy", "scale_boxes", "clip_boxes"}, names)
    function = names["non_max_suppression"]
    return types.SimpleNamespace(
        non_max_suppression=_stabilised(function) if stable else function, scale_boxes=names["scale_boxes"]
    )


def ultralytics(stable: bool = True) -> types.SimpleNamespace:
    """Return non_max_suppression and scale_boxes of the installed ultralytics."""
    names = _namespace()
    utils = _package("ultralytics") / "utils"
    _definitions(utils / "ops.py", {"xywh2xyxy", "scale_boxes", "clip_boxes"}, names)
    _definitions(utils / "metrics.py", {"box_iou", "batch_probiou", "_get_covariance_matrix"}, names)
    _definitions(utils / "nms.py", {"non_max_suppression", "TorchNMS"}, names)
    function = names["non_max_suppression"]
    return types.SimpleNamespace(
        non_max_suppression=_stabilised(function) if stable else function, scale_boxes=names["scale_boxes"]
    )


def one_rule(options: dict, prediction: torch.Tensor) -> dict:
    """Return the options with which the original decides like torch_fastdet: IoU > threshold in the boxes' arithmetic type.

    torchvision compares a float32 IoU with a float32 threshold on the GPU, as torch_fastdet does everywhere, but with the float64 threshold
    on the CPU. There it gets the threshold rounded to float32.
    """
    if prediction.dtype == torch.float64 or prediction.is_cuda:
        return options
    return options | {"iou_thres": torch.tensor(options.get("iou_thres", 0.45), dtype=torch.float32).item()}
