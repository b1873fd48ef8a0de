"""Replacing names, saying so, and putting them back.

Names bind at import: ``from utils.metrics import bbox_iou`` leaves a second reference in the importer. So a replacement
visits every module that is loaded, and every YOLOv5 module right after its own import, whoever imports it and when.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch_fastdet._say import say
from torch_fastdet.yolov5.switch import Switch, SwitchError

# First parts of the module names of both layouts: the GitHub checkout's folders and scripts, and the PyPI package.
YOLOV5_TOP_LEVEL = frozenset(
    {"yolov5", "utils", "models", "segment", "classify", "train", "val", "detect", "export", "benchmarks", "hubconf"}
)
# Never visited: our own modules, and those that are not YOLOv5's although YOLOv5 takes functions from them.
FOREIGN_TOP_LEVEL = frozenset({"torch_fastdet", "ultralytics", "torch", "torchvision", "numpy"})

_MISSING = object()


def _top_level(name: str) -> str:
    return name.partition(".")[0]


def _describe(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}" if module and name else getattr(thing, "__name__", repr(thing))


@dataclass(frozen=True)
class Replacement:
    switch: str
    owner: Any  # a module or a class
    attribute: str
    old: Any
    new: Any

    @property
    def is_foreign(self) -> bool:
        """Whether this is a name of torch or the like, and not of YOLOv5 or who imported from it."""
        module = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        return _top_level(module) in FOREIGN_TOP_LEVEL

    def __str__(self) -> str:
        owner = self.owner.__name__ if isinstance(self.owner, ModuleType) else _describe(self.owner)
        return f"{self.switch}: {owner}.{self.attribute} -> {_describe(self.new)}"


class Patches:
    """Everything that is replaced now, and the switches that are on."""

    def __init__(self) -> None:
        self.replacements: list[Replacement] = []
        self._switches: dict[str, Switch] = {}
        self._by_name: set[str] = set()
        self._told: set[str] = set()
        self._current: str = ""
        self._ours_before: set[tuple[int, str]] = set()
        self._hook = _ImportHook(self._visit)

    # For the switches ------------------------------------------------------------------------------------------------

    def replace(self, owner: Any, attribute: str, new: Any, what: str = "") -> None:
        """Set ``owner.attribute`` to ``new``, remember what was there, and say it in one line, with ``what`` at its end."""
        old = vars(owner).get(attribute, _MISSING)
        if old is new:
            return
        setattr(owner, attribute, new)
        self._remember(Replacement(self._current, owner, attribute, old, new), what)

    def cannot_apply(self, switch: Switch, reason: str) -> None:
        """Say why ``switch`` changes nothing here; raise it as an error if the switch was asked for by name."""
        if switch.name in self._by_name:
            raise SwitchError(f"{switch.name} cannot apply: {reason}")
        line = f"{switch.name} does not apply: {reason}"
        if line not in self._told:
            self._told.add(line)
            say(line)

    # For patch(), unpatch() and the launcher -------------------------------------------------------------------------

    @property
    def switches(self) -> tuple[str, ...]:
        return tuple(self._switches)

    def expect(self, switch: Switch, by_name: bool) -> None:
        """Say whether ``switch`` was asked for by name, before it starts."""
        if by_name:
            self._by_name.add(switch.name)

    def start(self, switch: Switch) -> None:
        """Switch on: replace in what is loaded and, from here on, in what is imported."""
        self._current = switch.name
        if switch.name not in self._switches:
            self._switches[switch.name] = switch
            self._hook.install()
            switch.start(self)
        for module in _loaded_modules():
            switch.visit(module, self)

    def stop(self) -> int:
        """Put everything back, newest first, and return how many names that were."""
        self._hook.remove()
        # Modules outside YOLOv5 that were imported meanwhile took our object for stock's: give them stock's.
        for module in _loaded_modules():
            self._adopt(module, quietly=True)
        count = len(self.replacements)
        for replacement in reversed(self.replacements):
            if replacement.old is _MISSING:
                delattr(replacement.owner, replacement.attribute)
            else:
                setattr(replacement.owner, replacement.attribute, replacement.old)
        self.replacements.clear()
        self._switches.clear()
        self._by_name.clear()
        self._told.clear()
        self._ours_before.clear()
        return count

    # Inside ----------------------------------------------------------------------------------------------------------

    def _remember(self, replacement: Replacement, what: str = "", quietly: bool = False) -> None:
        if not any(known.new is replacement.new for known in self.replacements):
            # Whoever holds the drop-in already imported it from us, on purpose, and keeps it.
            for module in _loaded_modules():
                for attribute, value in list(vars(module).items()):
                    if value is replacement.new and module is not replacement.owner:
                        self._ours_before.add((id(module), attribute))
        self.replacements.append(replacement)
        if not quietly:
            say(f"{replacement}{what}")

    def _visit(self, module: ModuleType) -> None:
        self._adopt(module)
        for switch in list(self._switches.values()):
            self._current = switch.name
            switch.visit(module, self)

    def _adopt(self, module: ModuleType, quietly: bool = False) -> None:
        """Take note of names that ``module`` imported from a module in which they were replaced already."""
        known = [r for r in self.replacements if isinstance(r.owner, ModuleType)]
        held = {(id(r.owner), r.attribute) for r in known} | self._ours_before
        # With both layouts loaded the same drop-in stands for two originals; an importer belongs to its own package's.
        known.sort(key=lambda r: _top_level(r.owner.__name__) != _top_level(module.__name__))
        for attribute, value in list(vars(module).items()):
            if (id(module), attribute) in held:
                continue
            origin = next((r for r in known if r.new is value), None)
            if origin is not None:
                self._remember(Replacement(origin.switch, module, attribute, origin.old, origin.new), quietly=quietly)


def _loaded_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and _top_level(name) not in FOREIGN_TOP_LEVEL
    ]


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls back after each import of a YOLOv5 module."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported
        self._searching: set[str] = set()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if _top_level(fullname) not in YOLOV5_TOP_LEVEL or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = None
            for finder in sys.meta_path:
                if finder is not self and hasattr(finder, "find_spec"):
                    spec = finder.find_spec(fullname, path, target)
                    if spec is not None:
                        break
        finally:
            self._searching.discard(fullname)
        loader: Any = None if spec is None else spec.loader
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return spec
        exec_module = loader.exec_module

        def exec_then_call(module: ModuleType) -> None:
            # An attribute of this one loader: its type, which inspect and pkgutil look at, stays what it was.
            vars(loader).pop("exec_module", None)
            exec_module(module)
            if self in sys.meta_path:
                self._imported(module)

        loader.exec_module = exec_then_call
        return spec
