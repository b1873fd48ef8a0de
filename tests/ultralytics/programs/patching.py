"""Print which modules hold which functions before, during and after patch()."""

import json
import sys
import types

import torch
import ultralytics.utils.loss
import ultralytics.utils.nms
import ultralytics.utils.tal
from ultralytics.utils.metrics import bbox_iou  # a user's own module that imported stock's function

from tests.ultralytics.programs.errors import error_of
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.ultralytics import bbox_iou as ours  # and ours, on purpose

NEEDLESS = [f"ultralytics.{name}" for name in ("engine.tuner", "engine.exporter", "trackers", "solutions", "hub")]
stock = bbox_iou
users = types.ModuleType("a_module_that_is_imported_later")
sys.modules[users.__name__] = users


def holders():
    return {
        "here": bbox_iou.__module__,
        "metrics": ultralytics.utils.metrics.bbox_iou.__module__,
        "tal": ultralytics.utils.tal.bbox_iou.__module__,
        "loss": ultralytics.utils.loss.bbox_iou.__module__,
        "nms": ultralytics.utils.nms.non_max_suppression.__module__,
        "ema": ultralytics.utils.torch_utils.ModelEMA.__module__,
        "ours": ours.__module__,
        "later": getattr(getattr(users, "iou", None), "__module__", None),
    }


def rotated():
    torch.manual_seed(0)
    prediction = torch.rand(2, 4 + 3 + 1, 60) * torch.tensor([64, 64, 20, 20, 1, 1, 1, 1])[:, None]
    boxes = ultralytics.utils.nms.non_max_suppression(prediction, 0.5, 0.4, nc=3, rotated=True)
    return [rows.tolist() for rows in boxes]


result = {"before": holders(), "rotated_stock": rotated()}
result["lines"] = drop_in.patch()
result["needless"] = [name for name in NEEDLESS if name in sys.modules]
from ultralytics.engine import tuner  # noqa: E402

result["tuner"] = type(tuner.plot_tune_results).__module__
exec("from ultralytics.utils.metrics import bbox_iou as iou", vars(users))
result["patched"] = holders()
result["rotated"] = rotated()
result["twice"] = drop_in.patch()
drop_in.unpatch()
result["after"] = holders()
result["tuner after"] = type(tuner.plot_tune_results).__module__
result["same"] = bbox_iou is stock and ultralytics.utils.loss.bbox_iou is stock and users.iou is stock
drop_in.unpatch()

result["one"] = drop_in.patch(bbox_iou_optim=True)
drop_in.unpatch()
result["all_but_one"] = drop_in.patch(fastdet=True, bbox_iou_optim=False)
drop_in.unpatch()
result["unknown"] = error_of(lambda: drop_in.patch(nms=True))
result["no_bool"] = error_of(lambda: drop_in.patch(nms_optim=1))

# Replace nothing in an Ultralytics whose function takes other parameters.
original = ultralytics.utils.nms.non_max_suppression
exec("def non_max_suppression(prediction, in_place=True): pass", vars(ultralytics.utils.nms))
result["other_signature"] = error_of(lambda: drop_in.patch(nms_optim=True, bbox_iou_optim=True))
ultralytics.utils.nms.non_max_suppression = original
result["after_error"] = holders()

# With several GPUs, the script that Ultralytics writes for their processes calls patch() first.
from ultralytics.utils import dist  # noqa: E402

dist.generate_ddp_file = lambda trainer: trainer
path = sys.argv[1]
with open(path, "w") as file:
    file.write("\nif __name__ == '__main__':\n    from ultralytics.utils.nms import non_max_suppression\n")
    file.write("    print(non_max_suppression.__module__)\n")
drop_in.patch(nms_optim=True)
dist.generate_ddp_file(path)
print(json.dumps(result))
