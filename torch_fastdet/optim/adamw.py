"""Implements ``torch.optim.Adam`` and ``torch.optim.AdamW`` in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_fastdet.optim._watch import ADAM, DECOUPLED, HAS_MOMENTUM, MAXIMIZE, Binding, BoundOptimizer, Group

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"


class AdamBinding(Binding):
    """Bind moments and counts of steps, which are made as torch makes them."""

    name = "Adam"
    buffer_names = (FIRST, SECOND, STEP)

    @staticmethod
    def tensors_of(group: Group) -> tuple[float | Tensor, ...]:
        return group["lr"], *group["betas"], group["weight_decay"], group["eps"]

    @classmethod
    def numbers_of(cls, optimizer: object, group: Group) -> tuple[list[float | Tensor], int]:
        if group["amsgrad"]:
            raise RuntimeError(
                f"{type(optimizer).__name__}: amsgrad is True, but a fused step has none; use torch.optim for that"
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
        for p in self.params:  # the kernel reads counts of steps in float32, on the parameter's device
            slot = self.state.get(p) or {}
            step = slot.get(STEP)
            if step is not None and not (
                isinstance(step, Tensor) and step.dtype == torch.float32 and step.device == p.device
            ):
                slot[STEP] = torch.as_tensor(step, dtype=torch.float32).to(p.device)
        self.buffers[STEP] = [slot.get(STEP) for slot in self.slots]
        first, second, steps = (self._found(name, self.params) for name in self.buffer_names)
        self.tensors.set_buffers(ADAM, first, second, steps)


class _Adam(BoundOptimizer, torch.optim.Adam):
    """Hold what Adam and AdamW share."""

    _binding_class = AdamBinding

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"fused": True})
        self._stay_fused()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._stay_fused()

    def _stay_fused(self) -> None:
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None


class Adam(_Adam):
    """Implement ``torch.optim.Adam`` with a step of one launch over all groups, which GradScaler drives without a host sync.

    Arguments, state_dict (both ways), closures, hooks, schedulers and ``add_param_group`` are those of torch.optim.Adam; results differ from
    its implementations in the last bits. A skipped step writes nothing.

    - lr and betas may be one-element tensors on the parameters' device: a captured step follows what is written into them.
    - float16 and bfloat16 parameters are updated in float32, and their moments are of their own type, as torch's are.
    - Take one step before a CUDA graph capture. ``fused`` is accepted and changes nothing.

    Raises:
        RuntimeError: ``amsgrad=True``, ``foreach=True`` or ``differentiable=True``; sparse gradients; a negative number in a group.
    """


class AdamW(_Adam, torch.optim.AdamW):
    """Implement ``torch.optim.AdamW`` with a step of one launch: see :class:`Adam`."""
