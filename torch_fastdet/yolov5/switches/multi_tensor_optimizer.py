"""``multi_tensor_optimizer``: the optimizer's step of train.py in a handful of launches and without a host sync.

train.py calls, as it always does, ``scaler.unscale_``, ``clip_grad_norm_``, ``scaler.step``, ``scaler.update`` and
``ema.update``; each finds our kernels behind its own name, and each has stock's effects when it returns: gradients are
unscaled, then clipped, in ``p.grad``; a step with infinite gradients changes no parameter; the average moves all the same.
The three parameter groups, their order, the log line, the optimizer's state_dict and the checkpoints are stock's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.hosts.engine.switch import Name, Switch
from torch_fastdet.yolov5.dropins import smart_optimizer
from torch_fastdet.yolov5.trials import ema_differs

DEFINERS = ("utils.torch_utils", "yolov5.utils.torch_utils")


class MultiTensorOptimizer(Switch):
    name = "multi_tensor_optimizer"
    help = "SGD, AdamW, moving average, unscale and clip over all tensors at once, without host syncs"
    modules = ("utils.torch_utils",)
    names = (Name("smart_optimizer", smart_optimizer, DEFINERS), Name("ModelEMA", ModelEMA, DEFINERS))

    def start(self) -> None:
        self.replace_stock(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_, "torch")
        self.replace_stock(torch.amp.GradScaler, "unscale_", optim.unscale_, "torch")

    def refusal(self, name: Name, stock: Any) -> str | None:
        found = super().refusal(name, stock)
        return found or (ema_differs(stock) if name.attribute == "ModelEMA" else None)

    def drop_in(self, name: Name, stock: Any) -> Any:
        return self._smart_optimizer(stock) if name.attribute == "smart_optimizer" else name.drop_in

    def _smart_optimizer(self, stock: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        """Stock's, with its SGD or AdamW made ours; for other optimizers the switch says that it cannot apply."""

        def smart_optimizer_of_ours(
            model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
        ) -> torch.optim.Optimizer:
            if name not in ("SGD", "AdamW"):
                self.cannot_apply(f"the optimizer is {name}, and only SGD and AdamW are replaced.")
                return stock(model, name, lr, momentum, decay)
            # Groups, their order and the log line are stock's; the step is ours.
            return optim.ours(stock(model, name, lr, momentum, decay))

        smart_optimizer_of_ours.__module__ = smart_optimizer.__module__
        smart_optimizer_of_ours.__qualname__ = smart_optimizer.__qualname__
        return smart_optimizer_of_ours
