"""Training of yolov8n, yolo11n and yolo26n under bn_act_optim is stock's."""

import json

import torch
from ultralytics.nn.tasks import DetectionModel

from tests.bn_act_models import FORMATS, compare
from torch_fastdet import ultralytics as drop_in

for name, concatenations in {"yolov8n.yaml": 0, "yolo11n.yaml": 3, "yolo26n.yaml": 5}.items():  # of C3k

    def build(name=name):
        torch.manual_seed(0)
        return DetectionModel(name, nc=3, verbose=False)

    if name == "yolo11n.yaml":
        compare(build, drop_in, uses=("trace",), concatenations=concatenations)
    else:
        compare(build, drop_in, layouts=FORMATS[:1], concatenations=concatenations)
print(json.dumps({"as stock": True}))
