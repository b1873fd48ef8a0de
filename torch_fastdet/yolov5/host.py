"""Describes YOLOv5 as a host of switches: where it is, a checkout (``utils``, ``models``) or the package (``yolov5.utils``, ...)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.switches.registry import YOLOV5 as SWITCHES

# Module names of both layouts begin with these: the GitHub checkout's folders and scripts, and the PyPI package.
PACKAGES = frozenset(
    {"yolov5", "utils", "models", "segment", "classify", "train", "val", "detect", "export", "benchmarks", "hubconf"}
)
# YOLOv5 imports functions from ultralytics, whose own modules are not YOLOv5's.
LEFT_ALONE = ("ultralytics",)
_MARKS = ("utils/loss.py", "models/yolo.py")
_MISSING = (
    "no YOLOv5 was found: neither a checkout with utils/loss.py and models/yolo.py ({places}) nor the package yolov5 "
    "(pip install yolov5)."
)


def _is_yolov5(folder: Path) -> bool:
    return all((folder / mark).is_file() for mark in _MARKS)


def _folders(package: str) -> list[Path]:
    """Return where a top-level package would be imported from; it is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module made by hand, without a spec
        spec = None
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def importable_prefix() -> str | None:
    """Return the prefix of ``utils.loss`` in this process: "" in a checkout, "yolov5." with the package, None without YOLOv5."""
    for prefix in ("yolov5.", ""):  # the package's scripts also import a bare models.yolo
        if f"{prefix}models.yolo" in sys.modules or f"{prefix}utils.loss" in sys.modules:
            return prefix
    # A checkout's utils is what `import utils` finds, which is the first on the path, whether it is YOLOv5's or not.
    if all(any(_is_yolov5(folder.parent) for folder in _folders(name)) for name in ("utils", "models")):
        return ""
    return "yolov5." if any(map(_is_yolov5, _folders("yolov5"))) else None


def is_loaded() -> bool:
    """Return whether modules of a YOLOv5, a checkout's or the package's, are imported in this process."""
    packages = (sys.modules.get(prefix + name) for prefix in ("", "yolov5.") for name in ("utils", "models"))
    folders = (Path(folder) for package in packages for folder in getattr(package, "__path__", ()))
    return any(_is_yolov5(folder.parent) for folder in folders)


def version() -> str | None:
    """Return what is known of the version: that of the package, or the folder of a checkout; None without YOLOv5."""
    prefix = importable_prefix()
    if prefix is None:
        return None
    return (
        f"{importlib.metadata.version('yolov5')} (package)" if prefix else f"a checkout, {_folders('utils')[0].parent}"
    )


class YOLOv5(Host):
    door = "torch_fastdet.yolov5"
    measured = "the gain on this machine, in Ultralytics"
    #: The script that a launcher runs. YOLOv5 may be in its folder or above.
    script: Path | None = None

    def obstacle_to_host(self) -> Obstacle | None:
        near = [] if self.script is None else list(self.script.resolve().parents)[:3]
        if any(map(_is_yolov5, near)) or importable_prefix() is not None:
            return None
        places = "on the path" if self.script is None else f"beside or above {self.script}, or on the path"
        return Obstacle(_MISSING.format(places=places))

    def prefix(self) -> str:
        return importable_prefix() or ""


HOST = YOLOv5(SWITCHES, PACKAGES, LEFT_ALONE)
