"""``bn_act_optim``: BatchNorm2d and the activation behind it as one operator in training, in YOLOv5's Conv and Bottleneck."""

from __future__ import annotations

from torch_fastdet.hosts.shared.bn_act import BnActMethods


class BnActOptim(BnActMethods):
    modules = ("models.common",)
    conv_modules = bottleneck_modules = ("models.common", "yolov5.models.common")
