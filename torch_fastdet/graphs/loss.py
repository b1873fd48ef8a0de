"""Declares what a loss may offer to a training step in graphs, beyond the call itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class HasGraphKey(Protocol):
    """Declare a loss whose host-side settings can change: a step is captured again when the key does."""

    def graph_key(self) -> Hashable:
        """Return what changes when a call that is captured now would do something else than before."""
        ...


@runtime_checkable
class GraphLoss(HasGraphKey, Protocol):
    """Declare what a loss made for graphs has, as :class:`torch_fastdet.yolov5.ComputeLoss` does."""

    #: The number of columns of the targets.
    target_columns: int

    def in_step(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter the step's context, around model and loss: the loss reports no error there, and may arrange the heads."""
        ...


class Offer:
    """Hold what a loss offers; for a loss that offers nothing, what stands in for it."""

    def __init__(self, loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.loss = loss
        full = loss if isinstance(loss, GraphLoss) else None
        #: None if the loss accepts any targets.
        self.target_columns: int | None = None if full is None else full.target_columns
        self.graph_key: Callable[[], Hashable] = loss.graph_key if isinstance(loss, HasGraphKey) else lambda: None
        self.in_step: Callable[[nn.Module], AbstractContextManager[None]] = (
            (lambda _: contextlib.nullcontext()) if full is None else full.in_step
        )
