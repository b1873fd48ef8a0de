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


def test_bytes_of_our_operators():
    """Figures that the design states."""
    parameters = work.yolov5_parameters("s")
    assert work.ema(parameters).bytes == 12 * parameters
    assert work.sgd(parameters).bytes == 20 * parameters
    assert work.fused_step(parameters).bytes == 32 * parameters
    assert work.iou_loss(1000).bytes == 80_000
    assert work.upsample2x(100).bytes == work.upsample2x_backward(100).bytes == 5 * 100 * 2
    assert work.upsample2x_cat(100, 400).bytes == 13 * 100 * 2
    assert work.yolov5_decode(32).bytes == 2 * 32 * 25_200 * 85 * 2
    assert work.yolov5_loss(16).bytes == (16 * 25_200 * 85 + 16 * 25_200) * 2
    assert work.scale_boxes(10).bytes == 2 * 10 * 6 * 4
