"""The formulas reproduce the textbook's figures and YOLOv5's published ones."""

import pytest
import torch

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


@pytest.mark.parametrize("batch, bound", [(1, "memory"), (512, "arithmetic")])
def test_bound_of_a_linear_layer(batch, bound):
    """On either side of the V100's 139 operations a byte."""
    assert V100.bound(work.linear(batch, 1024, 4096)) == bound


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


def test_launches_that_wait_for_each_other_add_up():
    machine = work.Machine("GPU", 4e12, {"fp32": 60e12}, launch_s=2e-6)
    assert machine.floor_s(work.iou(10)) == 2e-6
    assert machine.floor_s(work.iou_loss(10)) == 4e-6
    assert machine.floor_s(work.fused_step(10)) == machine.floor_s(work.clip(10)) == 4e-6


def test_small_work_on_a_cpu_is_held_against_copies_in_its_caches():
    machine = work.Machine("CPU", 10e9, {"fp32": 1e11}, cached_bytes_per_s={1 << 14: 80e9, 1 << 20: 40e9, 1 << 26: 9e9})
    assert machine.rate(1000) == 80e9  # smaller than any copy
    assert machine.rate(1 << 20) == 80e9  # the copy half as large, or larger, is the small one
    assert machine.rate(1 << 22) == 40e9
    assert machine.rate(1 << 30) == 10e9  # never below main memory


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


def test_suppression_reads_scores_where_objectness_passes():
    none, all_ = work.suppression(1, 0.0), work.suppression(1, 1.0)
    assert none.bytes == 25_200 * 32 + 300 * 24 + 8  # a sector for each objectness
    assert all_.bytes - none.bytes == 25_200 * 80 * 2
    assert work.yolov5_postprocess(1, 0.0).bytes == 25_200 * 2 + 300 * 24 + 8  # objectness is a plane of its own


@pytest.mark.parametrize("threshold, mean", [(0.25, -5.0), (0.001, -5.0), (0.001, -11.0)])
def test_share_of_normal_logits_above_a_threshold(threshold, mean):
    logits = torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * 1.5 + mean
    share = (logits.sigmoid() > threshold).float().mean().item()
    assert work.passing_share(threshold, mean, 1.5) == pytest.approx(share, abs=2e-3)


def test_yolov5_heads():
    assert work.yolov5_head_elements(1) == 25_200 * 85


def test_training_floor_grows_with_batch_and_model():
    machine = work.Machine("H200", 4.2e12, {"fp16": 790e12, "fp32": 60e12}, launch_s=1.5e-6)
    floors = [work.yolov5_training_floor_s(model, 16, machine) for model in "nsmlx"]
    assert floors == sorted(floors)
    assert work.yolov5_training_floor_s("s", 64, machine) > 2 * floors[1]
