"""``multi_tensor_optimizer``: the moving average of the model in one launch a step."""

from __future__ import annotations

from torch_fastdet.patching.switch import Name
from torch_fastdet.ultralytics.dropins import ModelEMA
from torch_fastdet.ultralytics.switch import UltralyticsSwitch


class MultiTensorOptimizer(UltralyticsSwitch):
    name = "multi_tensor_optimizer"
    help = "moving average of the model over all tensors at once"
    modules = ("utils.torch_utils", "engine.trainer")
    names = (Name("ModelEMA", ModelEMA, ("ultralytics.utils.torch_utils",)),)
