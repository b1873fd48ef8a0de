"""The formulas reproduce the textbook's figures and YOLOv5's published ones."""

import pytest

from benchmarks import work

V100 = work.Machine("V100", 900e9, {"fp16": 125e12, "fp32": 15.7e12})


@pytest.mark.parametrize(
    "model, count", [("n", 1_872_157), ("s", 7_235_389), ("m", 21_190_557), ("l", 46_563_709), ("x", 86_749_405)]
)
def test_yolov5_parameters(model, count):
    """As YOLOv5 prints when it builds the model with 80 classes."""
    assert work.yolov5_parameters(model) == count


@pytest.mark.parametrize("model, billions", [("n", 4.5), ("s", 16.5), ("m", 49.0), ("l", 109.1), ("x", 205.7)])
def test_yolov5_flops(model, billions):
    """As published for 640x640; those also count batch norm and activations."""
    assert work.yolov5_inference(model).flops / 1e9 == pytest.approx(billions, rel=0.03)
