"""Unscales and clips gradients between backward and the step, without a host sync."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch import private
from torch_fastdet.optim._watch import on_device
from torch_fastdet.optim.adamw import Adam, AdamW
from torch_fastdet.optim.musgd import MuSGD
from torch_fastdet.optim.sgd import SGD

_stock_clip_grad_norm_ = nn.utils.clip_grad_norm_
_stock_unscale_ = torch.amp.GradScaler.unscale_
OURS = (SGD, Adam, AdamW, MuSGD)
_last_unscaled: weakref.ref[SGD | Adam | AdamW | MuSGD] | None = None


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_``, in two launches without a host sync. Return the norm as a device scalar.

    The norm is summed in a fixed order, so equal gradients give equal bits, and rounded once to torch's dtype.

    Args:
        parameters: tensors whose ``.grad`` is clipped in place; those without are left out.
        max_norm: the norm to clip to.
        norm_type: norms other than 2 are handled by ``torch.nn.utils.clip_grad_norm_``.
        error_if_nonfinite: True is handled by that function, too; so are gradients on several devices, complex ones, and those
            of tensor subclasses (DTensor). Sparse ones raise an error.
        foreach: accepted; changes nothing.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if float(norm_type) != 2.0 or error_if_nonfinite:
        return _stock_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    parameters = list(parameters)
    optimizer = None if _last_unscaled is None else _last_unscaled()
    binding = None if optimizer is None else optimizer._binding
    if binding is not None and binding.is_all_of(parameters):
        return binding.tensors.clip_grad_norm_(
            float(max_norm)
        )  # the work list of its unscale_ and step serves here too
    grads = [p.grad for p in parameters if p.grad is not None]
    kinds = {(g.device, g.dtype, type(g)) for g in grads}
    ours = all(dtype.is_floating_point and kind in (Tensor, nn.Parameter) for _, dtype, kind in kinds)
    if len({device for device, _, _ in kinds}) != 1 or not ours:
        return _stock_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return ops.multi_tensor_clip_grad_norm_(grads, float(max_norm))


def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Run ``scaler.unscale_(optimizer)`` in one launch for an optimizer of this package, and as PyTorch does for any other.

    Gradients are multiplied by the inverse scale in place and searched for infinities, without a host sync.

    Args:
        scaler: The GradScaler that scaled the loss.
        optimizer: The optimizer whose gradients are unscaled.
    """
    global _last_unscaled
    if scaler.is_enabled() and isinstance(optimizer, OURS):
        binding = optimizer._bind()

        @torch.no_grad()
        def unscale(scale: Tensor) -> dict[torch.device, Tensor] | None:
            if binding.tensors.gradients() != 1:  # there is none, or torch's function raises its own error
                return None
            return {binding.device: binding.tensors.unscale_(on_device(scale, binding.device))}

        if private.take_unscale(scaler, optimizer, unscale):
            _last_unscaled = weakref.ref(optimizer)
            return
    _stock_unscale_(scaler, optimizer)
