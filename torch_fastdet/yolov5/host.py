"""Describes YOLOv5 as a host of switches: where it is, and which modules are its own."""

from __future__ import annotations

from pathlib import Path

from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.switches.registry import YOLOV5 as SWITCHES
from torch_fastdet.yolov5 import layout

# First parts of the module names of both layouts: the GitHub checkout's folders and scripts, and the PyPI package.
PACKAGES = frozenset(
    {"yolov5", "utils", "models", "segment", "classify", "train", "val", "detect", "export", "benchmarks", "hubconf"}
)
# YOLOv5 takes functions from ultralytics, whose own modules are not YOLOv5's.
LEFT_ALONE = ("ultralytics",)


class YOLOv5(Host):
    door = "torch_fastdet.yolov5"
    #: The script that a launcher runs; YOLOv5 may be beside it or above it.
    script: Path | None = None

    def missing(self) -> Obstacle | None:
        if layout.script_has_yolov5(self.script):
            return None
        places = "on the path" if self.script is None else f"beside or above {self.script}, or on the path"
        return Obstacle(layout.MISSING.format(places=places))

    def prefix(self) -> str:
        return layout.importable_prefix() or ""


HOST = YOLOv5(SWITCHES, PACKAGES, LEFT_ALONE)
