"""Implements ``patch()`` and ``unpatch()`` of one framework: which switches there are, which are on, and why others are not."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import threading
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType

from torch_fastdet._say import counted, counts, fallbacks, hide, note_fallback, say, show, warn
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet._torch.private import without_dispatch_modes
from torch_fastdet._version import __version__
from torch_fastdet.patching.evidence import Obstacle, obstacle_among
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.replace import Patches
from torch_fastdet.patching.switch import Active, Switch

ALL = "fastdet"
one_thread = threading.RLock()  # at a time replaces names: both frameworks replace some of torch


class Host:
    """Describe one framework, and what is switched on in it.

    Modules of ``packages``, the first parts of their names, are visited when they are imported, and those of ``left_alone`` never.
    """

    #: The package that users import.
    door = "torch_fastdet"
    #: What ``python -m torch_fastdet benchmark`` measures of it.
    measured = "the gain on this machine"

    def __init__(
        self, switches: Mapping[str, Switch], packages: Collection[str], left_alone: Collection[str] = ()
    ) -> None:
        self.switches = switches
        self.packages, self.left_alone = packages, left_alone
        self.on: dict[str, Active] = {}
        self.patches = Patches(packages, left_alone, self._visit)

    # To override -----------------------------------------------------------------------------------------------------

    def obstacle_to_host(self) -> Obstacle | None:
        """Return why the host cannot be used here; None where it can."""
        return None

    def prefix(self) -> str:
        """Return what the names of its modules begin with in this process."""
        return ""

    # For everybody ---------------------------------------------------------------------------------------------------

    def import_modules(self, names: Iterable[str]) -> None:
        """Import the host's modules ``names``, leaving out those that this version does not have."""
        prefix = self.prefix()
        with contextlib.ExitStack() as finders:
            for switch in self.switches.values():
                if switch.finder is not None:
                    finders.enter_context(switch.finder.installed())
            for name in names:
                try:
                    importlib.import_module(prefix + name)
                except ModuleNotFoundError as error:
                    if error.name is None or not f"{prefix}{name}.".startswith(f"{error.name}."):
                        raise  # a module that it needs

    def patch(self, switches: Mapping[str, bool], import_now: bool = True) -> tuple[str, ...]:
        """Switch on what the keywords say, and return a line for each name that is replaced.

        Nothing stays replaced if a switch that is asked for by name cannot apply. With ``import_now`` what they replace is imported, to
        report it at once. A launcher leaves that to the script.
        """
        former = self.former_names()
        check_switches(switches, [ALL, *self.switches, *former])
        switches = {former.get(name, name): on for name, on in switches.items() if former.get(name) not in switches}
        by_name = [name for name in self.switches if switches.get(name)]
        everything = switches.get(ALL, not switches)
        names = [
            name
            for name, switch in self.switches.items()
            if name in by_name or (everything and not switch.by_name_only and switches.get(name, True))
        ]
        with one_thread:
            show(self)
            started = [self.on.get(name) or Active(self.switches[name], self.patches) for name in names]
            try:
                for active in started:
                    active.by_name |= active.name in by_name
                    self._start(active, import_now)
            except BaseException:
                self.unpatch()
                raise
            self.patches.requests.append(dict(switches))
            self._say_what_is_on(started)
            for name, on in switches.items():
                if not on and name in self.on:
                    warn(f"{name} stays on, as an earlier patch() has turned it on: call unpatch() first")
            return self.patches.lines()

    def former_names(self) -> dict[str, str]:
        return {switch.formerly: name for name, switch in self.switches.items() if switch.formerly}

    def flags(self) -> dict[str, tuple[str, bool]]:
        """Return the switch of each flag, and whether the flag switches it on: ``--nms_optim``, ``--no-nms_optim``."""
        names = {name: name for name in self.switches} | self.former_names()
        on = {f"--{name}": (switch, True) for name, switch in (names | {ALL: ALL}).items()}
        return on | {f"--no-{name}": (switch, False) for name, switch in names.items()}

    def unpatch(self) -> int:
        """Put every replaced name back, print and return how many there were."""
        with one_thread:
            count = self.patches.put_back()
            self.on.clear()
            self.patches.requests.clear()
        if count:
            say(f"put back {counted(count, 'names')}")
        hide(self)
        return count

    def try_switch(self, switch: Switch) -> Active:
        """Return what came of a switch that is started without replacing anything."""
        active = Active(switch, Patches(self.packages, self.left_alone, lambda _: None, dry=True))
        self._start(active, import_now=True)
        return active

    def report(self, model: str = "") -> None:
        """Say once what the switches did since ``patch()``, and how to time ``model``; nothing where they did nothing."""
        if not counts:
            return
        ran: dict[str, list[str]] = {}
        for (switch, what), number in counts.items():
            ran.setdefault(switch, []).append(counted(number, what))
        counts.clear()
        lines = ["this run, by switch:", *(f"  {switch}: {', '.join(parts)}" for switch, parts in ran.items())]
        lines.append(f"{counted(len(fallbacks), 'fallbacks')}, named above" if fallbacks else "nothing fell back")
        lines.append(f"  {self.measured}: python -m torch_fastdet benchmark{model and f' --model {model}'}")
        say("\n".join(lines))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("torch_fastdet", "faster operators with the results of the ones they replace")
        helps = {f"--{name}": switch.help for name, switch in self.switches.items()}
        helps[f"--{ALL}"] = "every switch that applies here; --no-<switch> leaves one out"
        for flag in self.flags():
            group.add_argument(flag, action="store_true", help=helps.get(flag, argparse.SUPPRESS))

    # Inside ----------------------------------------------------------------------------------------------------------

    def obstacle(self, switch: Switch) -> Obstacle | None:
        """Return why a switch as a whole cannot apply here; None where it can."""
        return (self.obstacle_to_host() if switch.needs_host else None) or obstacle_among(switch.evidence)

    @without_dispatch_modes()  # the originals' small cases need numbers
    def _start(self, active: Active, import_now: bool) -> None:
        with own_attributes([(active, "starting", True)]):
            if (obstacle := self.obstacle(active.switch)) is not None:
                active.cannot_apply(obstacle)
                return
            dry = active.patches.dry
            if dry or active.name not in self.on:
                if not dry:
                    self.on[active.name] = active
                    self.patches.watch_imports()
                active.begin()
            if not dry:
                active.look_through(self.patches.modules())
            if import_now and (dry or active.by_name or not active.switch.on_demand):
                self.import_modules(active.switch.modules)
                if dry:  # nothing has watched the imports
                    active.look_through(self.patches.modules())
                if (obstacle := active.obstacle_to_all()) is not None:
                    active.cannot_apply(obstacle)

    def _say_what_is_on(self, started: Iterable[Active]) -> None:
        off: dict[tuple[str, str], list[str]] = {}
        for active in started:
            if active.why_not is not None:
                state = "in part" if active.has_replaced_any() else "off"
                if state == "in part":
                    note_fallback(f"{active.name}: {active.why_not}")
                off.setdefault((state, active.why_not.rstrip(".")), []).append(active.name)
        on = [name for name, active in self.on.items() if active.why_not is None]
        parts = [f"version {__version__}, {counted(len(on), 'switches')} on"]
        parts += [f"{state}: {', '.join(names)} ({reason})" for (state, reason), names in off.items()]
        say("; ".join([*parts, f"details: python -m {self.door} doctor"]))

    @without_dispatch_modes()
    def _visit(self, module: ModuleType) -> None:
        for active in list(self.on.values()):
            active.look_through([module], namespace(module).get("__name__", ""))


def check_switches(switches: Mapping[str, object], known: Collection[str]) -> None:
    """Raise TypeError for a switch that does not exist, or that is neither on nor off."""
    unknown = sorted(set(switches) - set(known))
    if unknown:
        raise TypeError(f"There is no switch {', '.join(unknown)}; there are {', '.join(known)}.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, but True or False is expected")
