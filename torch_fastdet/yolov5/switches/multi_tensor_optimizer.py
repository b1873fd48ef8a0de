"""``multi_tensor_optimizer``: the optimizer's step of train.py in a handful of launches and without a host sync.

train.py calls, as it always does, ``scaler.unscale_``, ``clip_grad_norm_``, ``scaler.step``, ``scaler.update`` and
``ema.update``; each finds our kernels behind its own name, and each has stock's effects when it returns: gradients are
unscaled, then clipped, in ``p.grad``; a step with infinite gradients changes no parameter; the average moves all the same.
The three parameter groups, their order, the log line, the optimizer's state_dict and the checkpoints are stock's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.yolov5.dropins import smart_optimizer
from torch_fastdet.yolov5.switch import Switch

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches

STOCK_MODULES = ("utils.torch_utils", "yolov5.utils.torch_utils")


def _is_stock(value: Any, kind: type[FunctionType | type], name: str) -> bool:
    return isinstance(value, kind) and value.__name__ == name and value.__module__ in STOCK_MODULES


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class MultiTensorOptimizer(Switch):
    name = "multi_tensor_optimizer"
    help = "SGD, moving average, unscale and clip over all tensors at once, without host syncs"
    modules = ("utils.torch_utils",)

    def __init__(self) -> None:
        # Stock's smart_optimizer -> ours: with both layouts loaded there are two.
        self._made: dict[FunctionType, Callable[..., torch.optim.Optimizer]] = {}

    def start(self, patches: Patches) -> None:
        patches.replace(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_)
        patches.replace(torch.amp.GradScaler, "unscale_", optim.unscale_)

    def visit(self, module: ModuleType, patches: Patches) -> None:
        for attribute, value in list(vars(module).items()):
            if _is_stock(value, FunctionType, "smart_optimizer"):
                ours: Any = self._smart_optimizer(value, patches)
            elif _is_stock(value, type, "ModelEMA"):
                ours = ModelEMA
            else:
                continue
            wanted = _parameters(smart_optimizer if ours is not ModelEMA else ModelEMA)
            if _parameters(value) == wanted:
                patches.replace(module, attribute, ours)
            else:
                patches.cannot_apply(
                    self,
                    f"{value.__module__}.{value.__name__} takes ({', '.join(_parameters(value))}), not ({', '.join(wanted)}).",
                )

    def _smart_optimizer(self, stock: FunctionType, patches: Patches) -> Callable[..., torch.optim.Optimizer]:
        """Stock's, with its SGD made ours; for other optimizers the switch says that it cannot apply."""
        if stock in self._made:
            return self._made[stock]

        def smart_optimizer_for_sgd(
            model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
        ) -> torch.optim.Optimizer:
            if name != "SGD":
                patches.cannot_apply(
                    self, f"the optimizer is {name}, and only SGD has a fused step; leave --optimizer at SGD."
                )
            optimizer = stock(model, name, lr, momentum, decay)
            if type(optimizer) is not torch.optim.SGD:
                return optimizer
            # Groups, their order and the log line are stock's; the step is ours.
            return optim.SGD([dict(group) for group in optimizer.param_groups], **optimizer.defaults)

        smart_optimizer_for_sgd.__module__ = smart_optimizer.__module__
        smart_optimizer_for_sgd.__qualname__ = smart_optimizer.__qualname__
        self._made[stock] = smart_optimizer_for_sgd
        return smart_optimizer_for_sgd
