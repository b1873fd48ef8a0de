"""Tells whether a graph is still valid: whether the addresses and the host's decisions in it are the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from torch_fastdet._torch.private import forward_hooks
from torch_fastdet._torch.tensors import Walk, same_objects
from torch_fastdet.graphs.capture import autocast_dtype
from torch_fastdet.graphs.loss import Offer
from torch_fastdet.optim import FusedStep

_training = operator.attrgetter("training")
# These compute the same in both modes. Fusing a model, frameworks create new convolutions in training mode.
_OF_NO_MODE = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.Identity)


class BakedModule:
    """Note what graphs of one module's passes have baked in."""

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._addresses: tuple[int, ...] = ()

    def moved(self, module: nn.Module) -> bool:
        """Return whether the module has other tensors, or tensors in another place, than at the last call, or this is the first."""
        walk = Walk.renewed(self._walk, module)
        addresses = tuple([t.data_ptr() for t in walk.tensors])
        # The objects must be the same too, because gradients go to the parameters of the capture.
        moved = walk is not self._walk or addresses != self._addresses
        self._walk, self._addresses = walk, addresses
        return moved

    def key(self, x: torch.Tensor) -> tuple:
        """Return what decides which kernels run; call :meth:`moved` before."""
        walk = self._walk
        assert walk is not None
        return (
            tuple(x.shape),
            x.dtype,
            x.stride(),
            autocast_dtype(),
            tuple([p.requires_grad for p in walk.parameters]),
            tuple([m.training for m in walk.submodules]),
        )


class BakedForward(BakedModule):
    """Note what graphs of one module's forward passes in eval mode have baked in, and what else ``settings`` reads that decides them."""

    def __init__(self, settings: Callable[[nn.Module], Iterable[object]]) -> None:
        super().__init__()
        self._read = settings
        self._settings: list[object] = []
        self._known: Walk | None = None
        self._hooks: list[object] = []
        self._with_modes: list[nn.Module] = []

    def moved(self, module: nn.Module) -> bool:
        moved = super().moved(module)
        walk = self._walk
        assert walk is not None
        if walk is not self._known:
            self._known = walk
            self._hooks = [hooks for child in module.modules() for hooks in forward_hooks(child)]
            self._with_modes = [child for child in walk.submodules if type(child) not in _OF_NO_MODE]
        settings = list(self._read(module))
        moved |= not _same(settings, self._settings)
        self._settings = settings  # the objects themselves: another object could get the identity of one that is gone
        return moved

    def has_hooks(self) -> bool:
        return any(self._hooks)

    def trains(self, module: nn.Module) -> bool:
        """Return whether the module or a part of it, other than a convolution, is in training mode; call :meth:`moved` before."""
        return module.training or any(map(_training, self._with_modes))


def _same(left: list[object], right: list[object]) -> bool:
    """Return whether both lists hold the same objects, or equal numbers and strings."""
    plain = (bool, int, float, str)
    return same_objects(left, right, len(right)) or (
        len(left) == len(right)
        and all(a is b or (type(a) is type(b) and isinstance(a, plain) and a == b) for a, b in zip(left, right))
    )


class Baked(NamedTuple):
    """Note what the graphs of a step have baked in."""

    trained: tuple[Hashable, ...]  # what is trained, and where it lies
    others: tuple[Hashable, ...]  # where all else lies that graphs read and write
    settings: tuple[Hashable, ...]  # decisions of the host


class StepWatch:
    """Look at everything that graphs of a training step bake in."""

    def __init__(self, model: nn.Module, fused: FusedStep) -> None:
        self._model, self._fused = model, fused
        self._walk: Walk | None = None
        self._ema_walk: Walk | None = None

    def look(self, offer: Offer, amp: torch.dtype | None) -> Baked:
        """Return the state as it is now. Equal results mean that a captured step still does the same."""
        walk = self._walk = Walk.renewed(self._walk, self._model)
        ema, averages = self._fused.ema, []
        if ema is not None:
            self._ema_walk = Walk.renewed(self._ema_walk, ema.ema)
            averages = self._ema_walk.tensors
        slots = self._fused.optimizer.state.values()
        buffers = [value for slot in slots for value in slot.values() if isinstance(value, torch.Tensor)]
        return Baked(
            trained=(
                tuple([p.data_ptr() for p in walk.parameters]),
                tuple(map(id, walk.parameters)),  # gradients go to the parameters of the capture
                tuple([p.requires_grad for p in walk.parameters]),
            ),
            others=(
                tuple([b.data_ptr() for b in walk.buffers]),
                tuple([t.data_ptr() for t in averages]),
                tuple([b.data_ptr() for b in buffers]),
            ),
            settings=(
                tuple([m.training for m in walk.submodules]),
                self._fused.graph_key(),
                amp,
                offer,  # not its number, which another loss may have once this one is gone
                offer.graph_key(),
            ),
        )
