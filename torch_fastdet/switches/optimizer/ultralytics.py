"""Runs the ``optimizer_step`` of Ultralytics' trainer as one :class:`~torch_fastdet.optim.FusedStep`, or the original if a part is unknown."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container

import torch

from torch_fastdet import ema, optim
from torch_fastdet._say import count
from torch_fastdet._torch import private
from torch_fastdet._torch.tensors import ModuleWatch, unwrap
from torch_fastdet.optim.convert import is_stock_musgd
from torch_fastdet.optim.gradients import OURS
from torch_fastdet.patching.by_name import ByName
from torch_fastdet.patching.protocols import Function, Model, Trainer
from torch_fastdet.patching.replace import in_place_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.optimizer.trial import MUSGD


class ModelEMA(ema.ModelEMA):
    """Implement ``ultralytics.utils.torch_utils.ModelEMA`` by :class:`torch_fastdet.ema.ModelEMA`. A distillation teacher that the
    model carries is dropped from the copy."""

    _filed_as = ByName("ultralytics.utils.torch_utils", "ModelEMA")

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999, tau: float = 2000, updates: int = 0):
        super().__init__(model, decay, tau, updates)
        ema: Model = self.ema
        if hasattr(ema, "teacher_model"):
            ema.teacher_model = None

    def update_attr(self, model: torch.nn.Module, include: Container[str] = (), exclude: Container[str] = ()) -> None:
        """Copy the model's attributes to the EMA: those in ``include`` (all, if empty), but none in ``exclude`` or with a
        leading underscore."""
        super().update_attr(model, include, exclude)


MAX_NORM = 10.0  # of the trainer's clipping


def building(active: Active, stock: Callable[..., torch.optim.Optimizer], _: object) -> Function:
    """Return ``BaseTrainer.build_optimizer``, which writes its log lines; the optimizer that it returns becomes torch_fastdet's."""

    @in_place_of(stock)
    def build_optimizer(*args: object, **kwargs: object) -> torch.optim.Optimizer:
        theirs = stock(*args, **kwargs)
        obstacle = MUSGD.obstacle(type(theirs)) if is_stock_musgd(theirs) else None
        if obstacle is not None:
            active.cannot_apply(obstacle)
            return theirs
        return optim.converted(theirs)

    return build_optimizer


def stepping(active: Active, stock: Callable[[Trainer], None], _: object) -> Callable[[Trainer], None]:
    """Return the original method in one fused step, where that has the same results."""
    known: weakref.WeakKeyDictionary[object, _Step] = weakref.WeakKeyDictionary()

    @in_place_of(stock)
    def optimizer_step(trainer: Trainer) -> None:
        step, ours = known.get(trainer), _has_our_parts(trainer)
        if ours and (step is None or not step.is_of(trainer)):
            known[trainer] = step = _Step(trainer)
        if not ours or step is None or step.fused is None:
            count(active.name, "original steps")
            stock(trainer)
            return
        count(active.name, "fused steps")
        step.fused.step(trainer.model)
        trainer.optimizer.zero_grad()

    return optimizer_step


class _Step:
    """Hold the fused step of a trainer, and what it was made of."""

    def __init__(self, trainer: Trainer) -> None:
        model = unwrap(trainer.model)
        self.parts = trainer.optimizer, trainer.scaler, trainer.ema
        self.watch = ModuleWatch(model)
        params = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        averages = [id(average) for _, average, _ in trainer.ema.pairs(model)]
        fits = (
            len({p.device for p in params}) == 1
            # The original clips what the model holds, and a fused step what the optimizer holds.
            and set(map(id, params)) == set(map(id, model.parameters()))
            and len(set(averages)) == len(averages)  # tied weights move twice in the original average
        )
        self.count = len(params)
        self.fused = optim.FusedStep(*self.parts, MAX_NORM) if fits else None

    def is_of(self, trainer: Trainer) -> bool:
        parts = trainer.optimizer, trainer.scaler, trainer.ema
        same = all(mine is its for mine, its in zip(self.parts, parts)) and self.watch.unchanged(unwrap(trainer.model))
        return same and self.count == sum(len(group["params"]) for group in trainer.optimizer.param_groups)


def _has_our_parts(trainer: Trainer) -> bool:
    """Return whether the trainer's step calls what a fused step stands for, and nothing else."""
    optimizer, scaler, ema = trainer.optimizer, trainer.scaler, trainer.ema
    return (
        type(optimizer) in OURS
        and type(scaler) is torch.amp.GradScaler
        and type(ema) is ModelEMA
        and torch.nn.utils.clip_grad_norm_ is optim.clip_grad_norm_
        and vars(torch.amp.GradScaler).get("unscale_") is optim.unscale_
        and {"unscale_", "step", "update"}.isdisjoint(vars(scaler))
        and "update" not in vars(ema)
        and private.steps_plainly(optimizer)  # hooks read gradients that are unscaled and clipped
    )
