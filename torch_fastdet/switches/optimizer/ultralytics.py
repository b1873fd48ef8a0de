"""Runs the ``optimizer_step`` of Ultralytics' trainer as one :class:`~torch_fastdet.optim.FusedStep`, or the original if a part is unknown."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container

import torch

from torch_fastdet import ema, optim
from torch_fastdet._say import count, warn
from torch_fastdet._torch import private
from torch_fastdet._torch.tensors import ModuleWatch, unwrap
from torch_fastdet.optim.convert import is_stock_musgd
from torch_fastdet.optim.gradients import OURS
from torch_fastdet.patching.by_name import ByName
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Function, Model, Trainer
from torch_fastdet.patching.replace import around, in_place_of
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


@around
def build_optimizer(active: Active, stock: Function, *args: object, **kwargs: object) -> torch.optim.Optimizer:
    """Make the optimizer torch_fastdet's that ``BaseTrainer.build_optimizer`` returns, which writes its log lines."""
    theirs = stock(*args, **kwargs)
    obstacle = MUSGD.obstacle(type(theirs)) if is_stock_musgd(theirs) else None
    if obstacle is not None:
        active.cannot_apply(obstacle)
        return theirs
    return optim.converted(theirs)


def stepping(active: Active, stock: Callable[[Trainer], None], _: object) -> Callable[[Trainer], None]:
    """Return the original method in one fused step, where that has the same results."""
    known: weakref.WeakKeyDictionary[object, _Step] = weakref.WeakKeyDictionary()

    @in_place_of(stock)
    def optimizer_step(trainer: Trainer) -> None:
        fused: Obstacle | optim.FusedStep | None = _obstacle_in_parts(trainer)
        if fused is None:
            step = known.get(trainer)
            if step is None or not step.is_of(trainer):
                known[trainer] = step = _Step(trainer)
            fused = step.fused
        if isinstance(fused, Obstacle):
            warn(f"{active.name}: Ultralytics' own code takes the step: {fused}")
            count(active.name, "original steps")
            stock(trainer)
            return
        count(active.name, "fused steps")
        fused.step(trainer.model)
        trainer.optimizer.zero_grad()

    return optimizer_step


class _Step:
    """Hold the fused step of a trainer, or why there is none, and what it was made of."""

    def __init__(self, trainer: Trainer) -> None:
        model = unwrap(trainer.model)
        self.parts = trainer.optimizer, trainer.scaler, trainer.ema
        self.watch = ModuleWatch(model)
        params = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        averages = [id(average) for _, average, _ in trainer.ema.pairs(model)]
        self.count = len(params)
        self.fused: optim.FusedStep | Obstacle
        if len({p.device for p in params}) > 1:
            self.fused = Obstacle("the parameters are on several devices.")
        # The original clips the model's parameters, and a fused step those of the optimizer.
        elif set(map(id, params)) != set(map(id, model.parameters())):
            self.fused = Obstacle("the optimizer's parameters are not those of the model.")
        elif len(set(averages)) < len(averages):  # they move twice in the original average
            self.fused = Obstacle("the model has tied weights.")
        else:
            self.fused = optim.FusedStep(*self.parts, MAX_NORM)

    def is_of(self, trainer: Trainer) -> bool:
        parts = trainer.optimizer, trainer.scaler, trainer.ema
        same = all(mine is its for mine, its in zip(self.parts, parts)) and self.watch.unchanged(unwrap(trainer.model))
        return same and self.count == sum(len(group["params"]) for group in trainer.optimizer.param_groups)


def _obstacle_in_parts(trainer: Trainer) -> Obstacle | None:
    """Return why the trainer's step is not what a fused step stands for, or is more than that."""
    optimizer, scaler, ema = trainer.optimizer, trainer.scaler, trainer.ema
    if type(optimizer) not in OURS:
        return Obstacle(f"the optimizer is {type(optimizer).__name__}.")
    if (
        type(scaler) is not torch.amp.GradScaler
        or type(ema) is not ModelEMA
        or torch.nn.utils.clip_grad_norm_ is not optim.clip_grad_norm_
        or vars(torch.amp.GradScaler).get("unscale_") is not optim.unscale_
        or not {"unscale_", "step", "update"}.isdisjoint(vars(scaler))
        or "update" in vars(ema)
    ):
        return Obstacle("its scaler, its clipping or its moving average has been replaced.")
    # Hooks would read gradients that are unscaled and clipped.
    return None if private.steps_plainly(optimizer) else Obstacle("the optimizer has hooks, or a step of its own.")
