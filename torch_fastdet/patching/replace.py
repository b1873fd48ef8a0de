"""Replaces names, says so, and puts them back.

``from utils.metrics import bbox_iou`` leaves a second reference in the importer. So a replacement visits every loaded module, and every
module of the framework right after its import. Values are compared by identity; no attribute of them is read.
"""

from __future__ import annotations

import builtins
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TypeVar

from torch_fastdet._say import say, warn
from torch_fastdet.patching.import_hook import ImportHook, loaded_modules, names_of, namespace, top_level
from torch_fastdet.patching.protocols import Function, Names, Stock

# These are never visited: torch_fastdet, and libraries from which YOLO packages import functions.
LEFT_ALONE = frozenset({"torch_fastdet", "torch", "torchvision", "numpy"})

_MISSING = object()
F = TypeVar("F", bound=Function)
_all: weakref.WeakSet[Patches] = weakref.WeakSet()


class SwitchError(RuntimeError):
    """Raise for a switch that was asked for by name and cannot apply; the text says which and why."""


@dataclass(eq=False)
class Replacement:
    switch: str
    owner: Stock  # a module, a class, or a function of torch_fastdet
    attribute: str
    old: object
    new: object
    quiet: bool = False

    @property
    def module(self) -> str:
        return namespace(self.owner)["__name__"] if isinstance(self.owner, ModuleType) else self.owner.__module__

    def __str__(self) -> str:
        owner = self.module if isinstance(self.owner, ModuleType) else describe(self.owner)
        return f"{self.switch}: {owner}.{self.attribute} -> {describe(self.new)}"


