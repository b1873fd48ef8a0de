"""Watches what a step of torch_fastdet holds of an optimizer: its numbers, its parameters and its buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor

from torch_fastdet._torch.tensors import new_state, same_objects

NESTEROV, MAXIMIZE, HAS_MOMENTUM, DECOUPLED = 1, 2, 4, 8  # flags of a MultiTensorState
MOVED_SGD, ADAM, MUON = 2, 3, 4  # csrc/core/multi_tensor/multi_tensor.h has these rules
BUFFER = "momentum_buffer"

#: One of an optimizer's param_groups.
Group = dict[str, Any]
Numbers = tuple[list[float], list[Tensor | None], list[int]]
#: The scale and the found_inf that GradScaler has left on the optimizer.
Scaling = tuple[Tensor | None, Tensor | None]
#: Makes a MultiTensorState from parameters, their groups and their positions.
MakeState = Callable[[list[Tensor], list[int], list[int]], Any]


def on_device(tensor: Tensor | float | None, device: torch.device) -> Tensor | None:
    # GradScaler's found_inf is the number 0 where no parameter has a gradient.
    return tensor.to(device, non_blocking=True) if isinstance(tensor, Tensor) else None


def one_device(name: str, devices: Iterable[torch.device]) -> torch.device:
    """Return the device, if there is one; raise ValueError, which begins with ``name``, otherwise."""
    found = set(devices)
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found))) or "none"
        raise ValueError(f"{name}: the parameters are on {names}, but one device is expected")
    return found.pop()


class Binding:
    """Hold the MultiTensorState of an optimizer, whose buffers are those in ``optimizer.state``."""

    name: ClassVar[str]  # of the optimizer, in errors
    buffer_names: ClassVar[tuple[str, ...]]  # in optimizer.state[parameter]

    def __init__(self, optimizer: torch.optim.Optimizer, make_state: MakeState):
        groups = optimizer.param_groups
        self._optimizer = weakref.ref(optimizer)  # which holds this object: together they would outlive their last user
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.owner = [index for index, group in enumerate(groups) for _ in group["params"]]
        self.device = one_device(self.name, (p.device for p in self.params))
        self.ids = set(map(id, self.params))
        self.group_lengths = [len(group["params"]) for group in groups]
        self.tensors = make_state(self.params, self.owner, list(range(len(self.params))))
        self.take_buffers()

    @classmethod
    def numbers(cls, optimizer: torch.optim.Optimizer, device: torch.device) -> Numbers:
        """Return all groups' numbers, the device tensors that replace some of them ([] for none), and the groups' flags."""
        groups = [cls.numbers_of(optimizer, group) for group in optimizer.param_groups]
        given = [value for numbers, _ in groups for value in numbers]
        elsewhere = [isinstance(value, Tensor) and value.device.type != "cpu" for value in given]
        # 1 is a placeholder for a tensor, whatever its value.
        values = [1.0 if there else float(value) for value, there in zip(given, elsewhere)]
        tensors = [on_device(value, device) if there else None for value, there in zip(given, elsewhere)]
        return values, tensors if any(elsewhere) else [], [flags for _, flags in groups]

    @classmethod
    def numbers_of(cls, optimizer: object, group: Group) -> tuple[list[float | Tensor], int]:
        """Return the numbers of one group, and its flags."""
        raise NotImplementedError

    @staticmethod
    def tensors_of(group: Group) -> tuple[float | Tensor, ...]:
        """Return numbers of a group that may be tensors."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer is gone")
        return optimizer

    def take_buffers(self) -> None:
        """Hand the optimizer's buffers to C++."""
        self.state = self.optimizer.state
        self.owners = list(self.state)
        self.slots = list(self.state.values())
        self.buffers = {name: [slot.get(name) for slot in self.slots] for name in self.buffer_names}
        # Looking up optimizer.state[p] creates an empty entry, so the number of entries does not tell.
        self.complete = all(self.state.get(p) for p in self.params)
        with torch.inference_mode(False):  # later steps write into what is made here
            self._hand_over()

    def _hand_over(self) -> None:
        raise NotImplementedError

    def _found(self, name: str, params: list[Tensor]) -> list[Tensor | None]:
        return [self.state[p].get(name) if p in self.state else None for p in params]

    def make_buffers(self) -> None:
        """Make what the optimizer's state lacks; an error in a capture, where nothing that is made would last."""
        if self.complete and self.same_buffers():
            return
        state, groups = self.optimizer.state, self.optimizer.param_groups
        lacking = [(p, groups[i]) for p, i in zip(self.params, self.owner) if p.grad is not None and not state.get(p)]
        if lacking and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a parameter has no buffers yet, and buffers made inside of a CUDA graph capture would not outlive a "
                "replay; take one step before the capture"
            )
        with torch.inference_mode(False):  # later steps write into them
            for p, group in lacking:
                state[p].update(self._new_buffers(p, group))
        self.take_buffers()

    def _new_buffers(self, p: Tensor, group: dict[str, object]) -> dict[str, Tensor]:
        raise NotImplementedError

    def give_buffers(self) -> None:
        """Put buffers that C++ made into the optimizer's state."""

    def step(self) -> None:
        """Perform one optimizer step, applying `grad_scale` and `found_inf` if GradScaler has set them."""
        optimizer = self.optimizer
        grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        scaling = on_device(grad_scale, self.device), on_device(found_inf, self.device)
        self.make_buffers()
        numbers = self.numbers(optimizer, self.device)
        self.before_update(numbers, scaling, reduced=False)
        if self.tensors.step_(numbers, *scaling, False):
            self.give_buffers()

    def before_update(self, numbers: Numbers, scaling: Scaling, reduced: bool) -> None:
        """Run what comes between the reduction of a fused step and its update; ``reduced``: there was one."""

    def is_all_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether these are all parameters of the optimizer, in any order."""
        return len(parameters) == len(self.params) and self.ids == set(map(id, parameters)) and self.same_params()

    def same_params(self) -> bool:
        groups = self.optimizer.param_groups
        lengths = [len(group["params"]) for group in groups]
        return lengths == self.group_lengths and same_objects(
            self.params, chain.from_iterable(group["params"] for group in groups), sum(lengths)
        )

    def same_buffers(self) -> bool:
        state = self.state
        return (
            self.optimizer.state is state
            and same_objects(self.owners, state, len(state))
            and same_objects(self.slots, state.values(), len(state))
            and all(
                same_objects(buffers, map(dict.get, self.slots, repeat(name)), len(state))
                for name, buffers in self.buffers.items()
            )
        )

    def is_current(self) -> bool:
        """Return False if the optimizer has other parameters; take other buffers over at once."""
        if not self.same_params():
            return False
        if not self.same_buffers():
            self.take_buffers()
        return True


class BoundOptimizer(torch.optim.Optimizer):
    """Step by a Binding, which is made when a step wants it."""

    _step_supports_amp_scaling = True  # GradScaler then hands its scale and its finding to the step
    _binding_class: ClassVar[type[Binding]]
    _binding: Binding | None = None
    #: The class of the optimizer that was converted to this one. Copies and pickles are of that class.
    _filed_as: type | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        if self._filed_as is None:
            return super().__reduce_ex__(protocol)
        return object.__new__, (self._filed_as,), self.__getstate__()

    def _bind(self) -> Binding:
        binding, kind = self._binding, self._binding_class
        if binding is None or binding._optimizer() is not self or not binding.is_current():
            self._binding = binding = kind(self, lambda *args: new_state(kind.name, *args))
        return binding

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._bind().step()
        return loss


class SgdBinding(Binding):
    """Bind SGD, whose momentum buffers are made in C++."""

    name = "SGD"
    buffer_names = (BUFFER,)

    @staticmethod
    def tensors_of(group: Group) -> tuple[float | Tensor, ...]:
        return group["lr"], group["momentum"], group["dampening"], group["weight_decay"]

    @classmethod
    def numbers_of(cls, optimizer: object, group: Group) -> tuple[list[float | Tensor], int]:
        if group["differentiable"]:
            raise RuntimeError(
                "SGD: differentiable is True, but a fused step has no autograd; use torch.optim.SGD for that"
            )
        momentum = isinstance(group["momentum"], Tensor) or group["momentum"] != 0
        flags = NESTEROV * group["nesterov"] + MAXIMIZE * group["maximize"] + HAS_MOMENTUM * momentum
        return [*cls.tensors_of(group), 0.0], flags

    def make_buffers(self) -> None:
        """Do nothing: the step makes them in C++."""

    def _hand_over(self) -> None:
        self.tensors.set_momentum_buffers(self._found(BUFFER, self.params))

    def give_buffers(self) -> None:
        for p, buffer in zip(self.params, self.tensors.momentum_buffers()):
            if buffer is not None:
                self.state[p][BUFFER] = buffer
        self.take_buffers()
