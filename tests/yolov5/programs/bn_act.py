"""bn_act.py PREFIX: training of yolov5n and yolov5s under bn_act_optim is stock's. PREFIX is that of YOLOv5's modules."""

import importlib
import sys
from pathlib import Path

import torch

import torch_fastdet.yolov5 as drop_in
from tests.bn_act_models import FORMATS, compare

yolo = importlib.import_module(f"{sys.argv[1]}models.yolo")


def build(name="yolov5n"):
    torch.manual_seed(0)
    return yolo.DetectionModel(str(Path(yolo.__file__).parent / f"{name}.yaml"), nc=3)


compare(build, drop_in, uses=("trace", "export") if sys.argv[1] == "yolov5." else (), concatenations=8)
compare(lambda: build("yolov5s"), drop_in, layouts=FORMATS[:1], concatenations=8)
