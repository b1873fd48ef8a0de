"""Compare bbox_iou with the functions of the installed Ultralytics and YOLOv5 that it replaces."""

import importlib

import pytest
import torch

from tests.ops.test_bbox_iou import KINDS, boxes, close, gradients
from torch_fastdet import ops


@pytest.fixture(params=["ultralytics.utils.metrics", "yolov5.utils.metrics"])
def stock(request):
    """Return the original bbox_iou of each package that is installed."""
    package = request.param.split(".")[0]
    pytest.importorskip(package, reason=f"{package} is not installed")
    return importlib.import_module(request.param).bbox_iou


def clamp_passes_at_its_bound() -> bool:
    """Return whether clamp passes the gradient at its bound: torch 2.11 does, 2.15 does not.

    The original gradient for boxes that touch depends on it; bbox_iou behaves as torch 2.11 does.
    """
    x = torch.zeros(1, requires_grad=True)
    return bool(torch.autograd.grad(x.clamp(0), x)[0] == 1)


def touch(box1: torch.Tensor, box2: torch.Tensor, xywh: bool) -> torch.Tensor:
    """Return which pairs have an overlap whose width or height is exactly 0."""
    ends = [(b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2) if xywh else (b[:, :2], b[:, 2:]) for b in (box1, box2)]
    (low1, high1), (low2, high2) = ends
    return (torch.minimum(high1, high2) == torch.maximum(low1, low2)).any(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("xywh", [True, False], ids=["xywh", "xyxy"])
def test_value_and_gradients_equal_stock(stock, device, kind, xywh):
    """Tied corners share a gradient as PyTorch's minimum and maximum do.

    Float64 leaves only differences between the formulas, not between roundings.
    """
    box1, box2 = boxes(2000, xywh=xywh, dtype=torch.float64, device=device)
    touching = touch(box1, box2, xywh)
    assert touching.any()
    if not clamp_passes_at_its_bound():
        box1, box2 = box1[~touching], box2[~touching]
    weight = torch.rand(len(box1), 1, dtype=torch.float64, device=device)
    expected = gradients(lambda a, b: stock(a, b, xywh=xywh, **KINDS[kind]), box1, box2, weight)
    actual = gradients(lambda a, b: ops.bbox_iou(a, b, xywh=xywh, **KINDS[kind]), box1, box2, weight)
    # The original may clamp an xyxy height to eps or add eps to it, which is 1e-7 of heights of at least 0.6 px.
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if xywh else {"rtol": 1e-6, "atol": 1e-6}
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, **tolerance)
