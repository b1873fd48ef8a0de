"""Runs training passes of YOLOv5's models in NHWC memory, and makes contiguous copies of the models."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_fastdet._say import say, saying_once
from torch_fastdet.graphs.capture import on_gpu
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import around, in_place_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.channels_last.layout import place, to_channels_last
from torch_fastdet.switches.cuda_graph.yolov5 import trains


def in_layout(active: Active, stock: Function, model_class: type[nn.Module]) -> object:
    """Return a model's ``forward``, whose training passes run in the layout that is faster."""
    once = saying_once(active.name)
    active.shared(wrapped_in_layout).append(model_class)

    @in_place_of(stock, "channels_last.forward")
    def forward(model: nn.Module, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        return stock(model, place(model, x, once) if trains(active, model, x) else x, *args, **kwargs)

    return forward


def wrapped_in_layout(active: Active) -> list[type[nn.Module]]:
    """Return classes whose models DistributedDataParallel gets in their layout: it places gradients by the weights' strides as it finds them."""
    classes: list[type[nn.Module]] = []
    stock = DistributedDataParallel.__init__

    @in_place_of(stock, "channels_last.ddp_init")
    def __init__(ddp: DistributedDataParallel, module: nn.Module, *args: Stock, **kwargs: Stock) -> None:
        weights = next(module.parameters(), None)
        if isinstance(module, tuple(classes)) and weights is not None and on_gpu(weights):
            to_channels_last(module)
            say(f"{active.name}: trains in NHWC memory on {weights.device}")
        stock(ddp, module, *args, **kwargs)

    active.replace(DistributedDataParallel, "__init__", __init__, quietly=True)
    return classes


def _make_contiguous(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def plain_copy(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Run ``copy.deepcopy`` of a model, with contiguous parameters: YOLOv5 averages and saves copies, whose ``fuse()`` calls ``.view``."""
    reduced: Stock = model.__reduce_ex__(4)  # as copy.deepcopy, so that a class may leave something out
    make, arguments, *state = reduced
    result = memo[id(model)] = make(*copy.deepcopy(arguments, memo))
    if state and state[0] is not None:
        result.__setstate__(copy.deepcopy(state[0], memo))
    _make_contiguous(result)
    return result


@around
def plain_fuse(_: object, stock: Function, model: nn.Module, *args: object, **kwargs: object) -> object:
    """Make a model's parameters contiguous before ``fuse()``, because the original calls ``.view`` on them."""
    _make_contiguous(model)
    return stock(model, *args, **kwargs)
