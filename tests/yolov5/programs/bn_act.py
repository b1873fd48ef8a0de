"""Check that a model's training under bn_act_optim equals the original: ``bn_act.py PREFIX [cuda]``. PREFIX is that of YOLOv5's modules.

The package trains yolov5n, whose later uses are compared too; a checkout trains yolov5n and yolov5s. With cuda, both train in half
precision on a GPU, and must be as close to float64 as the original.
"""

import importlib
import sys
from pathlib import Path

import torch

import torch_fastdet.yolov5 as drop_in
from tests.bn_act_models import FORMATS, compare, compare_in_a_step, compare_in_evaluation, compare_on_a_gpu

yolo = importlib.import_module(f"{sys.argv[1]}models.yolo")


def build(name="yolov5n"):
    torch.manual_seed(0)
    return yolo.DetectionModel(str(Path(yolo.__file__).parent / f"{name}.yaml"), nc=3)


if sys.argv[2:]:
    compare_on_a_gpu(build, drop_in)
    compare_on_a_gpu(lambda: build("yolov5s"), drop_in)
    compare_in_evaluation(build, drop_in, (8, 8), "cuda", (torch.float16,))
    sys.exit()
compare(build, drop_in, uses=("trace", "export") if sys.argv[1] == "yolov5." else (), concatenations=8)
compare_in_a_step(build, drop_in, joined=8)
compare_in_evaluation(build, drop_in, (8, 8))
if sys.argv[1] != "yolov5.":
    compare(lambda: build("yolov5s"), drop_in, layouts=FORMATS[:1], concatenations=8)
