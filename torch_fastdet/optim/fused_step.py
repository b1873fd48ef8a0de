"""Runs the optimizer's part of a training step in two launches."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

from torch_fastdet._torch import private
from torch_fastdet._torch.tensors import DeviceNumbers, ModuleWatch, new_state, unwrap
from torch_fastdet.ema import DecayRamp, ModelEMA
from torch_fastdet.optim._watch import Binding, SgdBinding, one_device
from torch_fastdet.optim.adamw import AdamBinding
from torch_fastdet.optim.musgd import MuSGD, MusgdBinding


def binding_of(optimizer: object) -> type[Binding] | None:
    """Return how a fused step holds this optimizer; None for one that it cannot step."""
    for kind, binding in ((MuSGD, MusgdBinding), (torch.optim.SGD, SgdBinding), (torch.optim.Adam, AdamBinding)):
        if isinstance(optimizer, kind):
            return binding
    return None


class StepNumbers(DeviceNumbers):
    """Keep the numbers that captured steps read."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._captured: list[Tensor] = []

    def capture(self, values: list[float], tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Return the device tensor of each number, for a capture that begins now; a tensor that is given stays."""
        if values != self.values:
            raise RuntimeError("FusedStep: call refresh() before the capture and before each replay")
        if not any(memory is self.memory for memory in self._captured):
            self._captured.append(self.memory)
        mine: list[Tensor | None] = list(self.memory.unbind())
        return mine if not tensors else [mine[i] if t is None else t for i, t in enumerate(tensors)]


class FusedStep:
    """Unscale, clip, step, average and update the scaler in two launches, in a loop of your own.

        scaler.scale(loss).backward()
        step.step()                     # instead of unscale_, clip_grad_norm_, scaler.step, scaler.update and ema.update
        optimizer.zero_grad()

    Results equal those of the separate calls of this package, and all decisions are made on the device. On overflow, parameters and momentum stay,
    the average moves all the same, and the scale backs off. ``p.grad`` is left scaled and not clipped. Unlike GradScaler, it takes float16
    gradients. MuSGD orthogonalizes between the two launches, after a third.

    Args:
        optimizer: SGD, Adam, AdamW or MuSGD of torch_fastdet.optim, or torch.optim's SGD, Adam or AdamW, with all parameters on
            one device. ``amsgrad`` and complex parameters are errors.
        scaler: a torch.amp.GradScaler whose ``scale()`` made the loss; do not call its unscale_, step and update beside this.
        ema: a torch_fastdet.ema.ModelEMA of the model (see ``step``).
        max_norm: clip the gradients' L2 norm to it.

    Attributes:
        norm: device scalar, the gradients' norm after unscaling, before clipping; of the last step that took it.
        found_inf: device scalar, 1 where the last step's gradients were not finite (with a scaler or max_norm).
        counter: device scalar, the EMA's updates as captured steps count them; ``refresh()`` brings ``ema.updates`` there.

    In a CUDA graph: take one step before the capture, call ``refresh()`` before the capture and each replay, and ``after_replay()`` after it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        ema: ModelEMA | None = None,
        max_norm: float | None = None,
    ):
        kind = binding_of(optimizer)
        if kind is None:
            raise TypeError(
                f"FusedStep: optimizer is {type(optimizer).__name__}, but SGD, Adam, AdamW or MuSGD of torch_fastdet.optim or "
                "torch.optim is expected"
            )
        self._kind: type[Binding] = kind
        if ema is not None and not isinstance(ema, ModelEMA):
            raise TypeError(f"FusedStep: ema is {type(ema).__name__}, but torch_fastdet.ema.ModelEMA is expected")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"FusedStep: scaler is {type(scaler).__name__}, but torch.amp.GradScaler is expected")
        if max_norm is not None and not (isinstance(max_norm, numbers.Real) and max_norm >= 0):
            raise ValueError(f"FusedStep: max_norm is {max_norm!r}, but None or a number not below 0 is expected")
        self.optimizer = optimizer
        self.scaler = scaler
        self.ema = ema
        self.max_norm = None if max_norm is None else float(max_norm)
        self._binding: Binding | None = None
        self._watches: tuple[ModuleWatch, ModuleWatch] | None = None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = one_device("FusedStep", (p.device for p in params))
        wide = any(p.dtype == torch.float64 for p in params)
        with torch.inference_mode(False):  # written in every step, in training too
            self.norm = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=self.device)
            self.found_inf = torch.zeros((), dtype=torch.float32, device=self.device)
            self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        self._counted = -1
        self._numbers = StepNumbers(self.device)

    def __getstate__(self) -> dict[str, object]:
        # A copy finds its own tensors, belongs to no graph, and owns what a step writes.
        with torch.inference_mode(False):
            written = {name: getattr(self, name).clone() for name in ("norm", "found_inf", "counter")}
        return {**self.__dict__, **written, "_binding": None, "_watches": None, "_numbers": StepNumbers(self.device)}

    def _bind(self, model: nn.Module | None) -> Binding:
        follows = True
        if self.ema is not None:
            model = self.ema.model if model is None else unwrap(model)
            if model is None:
                raise RuntimeError("FusedStep: the EMA is a copy that has not seen its model yet; give it: step(model)")
            watches = self._watches
            follows = watches is not None and watches[0].unchanged(self.ema.ema) and watches[1].unchanged(model)
        binding = self._binding
        if binding is None or not follows or not binding.is_current():
            self._binding = None
            binding = self._kind(self.optimizer, lambda *args: self._make_state(model, *args))
            one_device("FusedStep", [self.device, binding.device])
            self._binding = binding
        return binding

    def _make_state(
        self, model: nn.Module | None, params: list[Tensor], groups: list[int], places: list[int]
    ) -> object:
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

    @private.disable_dynamo
    @torch.no_grad()
    def step(self, model: nn.Module | None = None) -> None:
        """Perform one step.

        Args:
            model: whose average ``ema`` is; needed only where the EMA is a copy (deepcopy, unpickled), which does not know its
                model before its first update.
        """

        def take(optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
            self._step(model)

        # Run the hooks of this optimizer and of all, as optimizer.step() does; what they change counts for this step.
        torch.optim.Optimizer.profile_hook_step(take)(self.optimizer)

    def _step(self, model: nn.Module | None) -> None:
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        scale = tracker = None
        growth: list[float] = []
        if self.scaler is not None and self.scaler.is_enabled():
            scale, tracker, growth = self._scaler_state(self.scaler)
        binding = self._bind(model)
        binding.make_buffers()
        values, tensors, flags = self._kind.numbers(self.optimizer, self.device)
        if capturing:
            tensors = self._numbers.capture(values, tensors)
        hyper = values, tensors, flags
        reduction = scale, tracker, growth, self.max_norm, self.norm, self.found_inf
        decay, tau, updates = self._decay(capturing)
        state, between = binding.tensors, self._kind is MusgdBinding
        if between:
            state.reduce_(hyper, reduction)
            reduced = scale is not None or self.max_norm is not None
            binding.before_update(hyper, (None, None), reduced)
        made = state.fused_(hyper, reduction, (decay, tau, updates, self.counter), between)
        if made:
            binding.give_buffers()
        if self.ema is not None and decay >= 0 and not capturing:
            self.ema.updates = self._counted = updates
        private.mark_stepped(self.optimizer)

    def _scaler_state(self, scaler: torch.amp.GradScaler) -> tuple[Tensor, Tensor, list[float]]:
        scale, tracker, growth = private.scaler_state(scaler)
        if scale is None or tracker is None:
            raise RuntimeError(
                "FusedStep: the scaler has not scaled anything yet; call scaler.scale(loss).backward() first"
            )
        if private.was_unscaled(scaler, self.optimizer):
            raise RuntimeError(
                "FusedStep: scaler.unscale_ or scaler.step was called for this optimizer since the last update; FusedStep does "
                "both itself"
            )
        return scale, tracker, growth

    def _decay(self, capturing: bool) -> tuple[float, float, int]:
        """Return the decay (-1: no moving average), length of the ramp and number of this update, for the kernel."""
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

    def refresh(self) -> None:
        """Copy the numbers in param_groups, and ``ema.updates``, to the device, where a captured step reads them, if they changed."""
        if self.ema is not None and self._counted != self.ema.updates:
            self.counter.fill_(self.ema.updates)
            self._counted = self.ema.updates
        self._numbers.upload(self._kind.numbers(self.optimizer, self.device)[0])

    def graph_key(self) -> tuple:
        """Return what changes when a step that is captured now would do something else than before: decisions of the host.

        Numbers that :meth:`refresh` brings to the device are not among them.
        """
        flags = self._kind.numbers(self.optimizer, self.device)[2]
        groups = [
            (
                tuple(map(id, group["params"])),
                flag,
                group.get("use_muon"),
                tuple([v.data_ptr() if isinstance(v, Tensor) else None for v in self._kind.tensors_of(group)]),
            )
            for group, flag in zip(self.optimizer.param_groups, flags)
        ]
        scaler, ema = self.scaler, self.ema
        scaling = averaging = None
        if scaler is not None and scaler.is_enabled():
            *tensors, growth = private.scaler_state(scaler)
            scaling = *growth, *(None if t is None else t.data_ptr() for t in tensors)
        if ema is not None and ema.enabled:
            ramp = ema.decay
            averaging = ramp, *((ramp.decay, ramp.tau) if isinstance(ramp, DecayRamp) else ())
        return tuple(groups), self.max_norm, scaling, averaging

    def after_replay(self, replays: int = 1) -> None:
        """Count what captured steps did: ``ema.updates`` follows, and schedulers know of the step.

        Args:
            replays: how many steps were replayed since the last call.
        """
        if self.ema is not None and self.ema.enabled:
            self.ema.updates += replays
            self._counted = self.ema.updates
        private.mark_stepped(self.optimizer)
