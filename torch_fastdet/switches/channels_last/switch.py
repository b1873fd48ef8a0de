"""``channels_last``: train on NHWC memory where that is faster."""

from __future__ import annotations

from torch_fastdet.patching.machine import needs_gpu
from torch_fastdet.patching.switch import GPU, Switch
from torch_fastdet.rewrites.yolov5 import STOCK_MODULES as MODELS
from torch_fastdet.switches.cuda_graph import ultralytics as of_ultralytics
from torch_fastdet.switches.cuda_graph import yolov5 as of_yolov5
from torch_fastdet.switches.cuda_graph.common import layout_targets
from torch_fastdet.switches.cuda_graph.switch import setup_train_target
from torch_fastdet.switches.frameworks import VERSION, ultralytics

CLASSIFIER = "ClassificationModel"  # segmentation's derives from DetectionModel
YOLOV5 = Switch(
    "channels_last",
    "train on channels_last (NHWC) memory where that is faster; checkpoints stay contiguous; needs a GPU",
    (
        *layout_targets(MODELS, "forward", of_yolov5.trains),
        *layout_targets(MODELS, "forward", of_yolov5.trains, model=CLASSIFIER, missing="nothing"),
    ),
    modules=("models.yolo",),
    evidence=(GPU,),
    options={"device": needs_gpu},
)

ULTRALYTICS = Switch(
    "channels_last",
    f"train on channels_last (NHWC) memory, which ultralytics {of_ultralytics.IN_STOCK} and later do themselves; needs a GPU",
    (
        *layout_targets(
            ultralytics("nn.tasks"),
            "predict",
            of_ultralytics.trains,
            (of_ultralytics.PREDICT,),
            unless=of_ultralytics.is_in_stock,
        ),
        setup_train_target(of_ultralytics.two_layouts),
    ),
    modules=("nn.tasks", "engine.trainer"),
    evidence=(GPU, VERSION),
    options={"device": needs_gpu},
    notice=of_ultralytics.in_stock,
)
