"""Define SGD, Adam, moving average, unscale and clip in float64, one tensor after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ema(average: Tensor, value: Tensor, decay: float) -> Tensor:
    return average.double() * decay + (1 - decay) * value.double()


def ramp(decay: float, tau: float, updates: int) -> float:
    return decay * (1 - math.exp(-updates / tau))


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def clip(tensors: list[Tensor], max_norm: float) -> list[Tensor]:
    factor = min(max_norm / (norm(tensors) + 1e-6), 1.0)
    return [t.double() * factor for t in tensors]


def sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the parameter and the buffer after one step; ``buffer`` is None before the first one."""
    param, grad = param.double(), grad.double()
    if maximize:
        grad = -grad
    if weight_decay:
        grad = grad + weight_decay * param
    if momentum:
        buffer = grad if buffer is None else momentum * buffer.double() + (1 - dampening) * grad
        grad = grad + momentum * buffer if nesterov else buffer
    return param - lr * grad, buffer


def adam(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter and the moments after step number ``step``, which counts from 1."""
    param, grad = param.double(), grad.double()
    if maximize:
        grad = -grad
    if decoupled:
        param = param - lr * weight_decay * param
    else:
        grad = grad + weight_decay * param
    first = betas[0] * first.double() + (1 - betas[0]) * grad
    second = betas[1] * second.double() + (1 - betas[1]) * grad**2
    corrected = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
    return param - lr * corrected[0] / (corrected[1].sqrt() + eps), first, second


def finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)
