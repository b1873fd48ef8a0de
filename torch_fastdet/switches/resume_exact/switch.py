"""Declares ``resume_exact``: a training that was stopped and resumed ends with the bits of one that was not."""

from __future__ import annotations

from torch_fastdet.patching.evidence import Asks, Signature
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.frameworks import SELF, ultralytics, yolov5
from torch_fastdet.switches.resume_exact import ultralytics as of_ultralytics
from torch_fastdet.switches.resume_exact import yolov5 as of_yolov5

CREATE_DATALOADER = (
    "path", "imgsz", "batch_size", "stride", "single_cls", "hyp", "augment", "cache", "pad", "rect", "rank", "workers",
    "image_weights", "quad", "prefix", "shuffle", "seed",
)  # fmt: skip
YOLOV5 = Switch(
    "resume_exact",
    "a stopped train.py that is resumed ends with the bits of one that was not; writes a file beside last.pt",
    (
        Target(
            yolov5("utils.callbacks"),
            "Callbacks.run",
            make=of_yolov5.calling,
            evidence=(Signature(("self", "hook", "args", "thread", "kwargs")),),
        ),
        Target(
            yolov5("utils.dataloaders"),
            "create_dataloader",
            make=of_yolov5.create_dataloader,
            evidence=(Signature(CREATE_DATALOADER),),
        ),
    ),
    modules=("utils.callbacks", "utils.dataloaders"),
    by_name_only=True,
)

ULTRALYTICS = Switch(
    "resume_exact",
    "a stopped training that is resumed ends with the bits of one that was not; writes a file beside last.pt",
    (
        Target(
            ultralytics("engine.trainer"),
            "BaseTrainer.run_callbacks",
            make=of_ultralytics.run_callbacks,
            evidence=(Signature(("self", "event")),),
        ),
        Target(
            ultralytics("engine.trainer"),
            "BaseTrainer.save_model",
            make=of_ultralytics.save_model,
            evidence=(SELF,),
            class_evidence=(Asks("the local variable of its training loop", of_ultralytics.obstacle_in_loop),),
            after="BaseTrainer.run_callbacks",
        ),
        Target(
            ultralytics("engine.trainer"),
            "BaseTrainer._do_train",
            make=of_ultralytics.do_train,
            after="BaseTrainer.save_model",
            quiet=True,
        ),
    ),
    modules=("engine.trainer",),
    by_name_only=True,
)
