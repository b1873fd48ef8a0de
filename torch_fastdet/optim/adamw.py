"""AdamW as torch's fused kernel, driven by GradScaler without a host sync."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamW"]


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with ``fused=True``, also after a state_dict of the default implementation was loaded.

    PyTorch's fused kernel already is one multi-tensor pass in which GradScaler's scale and overflow flag are read on the device, so
    that no step waits for the GPU. This class chooses it, and keeps to it in a resume: its step counters then live beside the
    parameters. Arguments and state_dict (both ways) are those of torch.optim.AdamW; results differ from its default implementation in
    last bits. With ``capturable=True`` and lr as a tensor, a captured step follows what is written into lr.

    Raises:
        RuntimeError: ``foreach=True`` or ``differentiable=True``, which the fused kernel does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=True,
        )
        self._stay_fused()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stay_fused()

    def _stay_fused(self) -> None:
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
            for p in group["params"]:
                slot = self.state.get(p)
                if slot:
                    slot["step"] = slot["step"].to(device=p.device, dtype=torch.float32)
