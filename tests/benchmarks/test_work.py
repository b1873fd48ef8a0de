"""The formulas reproduce the textbook's figures and YOLOv5's published ones."""

import pytest

from benchmarks import work

V100 = work.Machine("V100", 900e9, {"fp16": 125e12, "fp32": 15.7e12})


def test_ops_to_byte_ratio_of_a_v100():
    assert round(V100.ops_to_byte("fp16")) == 139


def test_relu():
    assert work.relu(10_000).intensity == 0.25


@pytest.mark.parametrize("batch, intensity", [(1, 1), (512, 315)])
def test_linear_layer(batch, intensity):
    """4,096 outputs, 1,024 inputs, half precision."""
    assert round(work.linear(batch, 1024, 4096).intensity) == intensity


def test_bounds():
    assert V100.bound(work.relu(1 << 20)) == "memory"
    assert V100.bound(work.linear(512, 1024, 4096)) == "arithmetic"
    tiny = work.Machine("V100", 900e9, {"fp32": 15.7e12}, launch_s=3e-6)
    assert tiny.bound(work.relu(10)) == "launch latency" and tiny.floor_s(work.relu(10)) == 3e-6


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


def test_yolov5_heads():
    assert work.yolov5_head_elements(1) == 25_200 * 85


def test_training_floor_grows_with_batch_and_model():
    machine = work.Machine("H200", 4.2e12, {"fp16": 790e12, "fp32": 60e12}, launch_s=1.5e-6)
    floors = [work.yolov5_training_floor_s(model, 16, machine) for model in "nsmlx"]
    assert floors == sorted(floors)
    assert work.yolov5_training_floor_s("s", 64, machine) > 2 * floors[1]
