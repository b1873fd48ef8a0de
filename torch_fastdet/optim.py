"""SGD in one launch, gradient clipping without a host sync, and the whole optimizer step in two launches."""

from __future__ import annotations

import copy
import inspect
import numbers
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from torch_fastdet import ops
from torch_fastdet._multi_tensor import ModuleWatch, by_device, new_state, same_objects, unwrap
from torch_fastdet.ema import DecayRamp, ModelEMA

__all__ = ["SGD", "FusedStep", "clip_grad_norm_", "unscale_"]

HYPER_PARAMETERS = ("lr", "momentum", "dampening", "weight_decay")
NESTEROV, MAXIMIZE, HAS_MOMENTUM = 1, 2, 4
BUFFER = "momentum_buffer"


def _hyper_parameters(
    groups: list[dict[str, Any]], device: torch.device
) -> tuple[list[float], list[Tensor | None], list[int]]:
    """Four numbers a group, the device tensors that replace some of them ([] for none), and flags."""
    values: list[float] = []
    tensors: list[Tensor | None] = []
    flags = []
    for group in groups:
        for name in HYPER_PARAMETERS:
            value = group[name]
            if isinstance(value, Tensor) and value.device.type != "cpu":
                tensors += [None] * (len(values) - len(tensors))
                tensors.append(value.to(device, non_blocking=True))
                values.append(1.0)  # known to be there, whatever it holds
            else:
                values.append(float(value))
        momentum = isinstance(group["momentum"], Tensor) or group["momentum"] != 0
        flags.append(NESTEROV * group["nesterov"] + MAXIMIZE * group["maximize"] + HAS_MOMENTUM * momentum)
        if group["differentiable"]:
            raise RuntimeError(
                "SGD: differentiable is True, but a fused step has no autograd; use torch.optim.SGD for that"
            )
    if tensors:
        tensors += [None] * (len(values) - len(tensors))
    return values, tensors, flags


class _Bound:
    """MultiTensorStates of an SGD optimizer, one a device, whose momentum buffers are those in ``optimizer.state``."""

    def __init__(self, optimizer: torch.optim.SGD, make_state: Callable[[list[Tensor], list[int], list[int]], Any]):
        if optimizer not in _bounds:
            _bounds[optimizer] = weakref.WeakSet()
            optimizer.register_state_dict_post_hook(_leave_out_unfilled)
        for param in _unfilled(optimizer):  # known to the object before this one alone; made anew
            optimizer.state[param].pop(BUFFER, None)
        groups = optimizer.param_groups
        self._optimizer = weakref.ref(optimizer)  # which holds this object: together they would outlive their last user
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        owner = [index for index, group in enumerate(groups) for _ in group["params"]]
        self.ids = set(map(id, self.params))
        self.watch: ModuleWatch | None = None
        self.group_lengths = [len(group["params"]) for group in groups]
        self.places = by_device(self.params)
        self.states = {
            device: make_state([self.params[i] for i in at], [owner[i] for i in at], at)
            for device, at in self.places.items()
        }
        self.take_buffers()
        _bounds[optimizer].add(self)  # last: one whose state was refused is not asked for it

    @property
    def optimizer(self) -> torch.optim.SGD:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer is gone")
        return optimizer

    def take_buffers(self) -> None:
        """Hand the optimizer's momentum buffers to C++."""
        self.state = self.optimizer.state
        self.owners = list(self.state)
        self.slots = list(self.state.values())
        self.buffers = [slot.get(BUFFER) for slot in self.slots]
        for device, at in self.places.items():
            found = [self.state[p].get(BUFFER) if p in self.state else None for p in (self.params[i] for i in at)]
            self.states[device].set_momentum_buffers(found)

    def give_buffers(self) -> None:
        """Put the momentum buffers that C++ made into the optimizer's state."""
        for device, at in self.places.items():
            for i, buffer in zip(at, self.states[device].momentum_buffers()):
                if buffer is not None:
                    self.state[self.params[i]][BUFFER] = buffer
        self.take_buffers()

    def unfilled(self) -> list[Tensor]:
        """Parameters whose buffer was made by a first step that was skipped. It differs from zeros where there is dampening."""
        if not self.same_buffers():
            self.take_buffers()
        found = []
        for device, at in self.places.items():
            fresh = self.states[device].fresh()
            if fresh is not None:
                found += [self.params[i] for i, unfilled in zip(at, fresh.tolist()) if unfilled]
        return found

    def can_unscale(self) -> bool:
        """Whether there is a gradient, and none that GradScaler refuses to unscale or that is sparse."""
        found = 0
        for state in self.states.values():
            found |= state.gradients()
        return found == 1

    def is_all_of(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """None where these are all parameters of the optimizer, in any order; else the list of them.

        ``model.parameters()`` walks over the model, which takes longer than all else in a clip. So a module whose parameters
        were looked at once is remembered, and looked at again only after it changed.
        """
        module = _module_of(parameters)
        watch = self.watch
        if module is not None and watch is not None and watch.unchanged(module) and self.same_params():
            return None
        parameters = list(parameters)
        if len(parameters) == len(self.params) and self.ids == set(map(id, parameters)) and self.same_params():
            self.watch = ModuleWatch(module) if module is not None else None
            return None
        return parameters

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
            and same_objects(self.buffers, map(dict.get, self.slots, repeat(BUFFER)), len(state))
        )

    def fresh(self) -> bool:
        """False where the optimizer has other parameters; other buffers are taken over at once."""
        if not self.same_params():
            return False
        if not self.same_buffers():
            self.take_buffers()
        return True


