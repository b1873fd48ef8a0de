"""bn_act.py PREFIX: yolov5n's training under bn_act_optim is stock's. PREFIX is that of YOLOv5's modules."""

import importlib
import sys
from pathlib import Path

import torch

import torch_fastdet.yolov5 as drop_in
from tests.bn_act_models import compare

yolo = importlib.import_module(f"{sys.argv[1]}models.yolo")


def build():
    torch.manual_seed(0)
    return yolo.DetectionModel(str(Path(yolo.__file__).parent / "yolov5n.yaml"), nc=3)


compare(build, drop_in, uses=("trace", "export") if sys.argv[1] == "yolov5." else (), concatenations=8)
