"""Keeps RT-DETR's constants of a shape on the GPU: it makes them on the CPU, and a capture cannot copy from there."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.patching.protocols import Function
from torch_fastdet.rewrites.rewrite import Forwards

_CLASSES = {
    ("ultralytics.nn.modules.transformer", "AIFI"),  # the grid of its position embedding
    ("ultralytics.nn.modules.head", "RTDETRDecoder"),  # the number of each query's image
}


def _on_its_device(module: nn.Module, *args: object, **kwargs: object) -> object:
    with torch.device(next(module.parameters()).device):
        return type(module).forward(module, *args, **kwargs)


class ConstantsOnDevice(Forwards):
    """Make tensors for which no device is named on the model's. In training, denoising queries are drawn before the pass."""

    about = "RT-DETR makes its constants on the GPU"
    without = "it has no block of RT-DETR's."

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Function]]:
        for module in model.modules():
            kind = type(module)
            if (kind.__module__, kind.__name__) in _CLASSES and runs_plainly(module, kind.forward):
                yield module, functools.partial(_on_its_device, module)
