"""Runs DistributedDataParallel around a model whose passes are CUDA graphs.

It learns from hooks of autograd that a gradient is there, and a replayed backward pass calls none. So its ``forward`` is replaced for models
of a switch: :class:`torch_fastdet.graphs.ranks.Ranks` sends buffers and averages gradients. Modes that do more run the original.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_fastdet._torch import private
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.graphs.ranks import GradientAverage, Ranks
from torch_fastdet.graphs.refusal import why_not
from torch_fastdet.patching.replace import in_place_of
from torch_fastdet.patching.switch import Active


class GraphedDDP:
    """Replace ``DistributedDataParallel.forward`` for a ``cuda_graph`` switch."""

    def __init__(self, switch: Active) -> None:
        self._switch = switch
        self._classes: list[type[nn.Module]] = []
        self._ranks: weakref.WeakKeyDictionary[nn.Module, Ranks | None] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models already reported as left to stock
        self._running: tuple[nn.Module, Ranks | None] | None = None

    def take(self, model_class: type[nn.Module]) -> None:
        """Average models of this class here from now on."""
        self._classes.append(model_class)
        if self._switch.has_replaced(DistributedDataParallel, "forward"):
            return
        stock = DistributedDataParallel.forward

        @in_place_of(stock, f"{self._switch.name}.ddp_forward")
        def forward(ddp: DistributedDataParallel, *inputs: object, **kwargs: object) -> object:
            model: nn.Module = ddp.module
            if torch.compiler.is_compiling() or not isinstance(model, tuple(self._classes)):
                return stock(ddp, *inputs, **kwargs)
            trains = ddp.training and torch.is_grad_enabled()
            ranks = self._ranks_of(ddp) if trains else None
            with own_attributes([(self, "_running", (model, ranks))]):
                if ranks is not None:
                    return _forward(ddp, ranks, inputs, kwargs)
                outputs = stock(ddp, *inputs, **kwargs)
                if (usual := self._ranks.get(ddp)) is not None:
                    usual.passed_by()
                return outputs

        self._switch.replace(DistributedDataParallel, "forward", forward, quietly=True)

    def average(self, model: nn.Module) -> GradientAverage | None:
        """Return who averages the gradients of the forward pass that runs now; None for DistributedDataParallel itself, or nobody."""
        running = self._running
        return None if running is None or running[0] is not model or running[1] is None else running[1].average

    def wraps(self, model: nn.Module) -> bool:
        """Return whether the forward pass that runs now is one of DistributedDataParallel around this model."""
        return self._running is not None and self._running[0] is model

    def _ranks_of(self, ddp: DistributedDataParallel) -> Ranks | None:
        """Decide from what is the same on every rank, because all of them must exchange the same."""
        if getattr(ddp, "static_graph", False) and ddp not in self._begun:
            # The reducer learns from the first backward pass which hooks fire. A graphed one fires none, which would be wrong after
            # unpatch().
            self._begun.add(ddp)
            return None
        mode = private.ddp_mode(ddp)
        if mode is not None:  # a hook or Join may come later, and go
            if ddp not in self._told:
                self._told.add(ddp)
                self._switch.cannot_apply(f"DistributedDataParallel runs as it is: {mode}.")
            return None
        if ddp not in self._ranks:
            refused = why_not(ddp.module, averaged=True)
            self._ranks[ddp] = None if refused is not None else Ranks(ddp.process_group)
            if refused is not None:
                self._switch.cannot_apply(f"{type(ddp.module).__name__} cannot be captured: {refused}.")
        return self._ranks[ddp]


def _forward(
    ddp: DistributedDataParallel, ranks: Ranks, inputs: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    ranks.sync, ranks.synced = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
    # torch 2.13 calls it forward_sync_buffers.
    ranks.broadcast_buffers = getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True))
    ddp.require_forward_param_sync = ddp.require_backward_grad_sync
    if ddp.device_ids:
        (inputs, *_), (kwargs, *_) = ddp.to_kwargs(inputs, kwargs, ddp.device_ids[0])
    return ranks.run(ddp.module, lambda: ddp.module(*inputs, **kwargs))
