"""What a switch is; registry.py says how to add one."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches


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

    def start(self, patches: Patches) -> None:
        """Replace names outside YOLOv5. Called once."""

    def visit(self, module: ModuleType, patches: Patches) -> None:
        """Replace names in ``module``, which may or may not be one of YOLOv5's. Called once for each import of it."""