def describe(thing: object) -> str:
    """Return where something of torch_fastdet, or what we replace, is defined."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}".replace(".<locals>", "") if module and name else getattr(thing, "__name__", repr(thing))


def original(owner: object, attribute: str) -> Stock:
    """Return what ``owner`` itself holds under that name, below everything that is replaced now; None if there is nothing."""
    value = (namespace(owner) if isinstance(owner, ModuleType) else vars(owner)).get(attribute)
    layers = [r for patches in _all for r in patches.replacements if r.owner is owner and r.attribute == attribute]
    while below := [r for r in layers if r.new is value]:
        layers.remove(below[0])
        value = below[0].old
    return None if value is _MISSING else value


def is_code_of(function: Stock, package: str) -> bool:
    """Return whether this is a function whose code is in that package; a static or class method has a function. A wrapper's is its author's."""
    function = function.__func__ if type(function) in (staticmethod, classmethod) else function
    return type(function) is FunctionType and top_level(str(function.__globals__.get("__name__"))) == package


def in_place_of(stock: Stock, name: str = "") -> Callable[[F], F]:
    """Wrap like :func:`functools.wraps`, but keep ``__module__`` and the ``name`` shown in the log."""

    def named(function: F) -> F:
        described = function.__module__, name or function.__name__
        functools.update_wrapper(function, stock)
        function.__module__, function.__qualname__ = described
        return function

    return named


def around(function: Function) -> Function:
    """Return what a target makes of an original by ``function``, which is called with the switch and that in front of its arguments."""

    def make(active: object, stock: Stock, _: object = None) -> Function:
        @in_place_of(stock, function.__name__)
        def call(*args: object, **kwargs: object) -> object:
            return function(active, stock, *args, **kwargs)

        call.__module__ = function.__module__
        return call

    return make


class _Names(Names):
    """Iterate over some names, and behind them those that a module holds at the time of asking."""

    def __init__(self, names: Names, module: Names) -> None:
        super().__init__(names, __builtins__=module.get("__builtins__", builtins))
        self._module = module

    def __missing__(self, name: str) -> object:
        return self._module[name]


def with_names(function: Stock, **names: object) -> FunctionType:
    """Return a copy of a function that finds other things under these names of its module."""
    everything = _Names(names, function.__globals__)
    copy = FunctionType(function.__code__, everything, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def defined_in(module_name: str, attribute: str) -> Stock:
    """Return the function or class that a loaded module itself defines under that name, and not what it imported or a user put there."""
    module = sys.modules.get(module_name)
    if module is None:
        return None
    value = original(module, attribute)
    if type(value) is FunctionType:
        # This unwraps what contextlib.contextmanager has wrapped.
        function = getattr(value, "__wrapped__", value) if is_code_of(value, "contextlib") else value
        return value if getattr(function, "__globals__", None) is namespace(module) else None
    return value if issubclass(type(value), type) and value.__module__ == module_name else None


def stand_in(switch: str, stock: type, ours: type, make: Function | None = None) -> type:
    """Return a class that makes instances by ``make`` or of ``ours``, and whose subclasses derive from the original ``stock``.

    Subclasses build on its inner steps, so they keep its code, and one line says so. ``isinstance`` and ``issubclass`` know both.
    """
    made: list[type] = []

    class StandIn(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], body: Names, **keywords: object) -> Stock:
            if not made:
                return super().__new__(mcs, name, bases, body)
            warn(f"{switch}: {name} derives from {stock.__module__}.{stock.__name__}, and runs the original code")
            bases = tuple(stock if base is made[0] else base for base in bases)
            return type(stock)(name, bases, body, **keywords)

        def __call__(cls, *args: object, **keywords: object) -> object:
            return (make or ours)(*args, **keywords)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (ours, stock))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return subclass is cls or issubclass(subclass, (ours, stock))

    described = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
        "_stock": stock,
    }
    made.append(StandIn(ours.__name__, (ours,), described))
    return made[0]


class Patches:
    """Hold everything that one framework's switches replaced, and what calls ``visit`` with each of its modules that is imported.

    With ``dry`` it notes what would be replaced, and replaces nothing.
    """

    def __init__(
        self,
        packages: Collection[str],
        left_alone: Collection[str],
        visit: Callable[[ModuleType], None],
        dry: bool = False,
    ) -> None:
        self.replacements: list[Replacement] = []
        #: Called once, before everything is undone.
        self.at_end: list[Callable[[], None]] = []
        #: The keywords of each ``patch()`` so far.
        self.requests: list[dict[str, bool]] = []
        self._packages = set(packages)
        self.dry = dry
        self._left_alone = LEFT_ALONE | set(left_alone)
        self._visit = visit
        self._ours_before: set[tuple[int, str]] = set()
        self._hook = ImportHook(packages, self._imported)
        if not dry:  # a dry one has put nothing above what others replaced
            _all.add(self)

    def modules(self) -> list[ModuleType]:
        return loaded_modules(self._left_alone)

    def of_host(self, modules: Iterable[ModuleType]) -> list[ModuleType]:
        return [module for module in modules if top_level(str(namespace(module).get("__name__"))) in self._packages]

    def somebody_elses(self, module: ModuleType, attribute: str) -> object:
        """Return the function or class that a user has put into ``module``, which is the host's; None if there is none."""
        value = namespace(module).get(attribute)
        if type(value) is FunctionType:
            author = value.__globals__.get("__name__")
        else:
            author = value.__module__ if issubclass(type(value), type) else None
        if author is None:
            return None
        # contextlib and functools wrap functions of the framework.
        known = self._packages | self._left_alone | {"contextlib", "functools"}
        ours = top_level(str(author)) in known or any(each.new is value for each in self.replacements)
        return None if ours else value

    def watch_imports(self) -> None:
        self._hook.install()

    def is_outside(self, replacement: Replacement) -> bool:
        """Return whether this is a name of torch or a similar library, and not of the host or a module that imported from it."""
        return top_level(replacement.module) in self._left_alone

    def replace(self, switch: str, owner: object, attribute: str, new: object, quietly: bool = False) -> None:
        """Set ``owner.attribute`` to ``new``, remember what was there, and print a line."""
        old = (namespace(owner) if isinstance(owner, ModuleType) else vars(owner)).get(attribute, _MISSING)
        for known in self.replacements:
            if known.owner is owner and known.attribute == attribute and known.new is new:
                if not self.dry and old is not new and old is not known.old:  # its module was reloaded
                    known.old = old
                    setattr(owner, attribute, new)
                return
        if not self.dry:
            if isinstance(owner, ModuleType):  # a method is found by its class
                self._remember_holders(new)
            setattr(owner, attribute, new)
        self._remember(Replacement(switch, owner, attribute, old, new, quietly))

    def lines(self) -> tuple[str, ...]:
        """Return one line for each replaced name, except those that are replaced quietly."""
        return tuple(str(replacement) for replacement in self.replacements if not replacement.quiet)

    def put_back(self) -> int:
        """Put everything back, newest first, and return for how many names a line was or would have been printed."""
        self._hook.remove()
        while self.at_end:
            self.at_end.pop()()
        # Modules that were imported meanwhile hold the replacement, so give them the original.
        for module in self.modules():
            self._adopt(module, say_it=False)
        count = sum(not replacement.quiet for replacement in self.replacements)
        while self.replacements:
            _restore(self.replacements.pop())
        self._ours_before.clear()
        return count

    # Inside ----------------------------------------------------------------------------------------------------------

    def _remember(self, replacement: Replacement, say_it: bool = True) -> None:
        self.replacements.append(replacement)
        if say_it and not replacement.quiet and not self.dry:
            say(str(replacement), logging.DEBUG)

    def _remember_holders(self, new: object) -> None:
        """Note the modules that hold the drop-in already: they imported it from us on purpose, and keep it."""
        if any(known.new is new and isinstance(known.owner, ModuleType) for known in self.replacements):
            return
        for module in self.modules():
            self._ours_before.update((id(module), attribute) for attribute in names_of(new, module))

    def _imported(self, module: ModuleType) -> None:
        self._adopt(module)
        self._visit(module)

    def _adopt(self, module: ModuleType, say_it: bool = True) -> None:
        """Take note of names that ``module`` imported from a module in which they were replaced already."""
        known = [r for r in self.replacements if isinstance(r.owner, ModuleType)]
        if not known:
            return
        held = {(id(r.owner), r.attribute) for patches in (self, *_all) for r in patches.replacements}
        held |= self._ours_before
        # One drop-in replaces two originals if both layouts of YOLOv5 are loaded: prefer that of the module's own package.
        package = top_level(str(namespace(module).get("__name__")))
        known.sort(key=lambda r: top_level(r.module) != package)
        origins: dict[int, Replacement] = {}
        for replacement in known:
            origins.setdefault(id(replacement.new), replacement)
        for attribute, value in list(namespace(module).items()):
            origin = origins.get(id(value))
            if origin is not None and (id(module), attribute) not in held:
                copied = Replacement(origin.switch, module, attribute, origin.old, origin.new)
                self._remember(copied, say_it=say_it)


def _restore(replacement: Replacement) -> None:
    """Put one name back. A value that a user has set since stays; what the other framework put above it goes back to what was below."""
    owner, attribute = replacement.owner, replacement.attribute
    for patches in _all:
        for above in patches.replacements:
            if above.owner is owner and above.attribute == attribute and above.old is replacement.new:
                above.old = replacement.old
                return
    now = (namespace(owner) if isinstance(owner, ModuleType) else vars(owner)).get(attribute, _MISSING)
    if now is not replacement.new:
        if now is not replacement.old:
            warn(f"{replacement} was replaced since by somebody else, and stays as it is")
    elif replacement.old is _MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, replacement.old)
