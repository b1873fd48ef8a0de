"""bn_act_optim on the real Ultralytics."""

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["yolov8n", "yolo11n", "yolo26n"])
def test_models_train_as_stocks(model, program):
    assert program("bn_act.py", model)["as stock"]


@pytest.mark.parametrize("model", ["yolov8n", "yolo11n", "yolo26n"])
def test_models_train_as_stocks_on_a_gpu(model, program, cuda):
    assert program("bn_act.py", model, "cuda")["as stock"]
