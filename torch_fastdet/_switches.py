"""What patch() and unpatch() of torch_fastdet.yolov5 and torch_fastdet.ultralytics share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch_fastdet._say import say


def check_switches(switches: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for a switch that does not exist, or that is neither on nor off."""
    unknown = sorted(set(switches) - set(known))
    if unknown:
        raise TypeError(f"There is no switch {', '.join(unknown)}; there are {', '.join(known)}.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, but True or False is wanted")


def say_put_back(count: int) -> None:
    if count:
        say(f"put back {count} name{'s' if count > 1 else ''}")
