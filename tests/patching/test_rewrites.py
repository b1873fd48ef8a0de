"""The registry of what a captured step changes in a model."""

import pytest
from torch import nn

from torch_fastdet.patching.doctor import _rows, examine
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.rewrites import registry
from torch_fastdet.rewrites.casts import WeightsCastOnce
from torch_fastdet.yolov5.host import HOST

REWRITES = [*registry.YOLOV5, *registry.ULTRALYTICS, WeightsCastOnce(None)]


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: type(rewrite).__name__)
def test_each_says_why_it_leaves_a_model_alone(rewrite):
    assert isinstance(rewrite.matches(nn.Linear(2, 2)), Obstacle)


def test_the_doctor_prints_them():
    report = next(report for report in examine(HOST) if report.name == "cuda_graph")
    printed = [row[0] for row in _rows(report)]
    assert all(f"  in a captured step: {line}" in printed for line in registry.lines(registry.YOLOV5))
