"""Knows where the modules of YOLOv5 and Ultralytics are, and which of their versions the switches support."""

from __future__ import annotations

import importlib

from torch_fastdet.patching.evidence import Signature, at_least
from torch_fastdet.patching.protocols import Function

YOLOV5_REFERENCE = "YOLOv5 7.0"
#: The first version of Ultralytics with the same results as the drop-ins, and the last one that was read.
OLDEST, REFERENCE = "8.4.184", "8.4.190"
VERSION = at_least("ultralytics", OLDEST)
ALL_READ = f"ultralytics {OLDEST} to {REFERENCE}"
#: The signature of a method without parameters.
SELF = Signature(("self",))


def yolov5(module: str) -> tuple[str, ...]:
    """Return the full names of a module of YOLOv5: in a checkout, and in PyPI's package."""
    return module, f"yolov5.{module}"


def ultralytics(module: str) -> tuple[str, ...]:
    """Return the full name of a module of Ultralytics, as a tuple like :func:`yolov5`."""
    return (f"ultralytics.{module}",)


def by(module: str, name: str) -> Function:
    """Return a function of a module of this folder, which is imported when it is called: with cv2, which few commands need."""

    def call(*arguments: object) -> object:
        return getattr(importlib.import_module(f"torch_fastdet.switches.{module}"), name)(*arguments)

    return call
