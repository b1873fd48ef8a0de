"""Test bn_act_optim on the real YOLOv5."""

import pytest


@pytest.mark.nightly
def test_a_model_trains_as_stocks(real_yolov5):
    yolov5 = real_yolov5("package")
    assert "as stock" in yolov5.program("bn_act.py", yolov5.prefix).stdout


def test_models_train_as_stocks_on_a_gpu(yolov5, cuda):
    assert yolov5.program("bn_act.py", yolov5.prefix, "cuda").stdout.count("as stock") == 2
