"""``channels_last``: a model in training runs on NHWC memory, which tensor cores read, where that is faster on this GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_fastdet.hosts.shared.channels_last import plain_copy, plain_fuse
from torch_fastdet.hosts.shared.layout import LayoutChoice
from torch_fastdet.yolov5.training_switch import TrainingSwitch


class ChannelsLast(TrainingSwitch):
    name = "channels_last"
    help = "train on channels_last (NHWC) memory where that is faster; checkpoints stay contiguous; needs a GPU"

    def patch_model(self, model_class: type[nn.Module]) -> None:
        stock, choice = model_class.forward, LayoutChoice(self.name)

        def forward(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if model.training and torch.is_grad_enabled():
                if x.is_cuda:
                    x = choice.place(model, x, stock)
                else:
                    self.trains_on_cpu(model)
            return stock(model, x, *args, **kwargs)

        forward.__qualname__ = "channels_last.forward"
        self.replace(model_class, "forward", forward)
        self.replace(model_class, "__deepcopy__", plain_copy)
        if hasattr(model_class, "fuse"):
            self.replace(model_class, "fuse", plain_fuse(model_class.fuse), quietly=True)
