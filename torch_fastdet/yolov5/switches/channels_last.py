"""``channels_last``: convolutions of a model in training run on NHWC memory, their tensor cores' own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torch_fastdet.yolov5.training_switch import TrainingSwitch


def to_channels_last(model: nn.Module) -> bool:
    """Give the 4-D parameters NHWC memory, in place; False if they have it already."""
    changed = False
    for parameter in model.parameters():
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            changed = True
    return changed


def plain_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` of a model, with contiguous parameters.

    YOLOv5 averages, validates and saves copies, never the model itself. Stock's ``fuse()`` calls ``.view`` on the weights of
    a checkpoint, which fails on NHWC memory.
    """
    result = model.__class__.__new__(model.__class__)
    memo[id(model)] = result
    result.__dict__.update(copy.deepcopy(model.__dict__, memo))
    for parameter in result.parameters():
        parameter.data = parameter.data.contiguous()
    return result


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
