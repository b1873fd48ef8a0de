"""``multi_tensor_optimizer``: the optimizer's step of the trainer in few launches.

Stock builds the optimizer and its parameter groups; SGD, Adam, AdamW and MuSGD then become ours, with the same groups. The trainer's
``optimizer_step`` (``scaler.unscale_``, ``clip_grad_norm_``, ``scaler.step``, ``scaler.update``, ``zero_grad`` and ``ema.update``)
becomes one :class:`~torch_fastdet.optim.FusedStep`, with the results of those calls. Where a part of it is not what we know (a
trainer's own ``optimizer_step``, another optimizer, average, scaler or clipping), stock's code runs, which finds our clipping,
unscaling and average behind their own names.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_fastdet import optim
from torch_fastdet._say import say
from torch_fastdet._torch.tensors import ModuleWatch, unwrap
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import Name, class_of
from torch_fastdet.loader.fingerprint import fingerprint
from torch_fastdet.optim.adamw import why_torchs
from torch_fastdet.optim.convert import is_stock_musgd
from torch_fastdet.ultralytics.dropins import ModelEMA
from torch_fastdet.ultralytics.switch import UltralyticsSwitch
from torch_fastdet.ultralytics.trials import REFERENCE, ema_differs, musgd_differs

BUILD_OPTIMIZER = ("self", "model", "name", "lr", "momentum", "decay", "iterations")
MAX_NORM = 10.0  # of the trainer's clipping
OPTIMIZER_STEP = "bea1725d"  # fingerprint of the trainer's method, from 8.4.120 to 8.4.190
OURS = (optim.SGD, optim.Adam, optim.AdamW, optim.MuSGD)


class MultiTensorOptimizer(UltralyticsSwitch):
    name = "multi_tensor_optimizer"
    help = "SGD, Adam, AdamW, MuSGD, moving average, unscale and clip over all tensors at once"
    modules = ("utils.torch_utils", "engine.trainer")
    names = (Name("ModelEMA", ModelEMA, ("ultralytics.utils.torch_utils",)),)

    def start(self) -> None:
        self.replace_stock(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_, "torch")
        self.replace_stock(torch.amp.GradScaler, "unscale_", optim.unscale_, "torch")

    def visit(self, module: ModuleType) -> None:
        if namespace(module).get("__name__") != "ultralytics.engine.trainer":
            return
        trainer = class_of(module, "BaseTrainer")
        methods = {} if trainer is None else vars(trainer)
        build, step = methods.get("build_optimizer"), methods.get("optimizer_step")
        if build is None or step is None:
            missing = "build_optimizer" if build is None else "optimizer_step"
            self.cannot_apply(f"ultralytics.engine.trainer has no BaseTrainer.{missing}.")
        elif not self.has_replaced(trainer) and self.takes("BaseTrainer.build_optimizer", build, BUILD_OPTIMIZER):
            self.replace(trainer, "build_optimizer", self._building(build))
            if not self.takes("BaseTrainer.optimizer_step", step, ("self",)):
                return
            if fingerprint(step) == OPTIMIZER_STEP:
                self.replace(trainer, "optimizer_step", _stepping(step))
            else:
                say(f"{self.name}: BaseTrainer.optimizer_step is not that of ultralytics {REFERENCE}; it runs as it is")

    def refusal(self, name: Name, stock: Any) -> str | None:
        return super().refusal(name, stock) or ema_differs(stock)

    def _building(self, stock: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        """Stock's method, which writes its log lines; the optimizer that it returns becomes ours."""

        @functools.wraps(stock)
        def build_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            theirs = stock(*args, **kwargs)
            reason = musgd_differs(type(theirs)) if is_stock_musgd(theirs) else None
            if reason is not None:
                self.cannot_apply(reason)
                return theirs
            return optim.ours(theirs)

        build_optimizer.__module__ = __name__  # in the line that patch() prints
        build_optimizer.__qualname__ = "build_optimizer"
        return build_optimizer


def _stepping(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Stock's method in one fused step, where that has the same results."""
    known: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()

    @functools.wraps(stock)
    def optimizer_step(trainer: Any) -> None:
        step = known.get(trainer)
        if not _has_our_parts(trainer):
            stock(trainer)
            return
        if step is None or not step.is_of(trainer):
            known[trainer] = step = _Step(trainer)
        if step.fused is None:
            stock(trainer)
            return
        step.fused.step(trainer.model)
        trainer.optimizer.zero_grad()

    optimizer_step.__module__ = __name__
    optimizer_step.__qualname__ = "optimizer_step"
    return optimizer_step


class _Step:
    """The fused step of a trainer, and what it was made of."""

    def __init__(self, trainer: Any) -> None:
        model = unwrap(trainer.model)
        self.parts = trainer.optimizer, trainer.scaler, trainer.ema
        self.watch = ModuleWatch(model)
        params = self._params(trainer)
        averages = [id(average) for _, average, _ in trainer.ema.pairs(model)]
        fits = (
            len({p.device for p in params}) == 1
            # Stock clips what the model holds, and a fused step what the optimizer holds.
            and set(map(id, params)) == set(map(id, model.parameters()))
            and len(set(averages)) == len(averages)  # tied weights move twice in stock's average
        )
        self.count = len(params)
        self.fused = optim.FusedStep(*self.parts, MAX_NORM) if fits else None

    @staticmethod
    def _params(trainer: Any) -> list[torch.Tensor]:
        return [p for group in trainer.optimizer.param_groups for p in group["params"]]

    def is_of(self, trainer: Any) -> bool:
        parts = trainer.optimizer, trainer.scaler, trainer.ema
        same = all(mine is its for mine, its in zip(self.parts, parts)) and self.watch.unchanged(unwrap(trainer.model))
        return same and self.count == sum(len(group["params"]) for group in trainer.optimizer.param_groups)


def _has_our_parts(trainer: Any) -> bool:
    """Whether the trainer's step calls what a fused step stands for, and nothing else."""
    optimizer, scaler, ema = trainer.optimizer, trainer.scaler, trainer.ema
    return (
        type(optimizer) in OURS
        and type(scaler) is torch.amp.GradScaler
        and type(ema) is ModelEMA
        and torch.nn.utils.clip_grad_norm_ is optim.clip_grad_norm_
        and vars(torch.amp.GradScaler).get("unscale_") is optim.unscale_
        and "unscale_" not in vars(scaler)
        and not (isinstance(optimizer, torch.optim.Adam) and why_torchs(optimizer) is not None)
    )
