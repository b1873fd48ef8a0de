"""Provides optimizers in few launches, gradient clipping without a host sync, and the whole optimizer step in two launches."""

from torch_fastdet.optim.adamw import Adam, AdamW
from torch_fastdet.optim.convert import converted
from torch_fastdet.optim.fused_step import FusedStep
from torch_fastdet.optim.gradients import clip_grad_norm_, unscale_
from torch_fastdet.optim.musgd import MuSGD
from torch_fastdet.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "FusedStep", "MuSGD", "clip_grad_norm_", "converted", "unscale_"]
