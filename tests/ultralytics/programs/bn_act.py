"""Check that MODEL trains and evaluates under bn_act_optim as the original does: ``bn_act.py MODEL [cuda]``.

The program runs yolo11n in both memory formats, and also as a trace. The blocks of yolov9t, yolov10n and yolo12n change only in evaluation,
so it evaluates these. With cuda it runs in half precision on a GPU, and the results must be as close to float64 as the original's.
"""

import json
import sys

import torch
from ultralytics.nn.tasks import DetectionModel

from tests.bn_act_models import FORMATS, compare, compare_in_a_step, compare_in_evaluation, compare_on_a_gpu
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.rewrites.all_rewrites import fewer_copies

name, *device = sys.argv[1:]
cats = (10, 12) if name in ("yolov10n", "yolo26n") else (10, 10)
concatenations = {"yolov8n": 0, "yolo11n": 3, "yolo26n": 5}.get(name)  # of C3k
batch = 32 if concatenations is None else 2


def build():
    torch.manual_seed(0)
    return DetectionModel(f"{name}.yaml", nc=3, verbose=False)


if device:
    compare_on_a_gpu(build, drop_in)
    compare_in_evaluation(build, drop_in, cats, "cuda", (torch.float16,), batch)
elif concatenations is None:
    compare_in_evaluation(build, drop_in, cats, batch=batch)
elif name == "yolo11n":
    compare(build, drop_in, uses=("trace",), concatenations=concatenations)
else:
    compare(build, drop_in, layouts=FORMATS[:1], concatenations=concatenations)
if not device and concatenations is not None:
    compare_in_evaluation(build, drop_in, cats)
    # The head of yolov8n joins one pair a level. In the others, the box and class branches begin with different kinds of convolutions.
    of_heads = 3 if name == "yolov8n" else 0
    compare_in_a_step(build, drop_in, concatenations + of_heads, fewer_copies)
print(json.dumps({"as stock": True}))
