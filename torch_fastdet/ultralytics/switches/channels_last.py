"""``channels_last``: a model in training runs on NHWC memory, which tensor cores read, where that is faster on this GPU.

Newer trainers do this themselves: there is nothing to replace then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from torch_fastdet._say import say
from torch_fastdet.graphs import _capture
from torch_fastdet.hosts.shared.channels_last import plain_copy, plain_fuse
from torch_fastdet.hosts.shared.layout import LayoutChoice
from torch_fastdet.ultralytics.switch import installed_version, release
from torch_fastdet.ultralytics.training_switch import TrainingSwitch

IN_STOCK = "8.4.150"  # whose trainer has the argument channels_last, on by default


class ChannelsLast(TrainingSwitch):
    name = "channels_last"
    help = f"train on channels_last (NHWC) memory, which ultralytics {IN_STOCK} and later do themselves; needs a GPU"

    def start(self) -> None:
        if self._is_in_stock():
            say(f"{self.name}: ultralytics {installed_version()} trains on NHWC memory itself; nothing is replaced")

    def objection(self, trainer: Any) -> str | None:
        if self._is_in_stock() and trainer.args.channels_last is False:
            return "channels_last=False is given too; leave one of the two out."
        return super().objection(trainer)

    def patch_model(self, model_class: Any) -> None:
        if self._is_in_stock():
            return
        stock, choice = model_class.predict, LayoutChoice(self.name)
        if not self.takes("DetectionModel.predict", stock, ("self", "x", "profile", "augment", "embed")):
            return

        @functools.wraps(stock, assigned=(), updated=())  # its signature, which the next switch looks at
        def predict(model: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
            trains = model.training and torch.is_grad_enabled() and getattr(model, "criterion", None) is not None
            if trains and isinstance(x, torch.Tensor) and _capture.on_gpu(x):
                x = choice.place(model, x, stock)
            return stock(model, x, *args, **kwargs)

        predict.__qualname__ = "channels_last.predict"
        self.replace(model_class, "predict", predict)
        self.replace(model_class, "__deepcopy__", plain_copy)
        if hasattr(model_class, "fuse"):
            self.replace(model_class, "fuse", plain_fuse(model_class.fuse), quietly=True)

    @staticmethod
    def _is_in_stock() -> bool:
        return release(installed_version()) >= release(IN_STOCK)
