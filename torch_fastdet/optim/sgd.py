"""Implements ``torch.optim.SGD`` in one launch."""

from __future__ import annotations

import torch

from torch_fastdet.optim._watch import BoundOptimizer, SgdBinding


class SGD(BoundOptimizer, torch.optim.SGD):
    """Implement ``torch.optim.SGD`` with a step of one launch over all groups, which GradScaler drives without a host sync.

    Arguments, results, state_dict (both ways), closures, hooks, schedulers and ``add_param_group`` are those of torch.optim.SGD. In float32
    and float64 the results are its bits; float16 and bfloat16 parameters are updated in float32 and rounded once.

    - lr, momentum, dampening and weight_decay may be one-element tensors on the parameters' device, which a captured step follows.
    - With GradScaler, a skipped step writes nothing. Momentum buffers that a skipped first step made hold zeros.
    - Parameters are on one device; they may be of several dtypes, and lie differently in memory than their gradients.
    - Take one step before a CUDA graph capture. ``foreach`` and ``fused`` are accepted and change nothing.

    Raises:
        RuntimeError: ``differentiable=True``; sparse, integer or complex gradients, a negative lr in a group; before anything is written.
    """

    _binding_class = SgdBinding
