"""bn_act.py MODEL: training of it under bn_act_optim is stock's. yolo11n: in both memory formats, and also as a trace."""

import json
import sys

import torch
from ultralytics.nn.tasks import DetectionModel

from tests.bn_act_models import FORMATS, compare
from torch_fastdet import ultralytics as drop_in

(name,) = sys.argv[1:]
concatenations = {"yolov8n": 0, "yolo11n": 3, "yolo26n": 5}[name]  # of C3k


def build():
    torch.manual_seed(0)
    return DetectionModel(f"{name}.yaml", nc=3, verbose=False)


if name == "yolo11n":
    compare(build, drop_in, uses=("trace",), concatenations=concatenations)
else:
    compare(build, drop_in, layouts=FORMATS[:1], concatenations=concatenations)
print(json.dumps({"as stock": True}))
