"""``torch.optim.Adam`` and ``torch.optim.AdamW`` in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch import private
from torch_fastdet.optim._watch import ADAM, DECOUPLED, HAS_MOMENTUM, MAXIMIZE, Binding, BoundOptimizer, Group

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"


class AdamBinding(Binding):
    """Moments and counts of steps, which are made as torch makes them."""

    name = "Adam"
    buffer_names = (FIRST, SECOND, STEP)

    @staticmethod
    def tensors_of(group: Group) -> tuple[Any, ...]:
        return group["lr"], *group["betas"], group["weight_decay"], group["eps"]

    @classmethod
    def numbers_of(cls, optimizer: object, group: Group) -> tuple[list[float | Tensor], int]:
        if group["amsgrad"]:
            raise RuntimeError(
                f"{type(optimizer).__name__}: amsgrad is True, but FusedStep steps without it; call optimizer.step() instead"
            )
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        flags = HAS_MOMENTUM + MAXIMIZE * bool(group["maximize"]) + DECOUPLED * bool(decoupled)
        return list(cls.tensors_of(group)), flags

    def _new_buffers(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {
            STEP: torch.zeros((), dtype=torch.float32, device=p.device),
            FIRST: torch.zeros_like(p, memory_format=torch.preserve_format),
            SECOND: torch.zeros_like(p, memory_format=torch.preserve_format),
        }

    def _hand_over(self) -> None:
        for p in self.params:
            slot = self.state.get(p)
            if slot:
                steps_beside(p, slot)
        self.buffers[STEP] = [slot.get(STEP) for slot in self.slots]
        for device, at in self.places.items():
            first, second, steps = (self._found(name, at) for name in self.buffer_names)
            self.states[device].set_buffers(ADAM, first, second, steps)


def steps_beside(p: Tensor, slot: dict[str, Any]) -> None:
    """Keep the count of steps as the kernel reads it: float32, on the parameter's device."""
    step = slot.get(STEP)
    if step is None:
        return
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device != p.device:
        slot[STEP] = torch.as_tensor(step, dtype=torch.float32).to(p.device)


def why_torchs(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step is left to torch: what the kernel does not have, in words; None where it has all."""
    for group in optimizer.param_groups:
        if group["amsgrad"]:
            return "amsgrad is True"
        for p in group["params"]:
            plain = type(p) in (Tensor, nn.Parameter) and p.is_floating_point() and p.device.type in ("cpu", "cuda")
            if not plain:
                return f"a parameter is a {type(p).__name__} of {p.dtype} on {p.device}"
    return None


def steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of this optimizer of ours is our own kernel's."""
    return not isinstance(optimizer, torch.optim.Adam) or why_torchs(optimizer) is None


def _lie_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give gradients and buffers the strides of their parameters: torch's fused step takes for granted that they have them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if type(p) not in (Tensor, nn.Parameter) or p.grad is None or p.grad.layout != torch.strided:
                continue
            if p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p, requires_grad=False).copy_(p.grad)
            slot = optimizer.state.get(p, {})
            for name, value in slot.items():
                if isinstance(value, Tensor) and value.shape == p.shape and value.stride() != p.stride():
                    slot[name] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)


class _Adam(BoundOptimizer, torch.optim.Adam):
    """What Adam and AdamW share."""

    _binding_class = AdamBinding

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"fused": True})
        self._stay_fused()

    def _step(self) -> None:
        if steps_itself(self):
            super()._step()
        else:
            _lie_as_parameters(self)
            private.unhooked_step(torch.optim.Adam)(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._binding = None
        self._stay_fused()

    def _stay_fused(self) -> None:
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
            for p in group["params"]:
                slot = self.state.get(p)
                if slot:
                    steps_beside(p, slot)


class Adam(_Adam):
    """``torch.optim.Adam`` whose step is one launch over all groups, and which GradScaler drives without a host sync.

    Arguments, state_dict (both ways), closures, hooks, schedulers and ``add_param_group`` are those of torch.optim.Adam; results differ from
    its implementations in last bits. Counts of steps live beside the parameters, and a skipped step writes nothing.

    - lr and betas may be one-element tensors on the parameters' device: a captured step follows what is written into them.
    - float16 and bfloat16 parameters are updated in float32, and their moments are of their own type, as torch's are.
    - With ``amsgrad=True``, or parameters that are tensor subclasses or on another device than the CPU or a GPU, torch's fused step runs.
    - Take one step before a CUDA graph capture. ``fused`` is accepted and changes nothing.

    Raises:
        RuntimeError: ``foreach=True`` or ``differentiable=True``; sparse gradients; a negative number in a group.
    """


class AdamW(_Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` whose step is one launch: see :class:`Adam`."""
