"""Converts an optimizer that somebody has built to the one of this package."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torch_fastdet.optim.adamw import Adam, AdamW
from torch_fastdet.optim.musgd import MuSGD
from torch_fastdet.optim.sgd import SGD


def is_stock_musgd(optimizer: object) -> bool:
    """Return whether this is Ultralytics' own MuSGD, without importing that."""
    return (type(optimizer).__module__, type(optimizer).__name__) == ("ultralytics.optim.muon", "MuSGD")


def converted(optimizer: Any) -> torch.optim.Optimizer:
    """Convert an optimizer to the class of this package; one that has no such step is returned as it is.

    Parameter groups, their order and their further keys are kept. The optimizer must not have taken a step yet. A pickle of the
    result names the class of the one that was given, and loads without this package.

    Args:
        optimizer: ``torch.optim``'s SGD, Adam or AdamW, Ultralytics' MuSGD, or another one, which is returned.
    """
    kind: Any = {torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}.get(type(optimizer))
    further = {}
    if is_stock_musgd(optimizer):
        kind, further = MuSGD, {"muon": optimizer.muon, "sgd": optimizer.sgd}
    groups = optimizer.param_groups
    several_devices = len({p.device for group in groups for p in group["params"]}) > 1
    if kind is None or several_devices or any(g.get(name) for g in groups for name in ("differentiable", "amsgrad")):
        return optimizer
    takes = MuSGD if kind is MuSGD else type(optimizer)  # the classes of this package take what PyTorch's take
    known = set(inspect.signature(takes).parameters) - {"foreach"}  # one of torch's ways to step
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    made = kind([dict(group) for group in optimizer.param_groups], **defaults, **further)
    made._filed_as = type(optimizer)
    return made
