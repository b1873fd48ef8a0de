"""The registry lists what a captured step changes in a model."""

import pytest
from torch import nn

from torch_fastdet.patching.doctor import _rows, examine
from torch_fastdet.rewrites import all_rewrites
from torch_fastdet.yolov5.host import HOST


@pytest.mark.parametrize("about", [*all_rewrites.YOLOV5, *all_rewrites.ULTRALYTICS])
def test_each_leaves_other_models_alone(about):
    for rewrites in (all_rewrites.YOLOV5, all_rewrites.ULTRALYTICS):
        assert about not in rewrites or not [*rewrites[about](nn.Linear(2, 2))]


def test_the_doctor_prints_them():
    report = next(report for report in examine(HOST) if report.name == "cuda_graph")
    printed = [row[0] for row in _rows(report)]
    assert all(f"  in a captured step: {line}" in printed for line in all_rewrites.lines(all_rewrites.YOLOV5))