_bounds: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[_Bound]] = weakref.WeakKeyDictionary()


def _unfilled(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for bound in _bounds.get(optimizer, ()) for param in bound.unfilled()]


def _without_buffers(state: dict[Any, dict[str, Any]], keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """A copy of an optimizer's state without the momentum buffers of these entries."""
    state = copy.copy(state)
    for key in keys:
        state[key] = {name: value for name, value in state[key].items() if name != BUFFER}
        if not state[key]:
            del state[key]
    return state


def _leave_out_unfilled(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A state_dict hook: after a skipped first step there are no momentum buffers, as stock has none."""
    unfilled = set(map(id, _unfilled(optimizer)))
    if unfilled:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        places = [place for place, param in enumerate(params) if id(param) in unfilled]
        state_dict["state"] = _without_buffers(state_dict["state"], places)


class SGD(torch.optim.SGD):
    """``torch.optim.SGD`` whose step is one launch over all groups, and which GradScaler drives without a host sync.

    Arguments, results, state_dict (both ways), closures, hooks, schedulers and ``add_param_group`` are those of
    torch.optim.SGD. In float32 and float64 the results are its bits; float16 and bfloat16 parameters are updated in float32 and
    rounded once.

    - lr, momentum, dampening and weight_decay may be one-element tensors on the parameters' device: they are read there, when
      the kernel runs, so a captured step follows what is written into them.
    - With GradScaler, overflow is decided on the device. A skipped step writes nothing. Momentum buffers that a skipped first
      step made hold zeros (with dampening they are left out of the state_dict, as after a stock skip).
    - ``p.grad`` stays as it is, but for GradScaler's unscaling.
    - Parameters may be on several devices, of several dtypes, and lie differently in memory than their gradients.
    - In a CUDA graph capture, take one step before it: buffers made inside of it would not outlive a replay.

    ``foreach`` and ``fused`` are accepted and change nothing; ``differentiable=True`` is an error at the step.

    Raises:
        RuntimeError: sparse, integer or complex gradients, a negative lr in a group; named, before anything is written.
    """

    _step_supports_amp_scaling = True
    _bound: _Bound | None = None

    def _bind(self) -> _Bound:
        bound = self._bound
        if bound is None or bound.optimizer is not self or not bound.fresh():
            self._bound = bound = _Bound(self, lambda *args: new_state("SGD", *args))
        return bound

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        bound = self._bind()
        made = 0
        if len(bound.states) > 1:  # nothing is written where one of the devices would raise
            for device, state in bound.states.items():
                state.check_sgd(*_hyper_parameters(self.param_groups, device), grad_scale is not None)
        try:
            for device, state in bound.states.items():
                made += state.sgd_(
                    *_hyper_parameters(self.param_groups, device), _on(grad_scale, device), _on(found_inf, device)
                )
        finally:  # a later device may fail
            if made:
                bound.give_buffers()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "state": _without_buffers(state["state"], _unfilled(self))}


def _module_of(parameters: Iterable[Tensor]) -> nn.Module | None:
    """The module that made this ``module.parameters()``, if that is what it is and nobody has begun to read it."""
    if (
        isinstance(parameters, GeneratorType)
        and parameters.gi_code is nn.Module.parameters.__code__
        and inspect.getgeneratorstate(parameters) == inspect.GEN_CREATED
        and parameters.gi_frame is not None
    ):
        arguments = parameters.gi_frame.f_locals
        if arguments.get("recurse") is True:
            return arguments.get("self")
    return None


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` in two launches and without a host sync: returns the norm as a device scalar.

    Summed in a fixed order, so equal gradients give equal bits in every run. Clips p.grad in place, as stock does.

    Args:
        parameters: tensors whose ``.grad`` is clipped; those without are left out.
        max_norm: the norm to clip to.
        norm_type: other norms than 2 are left to torch's function.
        error_if_nonfinite: the check that waits for the GPU is left to torch's function too; so are gradients on several
            devices, complex ones, and those of tensor subclasses (DTensor). Sparse ones are an error.
        foreach: accepted; changes nothing.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if float(norm_type) != 2.0 or error_if_nonfinite:
        return _stock_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    optimizer = None if _last_unscaled is None else _last_unscaled()
    bound = None if optimizer is None else optimizer._bound
    if bound is not None and len(bound.states) == 1:
        rest = bound.is_all_of(parameters)
        if rest is None:
            # The work list of its unscale_ and step serves here too.
            (state,) = bound.states.values()
            return state.clip_grad_norm_(float(max_norm))
        parameters = rest
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    kinds = {(g.device, g.dtype, type(g)) for g in grads}
    ours = all(dtype.is_floating_point and kind in (Tensor, nn.Parameter) for _, dtype, kind in kinds)
    if len({device for device, _, _ in kinds}) != 1 or not ours:
        return _stock_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return ops.multi_tensor_clip_grad_norm_(grads, float(max_norm))


_stock_clip_grad_norm_ = nn.utils.clip_grad_norm_
_stock_unscale_ = torch.amp.GradScaler.unscale_
_last_unscaled: weakref.ref[SGD] | None = None


def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """``scaler.unscale_(optimizer)`` in one launch for a :class:`SGD` of this package; torch's own for any other.

    Gradients are multiplied by the inverse scale in place and looked through for infinities; no host sync.
    """
    global _last_unscaled
    if scaler.is_enabled() and isinstance(optimizer, SGD) and scaler._scale is not None:
        state = scaler._per_optimizer_states[id(optimizer)]
        bound = optimizer._bind()
        # What is an error there is the same error here: torch's.
        if state["stage"] is OptState.READY and bound.can_unscale():
            with torch.no_grad():
                state["found_inf_per_device"] = {
                    device: states.unscale_(_on(scaler._scale, device)) for device, states in bound.states.items()
                }
            state["stage"] = OptState.UNSCALED
            _last_unscaled = weakref.ref(optimizer)
            return
    _stock_unscale_(scaler, optimizer)


class FusedStep:
    """Unscale, clip, SGD, moving average and the scaler's update in two launches, for people who own their loop.

        scaler.scale(loss).backward()
        step.step()                     # instead of unscale_, clip_grad_norm_, scaler.step, scaler.update and ema.update
        optimizer.zero_grad()

    The first launch looks for infinities and takes the norm; the second updates parameters, momentum and average. All
    decisions are made on the device. Results equal those of the separate calls of this package. On overflow, parameters and
    momentum stay as they are, the average moves all the same, and the scale backs off. ``p.grad`` is left as backward wrote it:
    still scaled and not clipped. Without ``scaler`` and ``max_norm`` it is one launch. Unlike GradScaler, it takes float16
    gradients.

    Args:
        optimizer: a torch_fastdet.optim.SGD or torch.optim.SGD with all parameters on one device.
        scaler: a torch.amp.GradScaler whose ``scale()`` made the loss; do not call its unscale_, step and update beside this.
        ema: a torch_fastdet.ema.ModelEMA of the model (see ``step``).
        max_norm: clip the gradients' L2 norm to it.

    Attributes:
        norm: device scalar, the gradients' norm after unscaling, before clipping; of the last step that took it.
        found_inf: device scalar, 1 where the last step's gradients were not finite (with a scaler or max_norm).

    In a CUDA graph: take one step before the capture. Hyper-parameters that are numbers are then read from the device; call
    ``refresh()`` before the capture and before each replay, and ``after_replay()`` after it.
    """

    def __init__(
        self,
        optimizer: torch.optim.SGD,
        scaler: torch.amp.GradScaler | None = None,
        ema: ModelEMA | None = None,
        max_norm: float | None = None,
    ):
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(
                f"FusedStep: optimizer is {type(optimizer).__name__}, but torch_fastdet.optim.SGD or torch.optim.SGD is wanted"
            )
        if ema is not None and not isinstance(ema, ModelEMA):
            raise TypeError(f"FusedStep: ema is {type(ema).__name__}, but torch_fastdet.ema.ModelEMA is wanted")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"FusedStep: scaler is {type(scaler).__name__}, but torch.amp.GradScaler is wanted")
        if max_norm is not None and not (isinstance(max_norm, numbers.Real) and max_norm >= 0):
            raise ValueError(f"FusedStep: max_norm is {max_norm!r}, but None or a number not below 0 is wanted")
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.max_norm = None if max_norm is None else float(max_norm)
        self._bound: _Bound | None = None
        self._watches: tuple[ModuleWatch, ModuleWatch] | None = None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self._one_device(p.device for p in params)
        wide = any(p.dtype == torch.float64 for p in params)
        self.norm = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=self.device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
        self._counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self._counted = -1
        self._scalars = torch.zeros(0, dtype=torch.float64, device=self.device)
        self._captured_scalars: list[Tensor] = []  # graphs go on reading them
        self._uploaded: list[float] = []

    @staticmethod
    def _one_device(devices: Iterable[torch.device]) -> torch.device:
        found = set(devices)
        if len(found) != 1:
            names = ", ".join(sorted(map(str, found))) or "none"
            raise ValueError(f"FusedStep: the parameters are on {names}, but one device is wanted")
        return found.pop()

    @staticmethod
    def _model(ema: ModelEMA, model: nn.Module | None) -> nn.Module:
        model = unwrap(model) if model is not None else ema.model
        if model is None:
            raise RuntimeError("FusedStep: the EMA is a copy that has not seen its model yet; give it: step(model)")
        return model

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds its own tensors, and is in no graph.
        return {**self.__dict__, "_bound": None, "_watches": None, "_captured_scalars": []}

    def _bind(self, model: nn.Module | None) -> _Bound:
        follows = True
        if self.ema is not None:
            model = self._model(self.ema, model)
            watches = self._watches
            follows = watches is not None and watches[0].unchanged(self.ema.ema) and watches[1].unchanged(model)
        bound = self._bound
        if bound is None or not follows or not bound.fresh():
            self._bound = None
            bound = _Bound(self.optimizer, lambda *args: self._make_state(model, *args))
            self._one_device([self.device, *bound.places])  # parameters that were added since, too
            self._bound = bound
        return bound

    def _make_state(self, model: nn.Module | None, params: list[Tensor], groups: list[int], places: list[int]) -> Any:
        averages: list[Tensor | None] = []
        values: list[Tensor] = []
        value_averages: list[Tensor] = []
        if self.ema is not None and model is not None:
            pairs = self.ema.pairs(model)
            own = {id(p): i for i, p in enumerate(params)}
            averages = [None] * len(params)
            seen: set[int] = set()
            for name, average, value in pairs:
                if id(average) in seen:
                    raise RuntimeError(
                        f"FusedStep: {name} shares its memory with another entry of the EMA (tied weights), which moves twice "
                        "a step in the stock loop; call ema.update(model) instead of giving ema to FusedStep"
                    )
                seen.add(id(average))
                if id(value) in own:
                    averages[own[id(value)]] = average
                else:
                    values.append(value)
                    value_averages.append(average)
            self._watches = ModuleWatch(self.ema.ema), ModuleWatch(model)
        return new_state("FusedStep", params, groups, places, averages, values, value_averages)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, model: nn.Module | None = None) -> None:
        """One step.

        Args:
            model: whose average ``ema`` is; needed only where the EMA is a copy (deepcopy, unpickled), which does not know its
                model before its first update.
        """

        def take(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
            self._step(model)

        # Hooks, of this optimizer and of all, as optimizer.step() has them; what they change counts for this step.
        torch.optim.Optimizer.profile_hook_step(take)(self.optimizer)

    def _step(self, model: nn.Module | None) -> None:
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        scale = tracker = None
        growth: list[float] = []
        if self.scaler is not None and self.scaler.is_enabled():
            scale, tracker, growth = self._scaler_state(self.scaler)
        bound = self._bind(model)
        values, tensors, flags = _hyper_parameters(self.optimizer.param_groups, self.device)
        if capturing:
            values, tensors = self._scalars_in_memory(values, tensors)
        decay, tau, updates = self._decay(capturing)
        made = bound.states[self.device].fused_(
            values,
            tensors,
            flags,
            scale,
            tracker,
            growth,
            self.max_norm,
            self.norm,
            self.found_inf,
            decay,
            tau,
            updates,
            self._counter,
        )
        if made:
            bound.give_buffers()
        if self.ema is not None and decay >= 0 and not capturing:
            self.ema.updates = self._counted = updates
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it

    def _scaler_state(self, scaler: torch.amp.GradScaler) -> tuple[Tensor, Tensor, list[float]]:
        if scaler._scale is None or scaler._growth_tracker is None:
            raise RuntimeError(
                "FusedStep: the scaler has not scaled anything yet; call scaler.scale(loss).backward() first"
            )
        # Not indexed: that would leave an entry behind, and a scaler that has one cannot be copied or pickled.
        state = scaler._per_optimizer_states.get(id(self.optimizer))
        if state is not None and state["stage"] is not OptState.READY:
            raise RuntimeError(
                "FusedStep: scaler.unscale_ or scaler.step was called for this optimizer since the last update; FusedStep does "
                "both itself"
            )
        return (
            scaler._scale,
            scaler._growth_tracker,
            [scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval],
        )

    def _decay(self, capturing: bool) -> tuple[float, float, int]:
        """Decay (-1: no moving average), length of the ramp and number of this update, for the kernel."""
        ema = self.ema
        if ema is None or not ema.enabled:
            return -1.0, 0.0, 0
        ramp = ema.decay if isinstance(ema.decay, DecayRamp) else None
        if capturing:
            if ramp is None:
                raise RuntimeError(
                    "FusedStep: ema.decay was replaced; a captured step needs a torch_fastdet.ema.DecayRamp"
                )
            if self._counted != ema.updates:
                raise RuntimeError("FusedStep: ema.updates was set from outside; take one step before the capture")
            return ramp.decay, ramp.tau, -1
        updates = ema.updates + 1
        return (ema.decay_at(updates), 0.0, updates) if ramp is None else (ramp.decay, ramp.tau, updates)

    def _scalars_in_memory(
        self, values: list[float], tensors: list[Tensor | None]
    ) -> tuple[list[float], list[Tensor | None]]:
        if values != self._uploaded:
            raise RuntimeError("FusedStep: call refresh() before the capture and before each replay")
        if not any(scalars is self._scalars for scalars in self._captured_scalars):
            self._captured_scalars.append(self._scalars)
        mine: list[Tensor | None] = list(self._scalars.unbind())
        return values, mine if not tensors else [mine[i] if t is None else t for i, t in enumerate(tensors)]

    def refresh(self) -> None:
        """Bring the numbers in param_groups, and ``ema.updates``, to the device, where a captured step reads them.

        Copies only what changed since.
        """
        if self.ema is not None and self._counted != self.ema.updates:
            self._counter.fill_(self.ema.updates)
            self._counted = self.ema.updates
        values, _, _ = _hyper_parameters(self.optimizer.param_groups, self.device)
        if values == self._uploaded:
            return
        host = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        if len(values) == self._scalars.numel():
            self._scalars.copy_(host, non_blocking=True)
        else:
            self._scalars = host.to(self.device, non_blocking=True)
        self._uploaded = values

    def graph_key(self) -> tuple:
        """Changes when a step that is captured now would do something else than before: decisions that the host takes.

        Numbers that :meth:`refresh` brings to the device are not among them.
        """
        groups = [
            (
                tuple(map(id, group["params"])),
                bool(group["nesterov"]),
                bool(group["maximize"]),
                isinstance(group["momentum"], Tensor) or group["momentum"] != 0,
                tuple(
                    [
                        value.data_ptr() if isinstance(value, Tensor) else None
                        for value in map(group.get, HYPER_PARAMETERS)
                    ]
                ),
            )
            for group in self.optimizer.param_groups
        ]
        scaler, ema = self.scaler, self.ema
        scaling = averaging = None
        if scaler is not None and scaler.is_enabled():
            scaling = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
        if ema is not None and ema.enabled:
            ramp = ema.decay
            averaging = ramp, *((ramp.decay, ramp.tau) if isinstance(ramp, DecayRamp) else ())
        return tuple(groups), self.max_norm, scaling, averaging

    def after_replay(self, replays: int = 1) -> None:
        """Count what captured steps did: ``ema.updates`` follows, and schedulers know of the step.

        Raises:
            RuntimeError: param_groups has other groups than at the capture, so that the replay did not step them.
        """
        groups = len(self.optimizer.param_groups)
        captured = [scalars.numel() // len(HYPER_PARAMETERS) for scalars in self._captured_scalars]
        if captured and groups not in captured:
            raise RuntimeError(
                f"FusedStep: param_groups has {groups} groups, but had {captured[-1]} when the step was captured; capture it again"
            )
        if self.ema is not None and self.ema.enabled:
            self.ema.updates += replays
            self._counted = self.ema.updates
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
