"""Implements ``smart_optimizer`` of YOLOv5, for users' own programs and for the switch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet._say import logger
from torch_fastdet._torch.private import NORM_LAYERS
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, Adam, AdamW
from torch_fastdet.patching.by_name import ByName
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Function, Names
from torch_fastdet.patching.replace import around
from torch_fastdet.patching.switch import Active

# Maps the names that train.py's --optimizer takes to functions of parameter groups, a rate and a momentum (Adam's beta 1).
OPTIMIZERS: dict[str, Callable[[list[dict[str, object]], float, float], torch.optim.Optimizer]] = {
    "SGD": lambda groups, lr, momentum: SGD(groups, lr=lr, momentum=momentum, nesterov=True),
    "Adam": lambda groups, lr, beta: Adam(groups, lr=lr, betas=(beta, 0.999)),
    "AdamW": lambda groups, lr, beta: AdamW(groups, lr=lr, betas=(beta, 0.999), weight_decay=0.0),
    "RMSProp": lambda groups, lr, momentum: torch.optim.RMSprop(groups, lr=lr, momentum=momentum),
}


def smart_optimizer(
    model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
) -> torch.optim.Optimizer:
    """Return an optimizer with YOLOv5's three parameter groups, for a train.py of your own, without YOLOv5.

    The groups, in the order in which train.py's warm-up counts on them, are all biases; all other parameters, which alone
    decay; and the weights of normalisation layers. (``--multi_tensor_optimizer`` takes YOLOv5's own function and makes its
    SGD, Adam or AdamW those of torch_fastdet.)

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
    groups: dict[str, Names] = {
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


def obstacle_in_optimizer(name: str) -> Obstacle | None:
    fast = name in ("SGD", "Adam", "AdamW")
    return None if fast else Obstacle(f"the optimizer is {name}, and only SGD, Adam and AdamW are replaced.")


@around
def replace_optimizer(
    active: Active, stock: Function, model: nn.Module, name: str = "Adam", *args: object, **options: object
) -> torch.optim.Optimizer:
    """Make SGD, Adam or AdamW of the original torch_fastdet's; for other optimizers the switch says that it cannot apply."""
    if (obstacle := obstacle_in_optimizer(name)) is not None:
        active.cannot_apply(obstacle)
    theirs = stock(model, name, *args, **options)
    return theirs if obstacle else optim.converted(theirs)


def filed_average(_: Active, stock: type, __: object) -> type:
    """Return :class:`torch_fastdet.ema.ModelEMA`, whose pickles name YOLOv5's class, and load without this package."""
    names = {"__module__": ModelEMA.__module__, "_filed_as": ByName(stock.__module__, stock.__name__)}
    return type(ModelEMA.__name__, (ModelEMA,), names)
