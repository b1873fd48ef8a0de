"""SGD in one launch, gradient clipping without a host sync, and the whole optimizer step in two launches."""

from torch_fastdet.optim.fused_step import FusedStep
from torch_fastdet.optim.gradients import clip_grad_norm_, unscale_
from torch_fastdet.optim.sgd import SGD

__all__ = ["SGD", "FusedStep", "clip_grad_norm_", "unscale_"]
