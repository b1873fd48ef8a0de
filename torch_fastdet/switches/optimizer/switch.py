"""Declares ``multi_tensor_optimizer``: optimizer, moving average, unscaling and clipping over all tensors at once."""

from __future__ import annotations

import torch

from torch_fastdet import optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching.evidence import SameCode, Signature
from torch_fastdet.patching.switch import Outside, Switch, Target
from torch_fastdet.switches.frameworks import ALL_READ, REFERENCE, YOLOV5_REFERENCE, ultralytics, yolov5
from torch_fastdet.switches.optimizer import ultralytics as of_ultralytics
from torch_fastdet.switches.optimizer import yolov5 as of_yolov5
from torch_fastdet.switches.optimizer.trial import moving_average

# train.py calls scaler.unscale_, clip_grad_norm_, scaler.step, scaler.update and ema.update as always. Each has the original effects when
# it returns: gradients are unscaled, then clipped, in p.grad; a step with infinite gradients changes no parameter, but moves the average.

GRADIENTS = (
    Outside(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_),
    Outside(torch.amp.GradScaler, "unscale_", optim.unscale_),
)
YOLOV5 = Switch(
    "multi_tensor_optimizer",
    "SGD, Adam, AdamW, moving average, unscale and clip over all tensors at once, without host syncs",
    (
        *GRADIENTS,
        Target(
            yolov5("utils.torch_utils"),
            "smart_optimizer",
            make=of_yolov5.replace_optimizer,
            evidence=(Signature(of_yolov5.smart_optimizer),),
        ),
        Target(
            yolov5("utils.torch_utils"),
            "ModelEMA",
            make=of_yolov5.filed_average,
            evidence=(moving_average(ModelEMA, YOLOV5_REFERENCE),),
        ),
    ),
    modules=("utils.torch_utils",),
    options={"optimizer": of_yolov5.obstacle_in_optimizer},
)

ULTRALYTICS = Switch(
    "multi_tensor_optimizer",
    "SGD, Adam, AdamW, MuSGD, moving average, unscale and clip over all tensors at once",
    (
        *GRADIENTS,
        Target(
            ultralytics("utils.torch_utils"),
            "ModelEMA",
            of_ultralytics.ModelEMA,
            evidence=(moving_average(of_ultralytics.ModelEMA, REFERENCE),),
        ),
        Target(
            ultralytics("engine.trainer"),
            "BaseTrainer.build_optimizer",
            make=of_ultralytics.build_optimizer,
            evidence=(Signature(("self", "model", "name", "lr", "momentum", "decay", "iterations")),),
        ),
        Target(
            ultralytics("engine.trainer"),
            "BaseTrainer.optimizer_step",
            make=of_ultralytics.stepping,
            evidence=(SameCode({"": ("bea1725d",)}, ALL_READ),),
            after="BaseTrainer.build_optimizer",
            otherwise="say",
        ),
    ),
    modules=("utils.torch_utils", "engine.trainer"),
)
