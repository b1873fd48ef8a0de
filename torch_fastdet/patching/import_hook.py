"""Lists the modules that are loaded, and calls back after the import of further ones.

``sys.modules`` may hold anything: only dictionaries of module objects are read, which runs none of their code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_fastdet.patching.protocols import Names

_dictionary = vars(ModuleType)["__dict__"].__get__


def namespace(module: ModuleType) -> Names:
    """Return ``vars(module)``, without running code of the module's type."""
    return _dictionary(module)


@functools.cache
def top_level(name: str) -> str:
    return name.partition(".")[0]


def is_run(name: str) -> bool:
    """Return whether a module is loaded and its code has run to the end."""
    module = sys.modules.get(name)
    spec = None if module is None else namespace(module).get("__spec__")
    return module is not None and not getattr(spec, "_initializing", False)


def root(name: str) -> Path | None:
    """Return the folder on the path under which a loaded module lies; None without a file."""
    file = namespace(sys.modules[name]).get("__file__")
    if not isinstance(file, str):
        return None
    path = Path(file).resolve()
    return path.parents[name.count(".") + (path.name == "__init__.py")]


def loaded_modules(leaving_out: Collection[str]) -> list[ModuleType]:
    """Return modules in ``sys.modules``, except those of the packages ``leaving_out``."""
    # isinstance would believe a proxy that claims to be a module.
    return [
        module
        for name, module in list(sys.modules.items())
        if top_level(name) not in leaving_out and issubclass(type(module), ModuleType)
    ]


def names_of(value: object, module: ModuleType) -> list[str]:
    """Return the names under which a module holds the very object ``value``. Most hold none, which no bytecode looks at name by name."""
    names = namespace(module)
    if not any(map(operator.is_, list(names.values()), itertools.repeat(value))):
        return []
    return [name for name, held in list(names.items()) if held is value]


class ImportHook(importlib.abc.MetaPathFinder):
    """Call ``imported(module)`` right after each import of a module of ``packages``."""

    def __init__(self, packages: Collection[str], imported: Callable[[ModuleType], None]) -> None:
        self._packages = packages
        self._imported = imported
        self._searching: set[str] = set()

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install it for a while, unless it is installed already."""
        stays = self in sys.meta_path
        self.install()
        try:
            yield
        finally:
            if not stays:
                self.remove()

    def searches(self, name: str) -> bool:
        return top_level(name) in self._packages

    def run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Run a module that has been found."""
        exec_module(module)
        if self in sys.meta_path:
            self._imported(module)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not self.searches(fullname) or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            # Ask the other finders, because importlib.util.find_spec returns a loaded module's old spec.
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            found = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((each for each in found if each is not None), None)
        finally:
            self._searching.discard(fullname)
        loader: object = None if spec is None else spec.loader
        if not hasattr(loader, "exec_module") or not hasattr(loader, "__dict__"):
            return spec
        exec_module = loader.exec_module

        def exec_then_call(module: ModuleType) -> None:
            # Only this loader's attribute was replaced, because inspect and pkgutil look at its type.
            vars(loader).pop("exec_module", None)
            self.run(exec_module, module)

        loader.exec_module = exec_then_call
        return spec
