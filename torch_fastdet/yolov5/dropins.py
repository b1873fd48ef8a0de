"""Functions with the names, signatures and results of YOLOv5's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet import ops
from torch_fastdet.optim import SGD
from torch_fastdet.suppression import yolov5_non_max_suppression as non_max_suppression

__all__ = ["bbox_iou", "non_max_suppression", "smart_optimizer"]


def bbox_iou(
    box1: torch.Tensor,
    box2: torch.Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> torch.Tensor:
    """IoU, GIoU, DIoU or CIoU of boxes (..., 4), as YOLOv5's ``utils.metrics.bbox_iou``: returns (..., 1), a fresh tensor.

    ``box1`` and ``box2`` broadcast over the leading dimensions; boxes are centre x, centre y, width, height in any one
    unit, or corners with ``xywh=False``. If several kinds are asked for, CIoU goes before DIoU before GIoU. Where YOLOv5
    gives NaN (boxes without height) this gives a finite value and gradient. With corners, ``eps`` is added to the height,
    as in YOLOv5 v7.0 and in Ultralytics; PyPI's yolov5 7.0.14 clamps the height to ``eps`` instead.
    """
    return ops.bbox_iou(box1, box2, xywh, GIoU, DIoU, CIoU, eps)


def smart_optimizer(
    model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
) -> torch.optim.Optimizer:
    """YOLOv5's ``utils.torch_utils.smart_optimizer``: three parameter groups, in the order biases, weights with ``decay``,
    weights of normalisation layers; and its log line.

    ``name`` is SGD (with Nesterov momentum), which is then :class:`torch_fastdet.optim.SGD`, or Adam, AdamW or RMSProp, which
    are torch's.
    """
    norms = tuple(kind for kind_name, kind in vars(nn).items() if "Norm" in kind_name)
    biases: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for module in model.modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter_name == "bias":
                biases.append(parameter)
            elif parameter_name == "weight" and isinstance(module, norms):
                undecayed.append(parameter)
            else:
                decayed.append(parameter)
    optimizer: torch.optim.Optimizer
    if name == "SGD":
        optimizer = SGD(biases, lr=lr, momentum=momentum, nesterov=True)
    elif name == "Adam":
        optimizer = torch.optim.Adam(biases, lr=lr, betas=(momentum, 0.999))
    elif name == "AdamW":
        optimizer = torch.optim.AdamW(biases, lr=lr, betas=(momentum, 0.999), weight_decay=0.0)
    elif name == "RMSProp":
        optimizer = torch.optim.RMSprop(biases, lr=lr, momentum=momentum)
    else:
        raise NotImplementedError(f"Optimizer {name} not implemented.")
    optimizer.add_param_group({"params": decayed, "weight_decay": decay})
    optimizer.add_param_group({"params": undecayed, "weight_decay": 0.0})
    logger, colour = _logger()
    logger.info(
        f"{colour('optimizer:')} {type(optimizer).__name__}(lr={lr}) with parameter groups "
        f"{len(undecayed)} weight(decay=0.0), {len(decayed)} weight(decay={decay}), {len(biases)} bias"
    )
    return optimizer


def _logger() -> tuple[logging.Logger, Callable[[str], str]]:
    """The logger and the colouring of the YOLOv5 that is loaded, or the logger of that name."""
    for name in ("utils.general", "yolov5.utils.general"):
        general: Any = sys.modules.get(name)
        if hasattr(general, "LOGGER") and hasattr(general, "colorstr"):
            return general.LOGGER, general.colorstr
    return logging.getLogger("yolov5"), str
