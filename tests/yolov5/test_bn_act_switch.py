"""bn_act_optim on the real YOLOv5."""


def test_a_model_trains_as_stocks(yolov5):
    assert "as stock" in yolov5.program("bn_act.py", yolov5.prefix).stdout


def test_models_train_as_stocks_on_a_gpu(yolov5, cuda):
    assert yolov5.program("bn_act.py", yolov5.prefix, "cuda").stdout.count("as stock") == 2
