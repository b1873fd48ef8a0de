"""``channels_last``: convolutions of a model in training run on NHWC memory, their tensor cores' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_fastdet.patching.channels_last import plain_copy, to_channels_last
from torch_fastdet.yolov5.training_switch import TrainingSwitch


class ChannelsLast(TrainingSwitch):
    name = "channels_last"
    help = "train on channels_last (NHWC) memory; checkpoints stay contiguous; needs a GPU"

    def patch_model(self, model_class: type[nn.Module]) -> None:
        stock = model_class.forward

        def forward(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if model.training and torch.is_grad_enabled():
                if x.is_cuda:
                    to_channels_last(model)
                    x = x.contiguous(memory_format=torch.channels_last)
                else:
                    self.trains_on_cpu(model)
            return stock(model, x, *args, **kwargs)

        forward.__qualname__ = "channels_last.forward"
        self.replace(model_class, "forward", forward)
        self.replace(model_class, "__deepcopy__", plain_copy)
