"""Compare EMA, optimizers and the whole step over YOLOv5's tensors with the original loops and torch's best.

The model has the convolutions, batch norms, nesting and state_dict sizes of YOLOv5 (benchmarks/work.py, which also has
the bytes of each case), built from torch's modules; gradients are random. `launches` counts kernels and copies. The
step's variants all start from scaled gradients that do not overflow. What sets the gradients back is part of no
variant: they only shrink by the unscaling, which costs the same on any value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks import harness, stock, work
from torch_fastdet import ops, optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, FusedStep


class Conv(nn.Module):
    def __init__(self, layer: work.Convolution):
        super().__init__()
        self.conv = nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, bias=False)
        self.bn = nn.BatchNorm2d(layer.outputs)
        self.act = nn.SiLU()


class Model(nn.Module):
    """Hold the tensors of YOLOv5 by module; there is no forward."""

    def __init__(self, name: str):
        super().__init__()
        layers = work.yolov5_convolutions(name)
        self.model = nn.Sequential(*(Conv(layer) for layer in layers if layer.activated))
        self.m = nn.ModuleList(nn.Conv2d(x.inputs, x.outputs, 1) for x in layers if not x.activated)
        self.register_buffer("anchors", torch.rand(3, 3, 2))

    def groups(self, decay: float = 5e-4):
        norms = [m.weight for m in self.modules() if isinstance(m, nn.BatchNorm2d)]
        weights = [m.weight for m in self.modules() if isinstance(m, nn.Conv2d)]
        biases = [m.bias for m in self.modules() if getattr(m, "bias", None) is not None]
        return [{"params": biases}, {"params": weights, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]


class Setup:
    """Hold one model with everything a step needs, for one variant."""

    stock_ema: Any
    pairs: tuple[list[torch.Tensor], list[torch.Tensor]]  # averages and values

    def __init__(self, name: str, device: torch.device, kind=SGD, scaled: bool = True, **arguments):
        torch.manual_seed(0)
        with device:  # a CPU takes seconds for the random weights of the largest
            self.model = Model(name)
        self.params = list(self.model.parameters())
        # These learning rates leave the weights where they are for thousands of repetitions.
        self.optimizer = kind(self.model.groups(), lr=1e-9, momentum=0.9, nesterov=True, **arguments)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30, enabled=scaled)
        if scaled:
            self.scaler.scale(torch.zeros((), device=device))
        for p in self.params:
            p.grad = torch.randn_like(p) * 1e-3
        self.ema = ModelEMA(self.model)
        self.optimizer.step()

    def floats(self):
        values = self.model.state_dict()
        return [(v, values[k]) for k, v in self.ema.ema.state_dict().items() if v.is_floating_point()]

    def torch_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def stock_step(self):
        self.torch_step()
        self.stock_ema.update(self.model)

    def tuned_step(self):
        self.torch_step()
        averages, values = self.pairs
        torch._foreach_lerp_(averages, values, 0.001)

    def launcher_step(self):
        """Do what train.py calls under --multi_tensor_optimizer."""
        optim.unscale_(self.scaler, self.optimizer)
        optim.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.ema.update(self.model)


def measure_ema(report: harness.Report, name: str, **options) -> None:
    setup, other = Setup(name, report.device), Setup(name, report.device)
    pairs = setup.floats()
    averages, values = [v for v, _ in pairs], [x.detach() for _, x in pairs]
    parameters = sum(v.numel() for v in averages)

    def foreach():
        torch._foreach_lerp_(averages, values, 0.001)

    variants = {}
    if stock_ema := stock.yolov5_ema(other.model):
        variants["stock"] = lambda: stock_ema.update(other.model)
    variants |= {
        "torch._foreach_lerp_": foreach,
        "torch_fastdet op on lists": lambda: ops.multi_tensor_ema_(averages, values, 0.999),
        "torch_fastdet ModelEMA.update": lambda: setup.ema.update(setup.model),
    }
    if report.device.type == "cuda" and name == "s":  # a minute of compilation
        variants["torch._foreach_lerp_, torch.compile"] = torch.compile(foreach)
    report.compare(f"EMA {name}", variants, bytes=work.ema(parameters).bytes, **options)


def measure_sgd(report: harness.Report, name: str, **options) -> None:
    cuda = report.device.type == "cuda"
    parameters = work.yolov5_parameters(name)
    setups = {
        "torch_fastdet SGD": Setup(name, report.device),
        "torch SGD": Setup(name, report.device, torch.optim.SGD),
        "torch SGD(fused=True)": Setup(name, report.device, torch.optim.SGD, fused=True),
    }
    if not cuda:
        setups["torch SGD(foreach=True)"] = Setup(name, report.device, torch.optim.SGD, foreach=True)
    variants = {key: setup.optimizer.step for key, setup in setups.items()}
    report.compare(f"SGD momentum nesterov {name}", variants, bytes=work.sgd(parameters).bytes, **options)


def measure_step(report: harness.Report, name: str, **options) -> None:
    fused, launcher = Setup(name, report.device), Setup(name, report.device)
    other, tuned = Setup(name, report.device, torch.optim.SGD), Setup(name, report.device, torch.optim.SGD, fused=True)
    pairs = tuned.floats()
    tuned.pairs = [v for v, _ in pairs], [x.detach() for _, x in pairs]
    step = FusedStep(fused.optimizer, fused.scaler, fused.ema, max_norm=10.0)
    step.step()
    step.refresh()
    variants = {}
    other.stock_ema = stock.yolov5_ema(other.model)
    if other.stock_ema:
        variants["stock"] = other.stock_step
    variants |= {
        "torch SGD(fused), _foreach_lerp_": tuned.tuned_step,
        "torch_fastdet, stock's call sequence": launcher.launcher_step,
        "torch_fastdet FusedStep": step.step,
    }
    parameters = work.yolov5_parameters(name)
    bytes = work.fused_step(parameters, work.yolov5_statistics(name)).bytes
    # The original step asks the host whether there was an overflow.
    ungraphable = ("stock", "torch SGD(fused), _foreach_lerp_", "torch_fastdet, stock's call sequence")
    report.compare(f"unscale + clip + SGD + EMA {name}", variants, bytes=bytes, ungraphable=ungraphable, **options)


def measure_musgd(report: harness.Report, name: str, **options) -> None:
    """Measure MuSGD alone over the tensors of an Ultralytics model, in its trainer's groups."""

    def step_of(kind):
        torch.manual_seed(0)
        model = stock.ultralytics_model(name)
        params = [p for p in model.to(report.device).parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "use_muon": True, "weight_decay": 5e-4},
            {"params": [p for p in params if p.dim() < 2], "use_muon": False},
        ]
        for group in groups:
            group.update(lr=1e-9, momentum=0.9, nesterov=True)
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        return kind(groups, muon=0.2, sgd=1.0).step

    stock_musgd = stock.ultralytics_musgd()
    if stock_musgd is not None:
        variants = {"stock": step_of(stock_musgd), "torch_fastdet MuSGD": step_of(optim.MuSGD)}
        report.compare(f"MuSGD step {name}", variants, ungraphable=("stock",), **options)


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    models = ("n", "s", "x") if cuda else ("n",)
    options = {"repetitions": 50, "inner": 5} if cuda else {"repetitions": 30, "inner": 1}
    if report.prepare:
        return measure_ema(report, "s", **options)  # the one that compiles
    for name in models:
        measure_ema(report, name, **options)
        measure_sgd(report, name, **options)
        measure_step(report, name, **options)
    measure_norm(report, "s" if cuda else "n", **options)
    if cuda:  # on a CPU, Newton-Schulz alone takes seconds, in the original arithmetic
        measure_musgd(report, "yolov8s", **options)


def measure_norm(report: harness.Report, name: str, **options) -> None:
    """Measure clip_grad_norm_ alone."""
    setup = Setup(name, report.device)
    variants = {
        "torch clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(setup.params, 10.0),
        "torch_fastdet clip_grad_norm_": lambda: optim.clip_grad_norm_(setup.params, 10.0),
    }
    report.compare(f"clip_grad_norm_ {name}", variants, bytes=work.clip(work.yolov5_parameters(name)).bytes, **options)


if __name__ == "__main__":
    harness.run("multi_tensor", measure)
