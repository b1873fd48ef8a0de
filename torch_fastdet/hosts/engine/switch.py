"""What a switch is. The registry of each host (``yolov5/registry.py``, ``ultralytics/registry.py``) says how to add one."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

from torch_fastdet._say import rank, say
from torch_fastdet._torch.private import gpu_count
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.replace import Patches, SwitchError, defined_in, describe, is_code_of, original
from torch_fastdet.hosts.engine.signature import difference

__all__ = ["Name", "Switch", "SwitchError", "missing_gpu"]


def missing_gpu() -> str | None:
    """Why no GPU can be used in this process; None where there is one, or may be one.

    CUDA is not started: that would fix which GPUs are visible before a training script chooses, and break processes forked
    later.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build."
    count = gpu_count()  # reads CUDA_VISIBLE_DEVICES, too
    if count < 0:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no CUDA driver on this machine."
    return "there is no GPU that this process may use." if count == 0 else None


@dataclass(frozen=True)
class Name:
    """A function or a class of the host for which there is a drop-in.

    Args:
        attribute: its name.
        drop_in: what takes its place, or something with the same parameters (see :meth:`Switch.drop_in`).
        definers: full names of the modules that may define it; each definition is a separate original.
        methods: for a class whose drop-in takes more than stock: each method that is called, and its parameters in stock.
    """

    attribute: str
    drop_in: Any
    definers: tuple[str, ...]
    methods: tuple[tuple[str, ...], ...] = ()

    def difference(self, stock: Any) -> str | None:
        """One line if stock's parameters are not the drop-in's, else None."""
        name = f"{stock.__module__}.{stock.__name__}"
        for method, *wanted in self.methods:
            found = difference(f"{name}.{method}", getattr(stock, method), tuple(wanted))
            if found is not None:
                return found
        return None if self.methods else difference(name, stock, self.drop_in)


class Switch:
    """One replacement of something in a host. An instance lives from ``patch()`` to ``unpatch()``.

    A switch that replaces functions or classes only lists them in ``names``. Others override :meth:`start` (names
    outside the host) or :meth:`visit` (names in the host's modules, such as methods), and call :meth:`replace`.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    #: Functions and classes to replace, wherever a module holds them.
    names: tuple[Name, ...] = ()
    #: Modules of the host, without its package's prefix, that ``patch()`` imports, so that it can report at once what it replaced.
    modules: ClassVar[tuple[str, ...]] = ()
    #: Whether the switch needs the host to be installed.
    needs_host: ClassVar[bool] = True
    #: Whether there must be a GPU.
    needs_gpu: ClassVar[bool] = False

    def __init__(self, patches: Patches, by_name: bool = False) -> None:
        self.patches = patches
        #: Whether it was asked for by name, not by "everything that applies".
        self.by_name = by_name
        self._told: set[str] = set()
        # By name and definer: the original, what takes its place, or why nothing does.
        self._found: dict[tuple[str, str], tuple[Any, Any, str | None]] = {}

    # To override -----------------------------------------------------------------------------------------------------

    def unsupported(self) -> str | None:
        """Why the switch cannot apply to this version of the host, in one line; None where it can."""
        return None

    def start(self) -> None:
        """Replace names outside the host. Called once, before any of the host's code runs."""

    def visit(self, module: ModuleType) -> None:
        """Replace further names in ``module``, which may or may not be the host's. Called again for each import of it."""

    def refusal(self, name: Name, stock: Any) -> str | None:
        """Why ``stock`` cannot be replaced, in one line; None where it can."""
        return name.difference(stock)

    def drop_in(self, name: Name, stock: Any) -> Any:
        """What takes the place of ``stock``. Called once for each original."""
        return name.drop_in

    # To call ---------------------------------------------------------------------------------------------------------

    def replace(self, owner: Any, attribute: str, new: Any, what: str = "", quietly: bool = False) -> None:
        """Set ``owner.attribute``, a name of a module or class, and print a line that ends with ``what``; unpatch() undoes it."""
        self.patches.replace(self.name, owner, attribute, new, what, quietly)

    def replace_stock(self, owner: Any, attribute: str, new: Any, package: str, what: str = "") -> None:
        """:meth:`replace` a function of ``package``; one that somebody else has put there stays, and the switch cannot apply."""
        if is_code_of(original(owner, attribute), package):
            self.replace(owner, attribute, new, what)
        else:
            self.cannot_apply(f"{describe(owner)}.{attribute} has been replaced by somebody else, and stays.")

    def has_replaced(self, owner: Any, attribute: str | None = None) -> bool:
        return any(
            known.switch == self.name and known.owner is owner and attribute in (None, known.attribute)
            for known in self.patches.replacements
        )

    def cannot_apply(self, reason: str, this_rank: bool = False) -> None:
        """Print why the switch changes nothing here, once; raise it as an error if the switch was asked for by name.

        Args:
            reason: a sentence.
            this_rank: in a distributed run the reason may hold on this rank alone, which the line then names.
        """
        where = f"rank {rank()}: " if this_rank and rank() else ""
        if self.by_name:
            raise SwitchError(f"{where}{self.name} cannot apply: {reason}")
        if reason not in self._told:
            self._told.add(reason)
            say(f"{where}{self.name} does not apply: {reason}", logging.WARNING, every_rank=this_rank)

    def takes(self, name: str, stock: Callable[..., Any], wanted: Callable[..., Any] | tuple[str, ...]) -> bool:
        """Whether ``stock``, called ``name``, takes these parameters; if not, the switch cannot apply."""
        found = difference(name, stock, wanted)
        if found is not None:
            self.cannot_apply(found)
        return found is None

    # For the host ----------------------------------------------------------------------------------------------------

    def look_through(self, modules: list[ModuleType]) -> None:
        """Replace what ``modules`` hold of ``names``, then :meth:`visit` them."""
        for name in self.names:
            for definer in name.definers:
                self._look_for(name, definer, modules)
        for module in modules:
            self.visit(module)

    def found_nothing(self) -> str | None:
        """Why none of ``names`` can be replaced, in one line; None if one was found."""
        if not self.names or self._found:
            return None
        wanted = {f"{definer}.{name.attribute}": None for name in self.names for definer in name.definers}
        return f"found nothing to replace: there is no {' or '.join(wanted)}, or it has been replaced by somebody else."

    def _look_for(self, name: Name, definer: str, modules: list[ModuleType]) -> None:
        stock = defined_in(definer, name.attribute)
        if stock is None:
            return
        key = name.attribute, definer
        known, new, refusal = self._found.get(key, (None, None, None))
        if known is not stock:
            refusal = self.refusal(name, stock)
            new = None if refusal is not None else self.drop_in(name, stock)
            self._found[key] = stock, new, refusal
            modules = self.patches.modules()  # some may have taken it while its module was being imported
        if refusal is not None:
            self.cannot_apply(refusal)
        else:
            self.patches.replace_everywhere(self.name, stock, new, modules)


def class_of(module: ModuleType, name: str) -> Any:
    """The class of that name that ``module`` itself defines, or None."""
    value = original(module, name)
    ours = issubclass(type(value), type) and value.__module__ == namespace(module).get("__name__")
    return value if ours else None
