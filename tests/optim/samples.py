"""Provide parameters, gradients and a training loop that the optimizers' tests share."""

from __future__ import annotations

import torch
from torch import nn

from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, FusedStep, clip_grad_norm_

SHAPES = [(16, 3, 6, 6), (16,), (16,), (32, 16, 3, 3), (32,), (1,), (255, 128, 1, 1), (255,), (0,), (4099,)]
DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True}


def parameters(device, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype)) for s in SHAPES]


def set_grads(params, seed, scale=1.0, skip=()):
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
        p.grad = None if i in skip else grad.to(p.device, p.dtype)


def groups(params, decay=5e-4):
    """Return biases, decayed weights and norm weights as smart_optimizer groups them."""
    return [
        {"params": params[1::3]},
        {"params": params[0::3], "weight_decay": decay},
        {"params": params[2::3], "weight_decay": 0.0},
    ]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right))


def model_on(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 33, 3),
        nn.BatchNorm2d(33),
        nn.Conv2d(33, 7, 1),
    ).to(device)


def named_groups(model):
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    biases = [m.bias for m in model.modules() if hasattr(m, "bias")]
    norms = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return [{"params": biases}, {"params": weights, "weight_decay": 5e-4}, {"params": norms}]


class Loop:
    """Run a training loop's optimizer step, fused or as separate calls."""

    def __init__(self, device, fused, scale=True, max_norm=1.0, optimizer=SGD, settings=NESTEROV):
        self.model = model_on(device)
        self.params = list(self.model.parameters())
        self.optimizer = optimizer(named_groups(self.model), **settings)
        self.scaler = (
            torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=4, enabled=scale)
            if scale is not None
            else None
        )
        if scale:
            self.scaler.scale(torch.zeros((), device=device))
        self.ema = ModelEMA(self.model)
        self.max_norm = max_norm
        self.fused = FusedStep(self.optimizer, self.scaler, self.ema, max_norm) if fused else None

    def grads(self, step, overflow=False):
        set_grads(self.params, step, scale=self.scaler.get_scale() if self.scaler else 1.0)
        if overflow:
            self.params[0].grad.view(-1)[3] = float("nan")
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.01)

    def step(self, step, overflow=False):
        self.grads(step, overflow)
        if self.fused:
            self.fused.step()
            return self.fused.norm.clone()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.zeros(())
        if self.max_norm:
            # Gradients are in the optimizer's order, so that sums have the same bits.
            norm = clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.max_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.ema.update(self.model)
        return norm

    def tensors(self):
        buffers = [buffer for slot in self.optimizer.state.values() for buffer in slot.values() if buffer is not None]
        return [*self.model.state_dict().values(), *self.ema.ema.state_dict().values(), *buffers]
