"""Describes a switch as data. Each switch has one table, ``switches/<switch>/switch.py``, with a row of each framework.

A :class:`Switch` lists its targets, and ``patch()`` and the doctor walk them. What runs between ``patch()`` and ``unpatch()`` is an
:class:`Active`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, TypeVar

import torch

from torch_fastdet._say import rank, say, warn
from torch_fastdet._torch.private import gpu_count
from torch_fastdet.patching.evidence import Asks, Evidence, Follows, Obstacle, Signature, obstacle_among
from torch_fastdet.patching.import_hook import ImportHook, is_run, names_of, namespace, root, top_level
from torch_fastdet.patching.protocols import Stock
from torch_fastdet.patching.replace import Patches, SwitchError, defined_in, describe, is_code_of, original
from torch_fastdet.rewrites.rewrite import Rewrite

T = TypeVar("T")
Make = Callable[["Active", Stock, Stock], object]


def obstacle_to_gpu() -> Obstacle | None:
    """Return why no GPU can be used in this process. CUDA is not started: a training script may choose the visible GPUs later."""
    if torch.version.cuda is None:
        return Obstacle(f"torch {torch.__version__} is a CPU build.")
    count = gpu_count()  # reads CUDA_VISIBLE_DEVICES, too
    if count < 0:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return Obstacle("there is no CUDA driver on this machine.")
    return Obstacle("there is no GPU that this process may use.") if count == 0 else None


GPU = Asks("a GPU", lambda _: obstacle_to_gpu())


def obstacle_in_device(device: str) -> Obstacle | None:
    """Return, for the doctor, why a switch for training on a GPU cannot apply with this ``--device``."""
    return Obstacle("the model trains on the CPU, not on a GPU.") if device == "cpu" else None


@dataclass(frozen=True)
class Target:
    """Name a function, class or method of the framework, and what takes its place: under every name that holds it, or on its class.

    Args:
        where: full names of the modules that may define it; each definition is a separate original.
        moved: further modules, which define it in other versions.
        name: ``function``, ``Class`` or ``Class.method``.
        drop_in: what takes its place. Without ``make``, the original must take its parameters.
        make: makes that from the :class:`Active` switch, the original, and the class of a method or the module of anything else. It
            may return an :class:`Obstacle`, or None, which leaves the original.
        evidence: by which the original is the known one.
        class_evidence: by which the class of a method is the known one.
        own: refuse to replace a method that is not the framework's own.
        after: ``Class.method`` that must have been replaced first.
        adds: the class has no such method of its own, nor by inheritance.
        otherwise: what to do at an obstacle, and if no loaded module has it: ``"refuse"``, the switch cannot apply; ``"say"`` why; or
            ``"nothing"``.
        quiet: no line says what is replaced.
    """

    where: tuple[str, ...]
    name: str
    drop_in: Stock = None
    make: Make | None = None
    evidence: tuple[Evidence, ...] = ()
    class_evidence: tuple[Evidence, ...] = ()
    moved: tuple[str, ...] = ()
    own: bool = False
    after: str = ""
    adds: bool = False
    otherwise: Literal["refuse", "say", "nothing"] = "refuse"
    quiet: bool = False

    @property
    def all_evidence(self) -> tuple[Evidence, ...]:
        """Return all that is asked of the original: its parameters first, where it gets a drop-in as it is."""
        return self.evidence if self.drop_in is None or self.make else (Signature(self.drop_in), *self.evidence)

    @property
    def is_method(self) -> bool:
        return "." in self.name

    @property
    def places(self) -> tuple[str, ...]:
        return (*self.where, *self.moved)

    def obstacle_in_modules(self, just_run: str) -> Obstacle | None:
        """Return why there is nothing to replace, if a module that should define the function or class has been run; else None."""
        run = [name for name in self.places if name == just_run or is_run(name)]
        here, there = ({root(name) for name in run if name in names} for names in (self.where, self.moved))
        if not (here & there if self.moved else here):
            return None  # a module that may define it can still come, as where a module of this name is somebody else's
        if any(defined_in(name, self.name) for name in self.places):
            return None
        return self.obstacle_in(*run)

    def obstacle_in(self, *places: str) -> Obstacle:
        """Return what is said where none of the places defines the function or class."""
        return Obstacle(
            f"no {self.name} is defined in {' or '.join(places)}, or it has been replaced by somebody else."
        )

    def obstacle(self, owner: object, stock: object) -> Obstacle | None:
        """Return why the original stays; None where it can be replaced."""
        if self.own:
            method = self.name.partition(".")[2]
            function = original(owner, method)
            if is_code_of(function, "torch"):  # the host has wrapped it, as by torch.inference_mode
                function = getattr(function, "__wrapped__", function)
            if not is_code_of(function, top_level(owner.__module__)):
                return Obstacle(f"{describe(owner)}.{method} has been replaced by somebody else, and stays.")
        obstacle = None if stock is None else obstacle_among(self.all_evidence, stock)
        return obstacle or obstacle_among(self.class_evidence, owner)


@dataclass(frozen=True)
class Outside:
    """Name a function of torch, ``owner.name``, that ``drop_in`` replaces when the switch starts, unless somebody else has replaced it."""

    owner: Stock
    name: str
    drop_in: object

    def obstacle(self) -> Obstacle | None:
        if is_code_of(original(self.owner, self.name), "torch"):
            return None
        return Obstacle(f"{describe(self.owner)}.{self.name} has been replaced by somebody else, and stays.")


@dataclass(frozen=True)
class Switch:
    """Describe one word of ``patch()`` and of the command line, and what it replaces.

    Args:
        name: the word.
        help: what it does, for ``--help``.
        targets: what it replaces, in this order.
        modules: modules of the framework, without its package's prefix, that ``patch()`` imports; others are looked at when they are imported.
        on_demand: a training needs none of them: ``patch()`` imports them where the switch is asked for by name.
        evidence: what must hold for the switch as a whole. It must not touch CUDA: a script chooses its device later.
        needs_host: whether the framework must be installed.
        options: for the doctor: a function from an option's value to why the switch cannot apply, by the option's name.
        notice: returns what to say when it is switched on, or None.
        by_name_only: it is not a part of "everything that applies".
        rewrites: for the doctor: what it changes in a model while that is captured.
        formerly: an earlier name, which still means it.
        finder: finds what modules of the framework import and the switch does without, until ``unpatch()``.
    """

    name: str
    help: str
    targets: tuple[Target | Outside, ...]
    modules: tuple[str, ...] = ()
    on_demand: bool = False
    evidence: tuple[Evidence, ...] = ()
    needs_host: bool = True
    options: dict[str, Callable[[str], Obstacle | None]] = field(default_factory=dict)
    notice: Callable[[], str | None] | None = None
    by_name_only: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    formerly: str = ""
    finder: ImportHook | None = None


@dataclass
class Outcome:
    """Say what came of one target: why the original stays, and whether this version has it."""

    name: str
    obstacle: Obstacle | None = None
    found: bool = True
    #: The evidence in words, for the doctor.
    evidence: list[str] = field(default_factory=list)


class Active:
    """Hold a switch between ``patch()`` and ``unpatch()``; with dry ``patches`` it is only tried."""

    def __init__(self, switch: Switch, patches: Patches) -> None:
        self.switch = switch
        self.patches = patches
        self.by_name = False  # not by "everything that applies"
        #: True while ``patch()`` runs, which prints one line about all switches that cannot apply.
        self.starting = False
        #: The reason why it cannot apply, or not to everything.
        self.why_not: Obstacle | None = None
        #: The outcome of each target, by its id.
        self.outcomes: dict[int, Outcome] = {}
        self.told: set[str] = set()
        # Maps name and definer to the original, its replacement, or the reason why there is none.
        self._found: dict[tuple[str, str], tuple[object, object, Obstacle | None]] = {}
        self._shared: dict[object, Stock] = {}

    @property
    def name(self) -> str:
        return self.switch.name

    # For what takes the place of the original ------------------------------------------------------------------------

    def shared(self, make: Callable[[Active], T]) -> T:
        """Return what several targets of this switch have in common: ``make(self)``, made once."""
        if make not in self._shared:
            self._shared[make] = make(self)
        return self._shared[make]

    def replace(self, owner: object, attribute: str, new: object, quietly: bool = False) -> None:
        """Set ``owner.attribute``, a name of a module or class, and print a line; unpatch() undoes it."""
        self.patches.replace(self.name, owner, attribute, new, quietly)

    def replacement(self, owner: object, attribute: str) -> Stock:
        """Return what takes the place of ``owner.attribute`` by this switch; None if nothing does."""
        mine = (known for known in self.patches.replacements if known.switch == self.name)
        return next((known.new for known in mine if known.owner is owner and known.attribute == attribute), None)

    def has_replaced(self, owner: object, attribute: str) -> bool:
        return self.replacement(owner, attribute) is not None

    def has_replaced_any(self) -> bool:
        return any(known.switch == self.name for known in self.patches.replacements)

    def cannot_apply(self, reason: str, this_rank: bool = False) -> None:
        """Say once why the switch changes nothing here; raise it if the switch was asked for by name.

        With ``this_rank`` the reason may hold on this rank alone, which the line names.
        """
        where = f"rank {rank()}: " if this_rank and rank() else ""
        self.why_not = self.why_not or Obstacle(reason)
        if self.patches.dry:
            return
        if self.by_name:
            raise SwitchError(f"{where}{self.name} cannot apply: {reason}")
        if self.starting:
            self._say_once(lambda line: say(line, logging.DEBUG), f"{self.name} does not apply: {reason}")
            return
        self.tell(f"{where}{self.name} does not apply: {reason}", every_rank=this_rank)

    def tell(self, line: str, every_rank: bool = False) -> None:
        self._say_once(lambda line: warn(line, every_rank), line)

    def _say_once(self, how: Callable[[str], None], line: str) -> None:
        if line not in self.told and not self.patches.dry:
            self.told.add(line)
            how(line)

    # For the host ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Replace names outside the host. Called once, before any of the host's code runs."""
        if self.switch.finder is not None and not self.patches.dry:
            self.switch.finder.install()
            self.patches.at_end.append(self.switch.finder.remove)
        for target in self.switch.targets:
            if isinstance(target, Outside):
                obstacle = target.obstacle()
                self.outcomes[id(target)] = Outcome(f"{describe(target.owner)}.{target.name}", obstacle)
                if obstacle is None:
                    self.replace(target.owner, target.name, target.drop_in)
                else:
                    self.cannot_apply(obstacle)
        if not self.patches.dry and self.switch.notice is not None and (line := self.switch.notice()) is not None:
            say(f"{self.name}: {line}")

    def look_through(self, modules: list[ModuleType], just_run: str = "") -> None:
        """Replace what ``modules`` hold of the targets. Called again for each import, with the name of the module that has ``just_run``."""
        of_host = self.patches.of_host(modules)
        for target in self.switch.targets:
            if isinstance(target, Outside):
                continue
            if not target.is_method:
                for definer in target.places:
                    self.look_for(target, definer, modules)
                missing = target.obstacle_in_modules(just_run)
                definers = [sys.modules[name] for name in target.places if name in sys.modules]
                for module in (*of_host, *self.patches.of_host(definers)):
                    if (other := self.patches.somebody_elses(module, target.name)) is not None:
                        stays = Obstacle(f"{target.name} stays: it is {describe(other)}.")
                        if missing is not None:
                            missing = stays
                        if missing is None or target.otherwise != "refuse":
                            self.tell(f"{self.name}: {stays}")
                if missing is not None:
                    self.is_missing(target, target.where[0], missing)
                continue
            for module in modules:
                if namespace(module).get("__name__") in target.where:
                    self._look_for_method(target, module)

    def obstacle_to_all(self) -> Obstacle | None:
        """Return why nothing of the host can be replaced, in one line; None if something was found."""
        names = [target for target in self.switch.targets if isinstance(target, Target)]
        if not names or any(id(name) in self.outcomes and self.outcomes[id(name)].found for name in names):
            return None
        wanted = " or ".join({f"{definer}.{name.name}": None for name in names for definer in name.places})
        return Obstacle(f"found nothing to replace: there is no {wanted}, or it has been replaced by somebody else.")

    def look_for(self, target: Target, definer: str, modules: list[ModuleType]) -> None:
        """Replace the function or class that the module ``definer`` defines wherever ``modules`` hold it."""
        module = sys.modules.get(definer)
        stock = defined_in(definer, target.name)
        if stock is None:
            return
        key = target.name, definer
        known, new, obstacle = self._found.get(key, (None, None, None))
        if known is not stock:
            obstacle = target.obstacle(module, stock)
            new = None if obstacle is not None else self._make(target, stock, module)
            if isinstance(new, Obstacle):
                new, obstacle = None, new
            self._found[key] = stock, new, obstacle
            modules = self.patches.modules()  # some may have taken it while its module was being imported
        self.outcomes[id(target)] = Outcome(f"{definer}.{target.name}", obstacle)
        if obstacle is not None:
            self._stays(target, obstacle, describe(stock))
        elif new is not None:
            for holder in modules:
                for attribute in names_of(stock, holder):
                    self.replace(holder, attribute, new)

    def _look_for_method(self, target: Target, module: ModuleType) -> None:
        class_name, method = target.name.split(".")
        where = namespace(module)["__name__"]
        owner = defined_in(where, class_name)
        stock = getattr(owner, method, None)
        if owner is not None and self.has_replaced(owner, method):
            return
        if target.after:
            before, _, other = target.after.partition(".")
            if not self.has_replaced(namespace(module).get(before), other):
                self.outcomes[id(target)] = Outcome(f"{where}.{target.name}", Obstacle(f"{target.after} stays."))
                return
        if owner is None or (stock is None and not target.adds):
            self.is_missing(target, where, Obstacle(f"{where} has no {class_name if owner is None else target.name}."))
            return
        obstacle = target.obstacle(owner, stock)
        new = self._make(target, stock, owner) if obstacle is None else obstacle
        self.outcomes[id(target)] = Outcome(f"{where}.{target.name}", new if isinstance(new, Obstacle) else None)
        if isinstance(new, Obstacle):
            self._stays(target, new, f"{describe(owner)}.{method}")
        elif new is not None:
            self.replace(owner, method, new, target.quiet)

    def _make(self, target: Target, stock: object, owner: object) -> object:
        return target.drop_in if target.make is None else target.make(self, stock, owner)

    def is_missing(self, target: Target, where: str, obstacle: Obstacle, runs_now: bool = False) -> None:
        """Say that ``where`` has no such name. Where it ``runs_now``, that is an error of a switch asked for by name, whatever the target says."""
        if target.otherwise != "nothing":
            self.outcomes[id(target)] = Outcome(f"{where}.{target.name}", obstacle, found=False)
            self.cannot_apply(obstacle) if runs_now else self._stays(target, obstacle)

    def _stays(self, target: Target, obstacle: Obstacle, stock: str = "") -> None:
        if target.otherwise == "refuse":
            self.cannot_apply(obstacle)
        elif target.otherwise == "say" and not isinstance(obstacle, Follows):
            self.tell(f"{self.name}: {stock} stays: {obstacle}" if stock else f"{self.name}: {obstacle}")
