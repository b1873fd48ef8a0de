"""``bn_act_optim``: BatchNorm2d and the activation behind it as one operator in training, in Ultralytics' Conv and Bottleneck."""

from __future__ import annotations

from torch_fastdet.hosts.shared.bn_act import BnActMethods
from torch_fastdet.ultralytics.switch import UltralyticsSwitch


class BnActOptim(BnActMethods, UltralyticsSwitch):
    modules = ("nn.modules.conv", "nn.modules.block")
    conv_modules = ("ultralytics.nn.modules.conv",)
    bottleneck_modules = ("ultralytics.nn.modules.block",)
