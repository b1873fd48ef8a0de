"""Declares ``cuda_graph``: the passes of a model as CUDA graphs."""

from __future__ import annotations

import functools

from torch_fastdet.patching.evidence import Signature
from torch_fastdet.patching.switch import GPU, Switch, Target, obstacle_in_device
from torch_fastdet.rewrites import all_rewrites
from torch_fastdet.switches.cuda_graph import ultralytics as of_ultralytics
from torch_fastdet.switches.cuda_graph import yolov5 as of_yolov5
from torch_fastdet.switches.cuda_graph.common import timer
from torch_fastdet.switches.cuda_graph.rtdetr_step import DRAW, DRAWS, LOSS, get_cdn_group, model_loss, preprocess_batch
from torch_fastdet.switches.cuda_graph.ultralytics import FORWARD, PREDICT, model_predict
from torch_fastdet.switches.frameworks import SELF, ultralytics, yolov5

_TASKS = ultralytics("nn.tasks")
YOLOV5 = Switch(
    "cuda_graph",
    "train, detect and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU",
    (
        # The segmentation model derives from it.
        Target(yolov5("models.yolo"), "DetectionModel.forward", make=of_yolov5.model_forward),
        Target(yolov5("models.yolo"), "ClassificationModel.forward", make=of_yolov5.model_forward, otherwise="say"),
        Target(yolov5("models.common"), "DetectMultiBackend.forward", make=of_yolov5.backend_forward),
        timer(yolov5("utils.general")),
    ),
    modules=("models.yolo", "models.common", "utils.general"),
    evidence=(GPU,),
    options={"device": obstacle_in_device},
    rewrites=all_rewrites.YOLOV5,
)


_TRAINER = ultralytics("engine.trainer")
_beside = functools.partial(Target, otherwise="nothing", quiet=True)  # the graphs do without it
ULTRALYTICS = Switch(
    "cuda_graph",
    "train, predict and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU",
    (
        # The segmentation, pose and OBB models derive from it.
        Target(_TASKS, "DetectionModel.predict", make=model_predict, evidence=(PREDICT,)),
        Target(_TASKS, "ClassificationModel.predict", make=model_predict, evidence=(PREDICT,), otherwise="say"),
        Target(_TASKS, "RTDETRDetectionModel.loss", make=model_loss, evidence=(LOSS,), otherwise="say"),
        Target((DRAWS,), "get_cdn_group", make=get_cdn_group, evidence=(DRAW,), otherwise="say", quiet=True),
        *(
            _beside(ultralytics(module), method, make=preprocess_batch, evidence=(Signature(("self", "batch")),))
            for module, method in (
                ("models.yolo.detect.train", "DetectionTrainer.preprocess_batch"),
                ("models.yolo.detect.val", "DetectionValidator.preprocess"),
            )
        ),
        Target(_TRAINER, "BaseTrainer._setup_train", make=of_ultralytics.setup_train, evidence=(SELF,), quiet=True),
        _beside(_TRAINER, "BaseTrainer._build_train_pipeline", make=of_ultralytics.begin_again, evidence=(SELF,)),
        _beside(_TRAINER, "BaseTrainer.validate", make=of_ultralytics.validate, evidence=(SELF,)),
        Target(ultralytics("nn.backends.pytorch"), "PyTorchBackend.forward", make=of_ultralytics.backend_forward),
        _beside(ultralytics("nn.autobackend"), "AutoBackend.__init__", make=of_ultralytics.backend_init),
        _beside(_TASKS, "BaseModel.forward", make=of_ultralytics.model_forward, evidence=(FORWARD,)),
        timer(ultralytics("utils.ops")),
    ),
    modules=("nn.tasks", "engine.trainer", "nn.backends.pytorch", "utils.ops"),
    evidence=(GPU,),
    options={"device": obstacle_in_device, "compile": of_ultralytics.obstacle_in_compile},
    rewrites=all_rewrites.ULTRALYTICS,
)
