"""Updates the moving average of a model in one launch a step."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Container
from copy import deepcopy
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import nn

from torch_fastdet._say import count
from torch_fastdet._torch.tensors import ModuleWatch, by_device, named_tensors, new_state, unwrap, wrappers

__all__ = ["ModelEMA"]


def _check(name: str, value: float, most: float = math.inf) -> None:
    if not isinstance(value, numbers.Real) or not 0 <= value <= most:
        wanted = "a number not below 0" if most == math.inf else f"a number from 0 to {most}"
        raise ValueError(f"ModelEMA: {name} is {value!r}, but {wanted} is expected")


class DecayRamp:
    """Compute ``decay * (1 - exp(-updates / tau))``; a lambda could not be pickled."""

    def __init__(self, decay: float, tau: float):
        _check("decay", decay, 1)
        _check("tau", tau)
        self.decay = decay
        self.tau = tau

    def __call__(self, updates: float) -> float:
        return self.decay * (1 - math.exp(-updates / self.tau)) if self.tau else self.decay

    def __repr__(self) -> str:
        return f"DecayRamp(decay={self.decay}, tau={self.tau})"


class ModelEMA:
    """Keep ``ema``, a copy of a model with moving averages of its floating state_dict entries, as YOLOv5's ModelEMA does.

    Each :meth:`update` does ``v *= d; v += (1 - d) * x`` with ``d = decay(updates)`` over floating parameters and buffers; integer entries
    stay. Results are those of the original loop, bit by bit in float32. Replaced tensors (``ema.half().float()``, a resume, another model)
    are noticed. EMA and model may differ in strides and dtypes.

    Args:
        model: what to average; DataParallel, DistributedDataParallel and torch.compile are unwrapped.
        decay: the decay that the ramp goes to.
        tau: length of the ramp, in updates. 0: no ramp.
        updates: number of updates that were made before, on a resume.

    Attributes:
        ema: the average, in evaluation mode, without gradients.
        updates: number of updates.
        decay: callable, updates -> decay; may be replaced.
        enabled: set it to False to make update and update_attr do nothing, as Ultralytics does.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, tau: float = 2000, updates: int = 0):
        if not isinstance(model, nn.Module):
            raise TypeError(f"ModelEMA: model is {type(model).__name__}, but a torch.nn.Module is expected")
        ramp = DecayRamp(decay, tau)
        _check("updates", updates)
        self.ema = deepcopy(unwrap(model)).eval()
        self._model: weakref.ref[nn.Module] | None = weakref.ref(unwrap(model))
        self.updates = updates
        self.decay: Callable[[int], float] = ramp
        self.enabled = True
        for parameter in self.ema.parameters():
            parameter.requires_grad_(False)
        self._forget()

    def _forget(self) -> None:
        self._watches: tuple[ModuleWatch, ModuleWatch] | None = None
        self._states: list[Any] = []

    #: The framework's class, if this class replaces it: copies and files call it, with the arguments of this class.
    _filed_as: ClassVar[Callable[..., object] | None] = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        ramp, state = self.decay, self.__getstate__()
        if self._filed_as is None or not isinstance(ramp, DecayRamp):
            return super().__reduce_ex__(protocol)
        del state["decay"]
        return self._filed_as, (self.ema, ramp.decay, ramp.tau, self.updates), state

    def __getstate__(self) -> dict[str, object]:
        state = self.__dict__.copy()
        del state["_watches"], state["_states"], state["_model"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._model = None
        self._forget()

    @property
    def model(self) -> nn.Module | None:
        """Return the model that is averaged, unwrapped: the one given last. None in a copy that was never updated."""
        return None if self._model is None else self._model()

    def pairs(self, model: nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return name, average and value of each floating entry of the EMA's state_dict."""
        values = named_tensors(unwrap(model))
        result = []
        for name, average in named_tensors(self.ema).items():
            if not average.is_floating_point():
                continue
            if name not in values:
                raise KeyError(f"ModelEMA: the model has no {name}, which its EMA has; was the model changed since?")
            result.append((name, average, values[name]))
        return result

    def follows(self, model: nn.Module) -> bool:
        """Return whether the remembered tensors are still those of the EMA and of this model."""
        watches = self._watches
        return watches is not None and watches[0].unchanged(self.ema) and watches[1].unchanged(model)

    def decay_at(self, updates: int) -> float:
        """Return what ``decay`` gives for this number of updates, from 0 to 1."""
        decay = float(self.decay(updates))
        _check(f"decay({updates})", decay, 1)
        return decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average toward the model.

        Args:
            model: the model that is trained; DataParallel, DistributedDataParallel and torch.compile are unwrapped.

        Raises:
            KeyError: the EMA has an entry that the model does not have.
            RuntimeError: an entry has another shape or device in the model.
        """
        if not self.enabled:
            return
        model = unwrap(model)
        if not self.follows(model):
            self._find(model)
        updates = self.updates + 1
        decay = self.decay_at(updates)
        for state in self._states:
            state.ema_(decay)
        self.updates = updates
        count("multi_tensor_optimizer", "moving averages")

    def _find(self, model: nn.Module) -> None:
        pairs = self.pairs(model)
        for name, average, value in pairs:
            if average.device != value.device:
                raise RuntimeError(
                    f"ModelEMA: {name} is on {value.device} in the model, but on {average.device} in the EMA"
                )
            if average.shape != value.shape:
                raise RuntimeError(
                    f"ModelEMA: {name} has shape {list(value.shape)} in the model, but {list(average.shape)} in the EMA; was the "
                    "model changed since?"
                )
        # The state_dict names tied weights twice, so they move twice as in the original loop, in one launch after the other.
        rounds: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        seen: dict[int, int] = {}
        for _, average, value in pairs:
            turn = seen.get(id(average), 0)
            seen[id(average)] = turn + 1
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append((value, average))
        self._states = [
            new_state("ModelEMA", values=[both[i][0] for i in at], value_averages=[both[i][1] for i in at])
            for both in rounds
            for at in by_device(average for _, average in both).values()
        ]
        self._watches = ModuleWatch(self.ema), ModuleWatch(model)
        forget = weakref.WeakMethod(self._forget)
        # The states hold the model's tensors: drop them with the model.
        self._model = weakref.ref(model, lambda _: (known := forget()) and known())

    def update_attr(
        self, model: nn.Module, include: Container[str] = (), exclude: Container[str] = ("process_group", "reducer")
    ) -> None:
        """Copy the model's attributes to the EMA: those in ``include`` (all, if empty), but none in ``exclude`` or with a
        leading underscore.

        Attributes that YOLOv5 sets on a DistributedDataParallel or DataParallel, such as ``names`` and ``hyp``, go before those inside.
        """
        if not self.enabled:
            return
        *outside, inside = wrappers(model)
        attributes = dict(inside.__dict__)
        for wrapper in reversed(outside):
            wanted = include or inside.__dict__
            attributes.update((name, value) for name, value in wrapper.__dict__.items() if name in wanted)
        for name, value in attributes.items():
            if not name.startswith("_") and name not in exclude and (not include or name in include):
                setattr(self.ema, name, value)
