"""What a switch is; registry.py says how to add one."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from torch_fastdet.yolov5.heads import STOCK_MODULES, class_of

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches


def missing_gpu() -> str | None:
    """Why no GPU can be used in this process; None where there is one, or may be one.

    CUDA is not started: that would fix which GPUs are visible before YOLOv5 chooses, and break processes forked later.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build."
    count = torch.cuda._device_count_nvml()  # reads CUDA_VISIBLE_DEVICES, too; -1 where it does not know
    if count < 0:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no CUDA driver on this machine."
    return "there is no GPU that this process may use." if count == 0 else None


class SwitchError(RuntimeError):
    """A switch that was asked for by name cannot apply; the text says which and why."""


class Switch:
    """One replacement of something in YOLOv5. Instances live from ``patch()`` to ``unpatch()``."""

    name: ClassVar[str]
    help: ClassVar[str]
    #: YOLOv5 modules, without the package's prefix, that ``patch()`` imports so that it can say at once what it replaced.
    modules: ClassVar[tuple[str, ...]] = ()
    #: Whether there must be a YOLOv5 for the switch to make sense.
    needs_yolov5: ClassVar[bool] = True
    #: Whether there must be a GPU.
    needs_gpu: ClassVar[bool] = False

    def start(self, patches: Patches) -> None:
        """Replace names outside YOLOv5. Called once."""

    def visit(self, module: ModuleType, patches: Patches) -> None:
        """Replace names in ``module``, which may or may not be one of YOLOv5's. Called once for each import of it."""


class TrainingSwitch(Switch):
    """A replacement of methods of YOLOv5's ``DetectionModel``, for training on a GPU."""

    modules = ("models.yolo",)
    needs_gpu = True

    def replace(self, model_class: type[nn.Module], patches: Patches) -> None:
        """Replace methods of ``DetectionModel``. Called once for each class of that name."""
        raise NotImplementedError

    def visit(self, module: ModuleType, patches: Patches) -> None:
        if module.__name__ not in STOCK_MODULES:
            return
        model_class = class_of(module, "DetectionModel")
        if model_class is None:
            patches.cannot_apply(self, f"{module.__name__} has no DetectionModel.")
        elif not any(known.switch == self.name and known.owner is model_class for known in patches.replacements):
            self.replace(model_class, patches)

    def trains_on_cpu(self, model: nn.Module, patches: Patches) -> None:
        """A forward for training that got no GPU tensor: YOLOv5's dry run, or an error."""
        if hasattr(model, "hyp"):  # YOLOv5 sets it before it trains; a dry run on the CPU comes before that
            patches.cannot_apply(self, "the model trains on the CPU, not on a GPU.")
