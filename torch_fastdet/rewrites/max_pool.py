"""Runs max pooling of stride 1 by an operator in a captured step: the stem of RT-DETR's backbone, YOLOv3-tiny's last pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torch_fastdet.nn.bn_act import window_of
from torch_fastdet.rewrites.rewrite import Forwards, obstacle_to_other_sums


def _pooled(kernel_size: int, x: Tensor) -> Tensor:
    return torch.ops.torch_fastdet.max_pool(x, kernel_size)[0]


class MaxPool(Forwards):
    """Let ``nn.MaxPool2d`` of stride 1 and without padding run an operator that keeps a byte for each window."""

    about = "max pooling of stride 1 and without padding keeps bytes as indices"
    without = "it has no max pooling of stride 1 and without padding."
    obstacles = (obstacle_to_other_sums,)

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., object]]]:
        for module in model.modules():
            if (size := window_of(module)) and module.padding == 0:
                yield module, functools.partial(_pooled, size)
