"""What the switches for training on a GPU share: they replace methods of Ultralytics' model and look at its trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import class_of
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

MODELS, TRAINER = "ultralytics.nn.tasks", "ultralytics.engine.trainer"


class TrainingSwitch(UltralyticsSwitch):
    """A replacement of methods of ``DetectionModel``, which segmentation, pose and OBB models derive from."""

    modules: ClassVar[tuple[str, ...]] = ("nn.tasks", "engine.trainer")
    needs_gpu = True

    def patch_model(self, model_class: Any) -> None:
        """Replace methods of ``DetectionModel``. Called once."""
        raise NotImplementedError

    def objection(self, trainer: Any) -> str | None:
        """Why the switch cannot apply to this training, in one line; None where it can. Called when its model is made."""
        if trainer.device.type != "cuda":
            return f"the model trains on {trainer.device.type}, not on a GPU."
        return None

    def visit(self, module: ModuleType) -> None:
        name = namespace(module).get("__name__")
        if name == MODELS:
            model_class = class_of(module, "DetectionModel")
            if model_class is None:
                self.cannot_apply(f"{name} has no DetectionModel.")
            elif not self.has_replaced(model_class):
                self.patch_model(model_class)
        elif name == TRAINER:
            trainer_class = class_of(module, "BaseTrainer")
            if trainer_class is None or "_setup_train" not in vars(trainer_class):
                self.cannot_apply(f"{name} has no BaseTrainer with a _setup_train.")
            elif not self.has_replaced(trainer_class):
                setup = self._setup(vars(trainer_class)["_setup_train"])
                if setup is not None:
                    self.replace(trainer_class, "_setup_train", setup, quietly=True)

    def _setup(self, stock: Callable[..., Any]) -> Callable[..., Any] | None:
        if not self.takes("BaseTrainer._setup_train", stock, ("self",)):
            return None

        @functools.wraps(stock)
        def _setup_train(trainer: Any) -> Any:
            reason = self.objection(trainer)
            if reason is not None:
                self.cannot_apply(reason)
            return stock(trainer)

        return _setup_train
