"""Each family of models that Ultralytics builds without a download trains behind patch() as it trains without."""

import math

import pytest

FAMILIES = [
    "yolov3-tiny",
    "yolov5n",
    "yolov6n",
    "yolov8n-ghost",
    "yolov8n-p2",
    "yolov8n-p6",
    "yolov9t",
    "yolov9c-seg",
    "yolov10n",
    "yolo11n-seg",
    "yolo11n-pose",
    "yolo11n-obb",
    "yolo12n",
    "yolo26n-p2",
    "yolov8n-rtdetr",
    "rtdetr-resnet50",
]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_training_of_two_epochs(program, digits, tmp_path, family):
    ran = program("train_task.py", digits, tmp_path, family)
    for wanted, mine in zip(ran["stock"]["losses"], ran["ours"]["losses"], strict=True):
        assert all(map(math.isfinite, wanted.values())) and mine == pytest.approx(wanted, rel=1e-3, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_a_gpu(cuda, program, digits, tmp_path, family):
    """In mixed precision: captured steps and rounding of half precision are in it."""
    ran = program("train_task.py", digits, tmp_path, family, "--device", "0")
    for wanted, mine, tolerance in zip(ran["stock"]["losses"], ran["ours"]["losses"], (0.05, 0.1), strict=True):
        assert all(map(math.isfinite, wanted.values())) and mine == pytest.approx(wanted, rel=tolerance, abs=0.01)
