"""What the switches for training on a GPU share: they replace methods of YOLOv5's ``DetectionModel``."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from torch import nn

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import Switch, class_of
from torch_fastdet.yolov5.heads import STOCK_MODULES


class TrainingSwitch(Switch):
    """A replacement of methods of YOLOv5's ``DetectionModel``, for training on a GPU."""

    modules: ClassVar[tuple[str, ...]] = ("models.yolo",)
    needs_gpu = True

    def patch_model(self, model_class: type[nn.Module]) -> None:
        """Replace methods of ``DetectionModel``. Called once for each class of that name."""
        raise NotImplementedError

    def visit(self, module: ModuleType) -> None:
        name = namespace(module).get("__name__")
        if name not in STOCK_MODULES:
            return
        model_class = class_of(module, "DetectionModel")
        if model_class is None:
            self.cannot_apply(f"{name} has no DetectionModel.")
        elif not self.has_replaced(model_class):
            self.patch_model(model_class)

    def trains_on_cpu(self, model: nn.Module) -> None:
        """A forward for training that got no GPU tensor: YOLOv5's dry run, or an error."""
        if hasattr(model, "hyp"):  # YOLOv5 sets it before it trains; a dry run on the CPU comes before that
            self.cannot_apply("the model trains on the CPU, not on a GPU.")
