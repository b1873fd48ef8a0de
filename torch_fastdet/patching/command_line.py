"""Implements what the command lines of all frameworks share: our flags among a script's own arguments, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch_fastdet._say import say, show
from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.switch import SwitchError


@dataclass(frozen=True)
class Launcher:
    """Describe ``python -m torch_fastdet.<framework> ... --<switch>`` for the help: what the user types, and what it does."""

    host: Host
    program: str
    usage: str
    description: str

    def split(self, argv: list[str]) -> tuple[dict[str, bool], list[str]]:
        """Return switches that are asked for or left out, and everything else in its order. What follows ``--`` is left alone."""
        flags, chosen = self.host.flags(), {}
        rest: list[str] = []
        arguments: Iterator[str] = iter(argv)
        for argument in arguments:
            flag, equals, _ = argument.partition("=")
            if argument == "--":
                rest += [argument, *arguments]
            elif flag not in flags:
                rest.append(argument)
            elif equals:
                self.fail(f"{flag} takes no value; it came as {argument}. Leave {flag} out to keep that switch off.")
            else:
                name, on = flags[flag]
                chosen[name] = on
        return chosen, rest

    def switch_on(self, chosen: Mapping[str, bool], import_now: bool) -> None:
        """Switch on what the flags say; what cannot apply ends the process with one line."""
        try:
            show(self.host)
            if any(chosen.values()):
                self.host.patch(chosen, import_now)
            else:
                words = [flag for flag, (_, on) in self.host.flags().items() if on]
                say(f"no switch is given ({', '.join(words)}), so the program runs as it is")
        except (SwitchError, ImportError, ValueError) as error:
            self.refuse(error)

    def print_help(self) -> None:
        parser = argparse.ArgumentParser(
            prog=self.program, usage=self.usage, description=self.description, add_help=False
        )
        parser.add_argument("-h", "--help", action="store_true", help="this text, then the command's own")
        self.host.add_arguments(parser)
        print(parser.format_help(), flush=True)

    def fail(self, message: str) -> NoReturn:
        print(f"usage: {self.usage}\n{self.program}: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)

    def refuse(self, error: Exception) -> NoReturn:
        """End the process for a switch that cannot apply."""
        print(f"{self.program}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
