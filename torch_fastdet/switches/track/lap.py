"""Lets Ultralytics' trackers be imported without the package ``lap``, which the core does not need.

Their module of costs imports ``lap``, and installs it where it is missing. It gets an empty module instead.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_fastdet.patching.import_hook import ImportHook

MATCHING = "ultralytics.trackers.utils.matching"


def is_missing() -> bool:
    return sys.modules.get("lap") is None and importlib.util.find_spec("lap") is None


def lapjv(*args: Any, **kwargs: Any) -> object:
    """Call the function of this name of ``lap``, which may have been installed since."""
    if is_missing():
        raise ModuleNotFoundError("Ultralytics' original tracker runs here, and needs lap: pip install lap", name="lap")
    return importlib.import_module("lap").lapjv(*args, **kwargs)


STAND_IN: Any = ModuleType("lap", "Ultralytics' module of costs holds this where the package lap is missing.")
STAND_IN.__version__ = "none"
STAND_IN.lapjv = lapjv


class Finder(ImportHook):
    """Give the module of costs the stand-in if ``lap`` is missing. Other modules, which may try to import ``lap``, do not see it."""

    def __init__(self) -> None:
        super().__init__((), lambda _: None)

    def searches(self, name: str) -> bool:
        return name == MATCHING

    def run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        if not is_missing():
            exec_module(module)
            return
        before = {name: held for name, held in sys.modules.items() if name == "lap"}  # None: somebody forbids it
        sys.modules["lap"] = STAND_IN
        try:
            exec_module(module)
        finally:
            del sys.modules["lap"]
            sys.modules.update(before)
