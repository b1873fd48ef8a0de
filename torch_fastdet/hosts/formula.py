"""Does a host's method compute what ours computes? Both run on a few made-up numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from torch_fastdet._torch.private import tree_flatten


@contextlib.contextmanager
def plainly_on_the_cpu() -> Iterator[None]:
    """Without what the caller has set for its own tensors."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def agree(theirs: Callable[..., Any], ours: Callable[..., Any], attributes: dict[str, Any], x: Any) -> bool:
    """Whether two methods of (self, x) give the same tensors, in every bit, for a ``self`` with these attributes alone.

    False where one of them raises: their method reads something else.
    """
    try:
        with plainly_on_the_cpu():
            results = [method(SimpleNamespace(**attributes), copy.deepcopy(x)) for method in (theirs, ours)]
            (mine, shape), (found, form) = (tree_flatten(result) for result in results)
            return shape == form and all(map(torch.equal, mine, found))
    except Exception:  # whatever their code does
        return False


def stand_ins(*names: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A function for each of these names. No two of them commute, so another order gives other numbers."""

    def stand_in(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t * t + number

    return {name: stand_in(number) for number, name in enumerate(names)}


def pictures(channels: int = 1) -> torch.Tensor:
    """(1, channels, 2, 3) different numbers. No random ones: a training's own stay what they were."""
    return torch.arange(channels * 6, dtype=torch.float64, device="cpu").view(1, channels, 2, 3) / 8


def _names(code: CodeType) -> set[str]:
    """What the code reads, with that of the comprehensions in it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


@dataclass(frozen=True)
class Formula:
    """What a method of (self, x) computes.

    Args:
        method: a method of ours that computes it.
        modules: attributes that the method calls.
        others: the other names that their code may read.
        options: further attributes, for each trial.
    """

    method: Callable[[Any, Any], Any]
    modules: tuple[str, ...]
    others: tuple[str, ...] = ()
    options: tuple[dict[str, Any], ...] = ({},)

    def is_that_of(self, forward: Any) -> bool:
        """Whether ``forward`` computes this formula, and its code reads these names and no others.

        The same names do not suffice: a fork may put the activation before the norm, or change the order of a concatenation.
        """
        code = getattr(forward, "__code__", None)
        if code is None or code.co_argcount != 2 or code.co_freevars:
            return False
        if _names(code) != {*self.modules, *self.others}:
            return False
        parts = stand_ins(*self.modules)
        return all(agree(forward, self.method, {**parts, **options}, pictures()) for options in self.options)
