"""RT-DETR's constants of a shape, which it makes on the CPU in each forward pass: a capture can copy nothing from there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet._torch.modules import put_attributes
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.patching.evidence import Obstacle

_CLASSES = {
    ("ultralytics.nn.modules.transformer", "AIFI"),  # the grid of its position embedding
    ("ultralytics.nn.modules.head", "RTDETRDecoder"),  # the number of each query's image
}


def _on_its_device(module: nn.Module, *args: object, **kwargs: object) -> Any:
    with torch.device(next(module.parameters()).device):
        return type(module).forward(module, *args, **kwargs)


def _blocks(model: nn.Module) -> list[nn.Module]:
    found = [m for m in model.modules() if (type(m).__module__, type(m).__name__) in _CLASSES]
    return [module for module in found if runs_plainly(module, type(module).forward)]


class ConstantsOnDevice:
    """Tensors that are made without a device are made on the model's. In training, denoising queries are drawn before the pass."""

    about = "RT-DETR makes its constants on the GPU"

    def matches(self, model: nn.Module) -> Obstacle | None:
        return None if _blocks(model) else Obstacle("it has no block of RT-DETR's.")

    def apply(self, model: nn.Module) -> Callable[[], None]:
        return put_attributes([(m, "forward", functools.partial(_on_its_device, m)) for m in _blocks(model)])
