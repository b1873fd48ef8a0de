"""Functions with the names, signatures and results of YOLOv5's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet import ops
from torch_fastdet._say import logger
from torch_fastdet._torch.floats import as_float
from torch_fastdet._torch.private import NORM_LAYERS
from torch_fastdet.masks import yolov5_crop_mask as crop_mask
from torch_fastdet.masks import yolov5_process_mask as process_mask
from torch_fastdet.masks import yolov5_process_mask_native as process_mask_native
from torch_fastdet.masks import yolov5_process_mask_upsample as process_mask_upsample
from torch_fastdet.optim import SGD, Adam, AdamW
from torch_fastdet.suppression import yolov5_non_max_suppression as non_max_suppression

__all__ = [
    "bbox_iou",
    "crop_mask",
    "non_max_suppression",
    "process_mask",
    "process_mask_native",
    "process_mask_upsample",
    "smart_optimizer",
]


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
    unit, or corners with ``xywh=False``. If several kinds are asked for, CIoU takes precedence over DIoU, and DIoU over GIoU.
    Where YOLOv5 gives NaN (boxes without height) this gives a finite value and gradient. With corners, ``eps`` is added to the height,
    as in YOLOv5 v7.0 and in Ultralytics; PyPI's yolov5 7.0.14 clamps the height to ``eps`` instead.
    """
    return ops.bbox_iou(as_float(box1), as_float(box2), xywh, GIoU, DIoU, CIoU, eps)


# By the names that train.py's --optimizer takes: what makes one of parameter groups, a rate and a momentum (Adam's beta 1).
OPTIMIZERS: dict[str, Callable[[list[dict[str, object]], float, float], torch.optim.Optimizer]] = {
    "SGD": lambda groups, lr, momentum: SGD(groups, lr=lr, momentum=momentum, nesterov=True),
    "Adam": lambda groups, lr, beta: Adam(groups, lr=lr, betas=(beta, 0.999)),
    "AdamW": lambda groups, lr, beta: AdamW(groups, lr=lr, betas=(beta, 0.999), weight_decay=0.0),
    "RMSProp": lambda groups, lr, momentum: torch.optim.RMSprop(groups, lr=lr, momentum=momentum),
}


def smart_optimizer(
    model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
) -> torch.optim.Optimizer:
    """An optimizer with YOLOv5's three parameter groups: for a train.py of your own, without YOLOv5.

    The groups, in the order in which train.py's warm-up counts on them, are all biases; all other parameters, which alone
    decay; and the weights of normalisation layers. (``--multi_tensor_optimizer`` takes YOLOv5's own function and makes its
    SGD, Adam or AdamW ours.)

    Args:
        model: whose parameters to train.
        name: "SGD", with Nesterov momentum, "Adam" and "AdamW" are those of :mod:`torch_fastdet.optim`; "RMSProp" is torch's.
        lr: learning rate.
        momentum: SGD's and RMSProp's momentum, Adam's first beta.
        decay: weight decay.

    Raises:
        NotImplementedError: another name.
    """
    if name not in OPTIMIZERS:
        raise NotImplementedError(f"smart_optimizer: name is {name!r}, but one of {', '.join(OPTIMIZERS)} is expected")
    groups: dict[str, dict[str, Any]] = {
        "bias": {"params": []},
        "rest": {"params": [], "weight_decay": decay},
        "norm": {"params": [], "weight_decay": 0.0},
    }
    for path, parameter in model.named_parameters():
        owner, _, leaf = path.rpartition(".")
        normalises = leaf == "weight" and isinstance(model.get_submodule(owner), NORM_LAYERS)
        groups["bias" if leaf == "bias" else "norm" if normalises else "rest"]["params"].append(parameter)
    optimizer = OPTIMIZERS[name](list(groups.values()), lr, momentum)
    counts = ", ".join(f"{len(group['params'])} {title}" for title, group in groups.items())
    logger.info("%s, lr %g, parameters by group: %s (decay %g)", type(optimizer).__name__, lr, counts, decay)
    return optimizer
