"""``torch.optim.SGD`` in one launch."""

from __future__ import annotations

import torch

from torch_fastdet.optim._watch import BoundOptimizer, SgdBinding, unfilled_buffers, without_buffers


class SGD(BoundOptimizer, torch.optim.SGD):
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

    _binding_class = SgdBinding

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        return {**state, "state": without_buffers(state["state"], unfilled_buffers(self))}
