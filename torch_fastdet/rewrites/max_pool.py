"""Max pooling of stride 1 in a captured step: the stem of RT-DETR's backbone, YOLOv3-tiny's last pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.rewrites.rewrite import Forwards, obstacle_to_other_sums

_MOST = 15  # rows and columns of a window


def _pooled(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    return torch.ops.torch_fastdet.max_pool(x, pool.kernel_size)[0]


def _takes(pool: nn.MaxPool2d) -> bool:
    size = pool.kernel_size
    return (
        isinstance(size, int)
        and size <= _MOST
        and (pool.stride, pool.padding, pool.dilation) == (1, 0, 1)
        and not pool.return_indices
        and runs_plainly(pool, nn.MaxPool2d.forward)
    )


class MaxPool(Forwards):
    """Let ``nn.MaxPool2d`` of stride 1 and without padding run an operator that keeps a byte for each window, in training."""

    about = "max pooling of stride 1 and without padding keeps bytes as indices"
    without = "it has no max pooling of stride 1 and without padding, in training."
    obstacles = (obstacle_to_other_sums,)

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., object]]]:
        for module in model.modules() if model.training else ():
            if type(module) is nn.MaxPool2d and _takes(module):
                yield module, functools.partial(_pooled, module)
