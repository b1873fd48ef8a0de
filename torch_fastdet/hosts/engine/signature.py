"""Comparing the parameters of a third party's functions with those that a drop-in takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what callers can pass by position: all parameters except keyword-only ones, which a drop-in may add."""
    found = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in found if parameter.kind is not inspect.Parameter.KEYWORD_ONLY)


def difference(name: str, stock: Callable[..., Any], wanted: Callable[..., Any] | tuple[str, ...]) -> str | None:
    """One line if ``stock``, called ``name``, takes other parameters than ``wanted``; None if they are the same."""
    theirs = tuple(inspect.signature(stock).parameters)
    ours = wanted if isinstance(wanted, tuple) else parameters(wanted)
    return None if theirs == ours else f"{name} takes ({', '.join(theirs)}), not ({', '.join(ours)})."
