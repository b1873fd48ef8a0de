"""train.py trains on a GPU, with the options that change what its graphs must follow."""

import re

import pytest

from tests.yolov5 import real
from tests.yolov5.conftest import IMAGE

COMMON = ("--img", IMAGE, "--workers", 0, "--device", 0, "--weights", "", "--cfg", "yolov5n.yaml")
COMMON += ("--noautoanchor", "--noplots", "--seed", 1)
CASES = {
    "multi_scale": ("--batch", 2, "--epochs", 3, "--multi-scale"),
    "frozen_layers": ("--batch", 2, "--epochs", 2, "--freeze", 3),
    "early_stop": ("--batch", 2, "--epochs", 4, "--patience", 1),
    "saved_epochs": ("--batch", 2, "--epochs", 2, "--save-period", 1),
    "quad": ("--batch", 4, "--epochs", 2, "--quad"),
    "rect": ("--batch", 2, "--epochs", 2, "--rect"),
    "smaller_last_batch": ("--batch", 3, "--epochs", 3),
    "image_weights": ("--batch", 2, "--epochs", 2, "--image-weights", "--cos-lr", "--single-cls"),
    "adamw": ("--batch", 2, "--epochs", 2, "--optimizer", "AdamW"),
}
LOSSES = [f"train/{kind}_loss" for kind in ("box", "obj", "cls")]


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_losses_of_stock(case, real_yolov5, data, tmp_path, cuda):
    checkout = real_yolov5("checkout")
    arguments = (*COMMON, *CASES[case], "--data", data.boxes, "--project", tmp_path)
    # multi_tensor_optimizer supports SGD, and raises an error by name with another optimizer.
    every = (
        ("--cuda_graph", "--channels_last", "--loss_optim", "--upsample_optim") if case == "adamw" else ("--fastdet",)
    )
    checkout.stock("train", *arguments, "--name", "stock")
    graphed = checkout.fast("train", *arguments, "--name", "graphed", "--cuda_graph").stdout
    fast = checkout.fast("train", *arguments, "--name", "fast", *every).stdout
    captured = [
        re.findall(r"captured forward and backward of DetectionModel for input (.*?);", o) for o in (graphed, fast)
    ]
    assert captured[0] and captured[1] == captured[0]
    assert len(set(captured[0])) == len(captured[0]), "a shape was captured twice"
    stock = real.results(tmp_path / "stock")
    # The graphs replay the original kernels, so that results.csv agrees to the last digit.
    assert real.results(tmp_path / "graphed") == stock
    # Another layout has other kernels, which round half precision differently.
    got = real.results(tmp_path / "fast")
    # Where nothing is learnt yet, that rounding decides which epoch is the best, and so where the training stops.
    assert got["epoch"] == stock["epoch"] or case == "early_stop"
    both = min(len(got["epoch"]), len(stock["epoch"]))
    for column in LOSSES:
        assert got[column][:both] == pytest.approx(stock[column][:both], rel=0.05), column


def test_segment_training_gives_the_losses_of_stock(real_yolov5, data, tmp_path, cuda):
    checkout = real_yolov5("checkout")
    arguments = [*COMMON, "--cfg", "yolov5n-seg.yaml", "--batch", 2, "--epochs", 2, "--data", data.segments]
    arguments += ["--project", tmp_path]
    checkout.stock("segment/train", *arguments, "--name", "stock")
    said = checkout.fast("segment/train", *arguments, "--name", "fast", "--fastdet").stdout
    assert "captured forward and backward of SegmentationModel" in said
    stock, got = (real.results(tmp_path / name) for name in ("stock", "fast"))
    for column in (*LOSSES, "train/seg_loss"):
        assert got[column] == pytest.approx(stock[column], rel=0.05), column


def test_resume_goes_on_where_the_run_stopped(real_yolov5, data, tmp_path, cuda):
    checkout = real_yolov5("checkout")
    arguments = [*COMMON, "--batch", 2, "--epochs", 3, "--data", data.boxes, "--project", tmp_path, "--name", "run"]
    stopped = checkout.program("stop_after_first_epoch.py", *arguments, "--fastdet", ok=False)
    assert stopped.returncode == 7, stopped.stdout[-3000:]
    resumed = checkout.fast("train", "--resume", tmp_path / "run" / "weights" / "last.pt", "--fastdet").stdout
    assert "captured forward and backward of DetectionModel" in resumed
    assert real.results(tmp_path / "run")["epoch"] == [0, 1, 2]
