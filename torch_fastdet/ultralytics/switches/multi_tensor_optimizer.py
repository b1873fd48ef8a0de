"""``multi_tensor_optimizer``: the optimizer's step of the trainer in few launches.

The trainer calls, as it always does, ``scaler.unscale_``, ``clip_grad_norm_``, ``scaler.step``, ``scaler.update`` and
``ema.update``; each finds our kernels behind its own name. Stock builds the optimizer and its parameter groups; SGD and MuSGD then
become ours, with the same groups. Others, such as torch's fused AdamW, stay, and get the clipping and the average alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_fastdet import optim
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.switch import Name, class_of
from torch_fastdet.ultralytics.dropins import ModelEMA
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

BUILD_OPTIMIZER = ("self", "model", "name", "lr", "momentum", "decay", "iterations")


class MultiTensorOptimizer(UltralyticsSwitch):
    name = "multi_tensor_optimizer"
    help = "SGD, MuSGD, moving average, unscale and clip over all tensors at once"
    modules = ("utils.torch_utils", "engine.trainer")
    names = (Name("ModelEMA", ModelEMA, ("ultralytics.utils.torch_utils",)),)

    def start(self) -> None:
        self.replace_stock(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_, "torch")
        self.replace_stock(torch.amp.GradScaler, "unscale_", optim.unscale_, "torch")

    def visit(self, module: ModuleType) -> None:
        if namespace(module).get("__name__") != "ultralytics.engine.trainer":
            return
        trainer = class_of(module, "BaseTrainer")
        stock = None if trainer is None else vars(trainer).get("build_optimizer")
        if stock is None:
            self.cannot_apply("ultralytics.engine.trainer has no BaseTrainer.build_optimizer.")
        elif not self.has_replaced(trainer) and self.takes("BaseTrainer.build_optimizer", stock, BUILD_OPTIMIZER):
            self.replace(trainer, "build_optimizer", _building(stock))


def _building(stock: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    @functools.wraps(stock)
    def build_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = stock(*args, **kwargs)
        return optimizer if _is_good_adamw(optimizer) else optim.ours(optimizer)

    build_optimizer.__module__ = __name__  # in the line that patch() prints
    build_optimizer.__qualname__ = "build_optimizer"
    return build_optimizer


def _is_good_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """AdamW on the CPU, or on a GPU already fused, as stock makes it in later versions."""
    if type(optimizer) is not torch.optim.AdamW:
        return False
    on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    return bool(optimizer.defaults["fused"]) or not on_gpu
