"""Is a host's code what we know? Each kind of evidence asks one question of it, and answers None or an :class:`Obstacle`.

==================  ===============================================================================
:class:`Signature`  stock takes the parameters that ours takes
:class:`Behaves`    stock gives what ours gives in a small case
:class:`Formula`    the same, and its code reads no further names
:class:`SameCode`   stock's source is one of those that were read, whatever its layout and comments
:class:`Version`    the installed version is not too old
:class:`Asks`       a question of its own, such as whether there is a GPU
==================  ===============================================================================

A version of a host that gives another answer needs a row more: another signature, another hash, another case.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from torch_fastdet._say import without_counts
from torch_fastdet._torch.private import tree_flatten, without_dispatch_modes
from torch_fastdet.patching.fingerprint import fingerprint, names_in
from torch_fastdet.patching.replace import defined_in, describe


class Obstacle(str):
    """Why something cannot apply: one sentence."""


class Evidence(Protocol):
    def check(self, stock: object) -> Obstacle | None:
        """Why ``stock``, a function or class of the host, is not what we know; None where it is."""

    def __str__(self) -> str:
        """In a few words."""


def first_obstacle(evidence: Collection[Evidence], stock: object = None) -> Obstacle | None:
    """The first of ``evidence`` that speaks against ``stock``; cheap evidence stands first."""
    return next((obstacle for each in evidence if (obstacle := each.check(stock)) is not None), None)


@contextlib.contextmanager
def plainly_on_the_cpu() -> Iterator[None]:
    """Without what the caller has set for its own tensors."""
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:  # it is the whole process's: leave it alone where it is the usual one
        torch.set_default_dtype(torch.float32)
    try:
        with (
            without_dispatch_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            without_counts(),
        ):
            yield
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class Asks:
    """A question of its own.

    Args:
        about: what is asked for, in a few words.
        question: from stock to a sentence, or None where all is well.
    """

    about: str
    question: Callable[[object], str | None]

    def check(self, stock: object) -> Obstacle | None:
        answer = self.question(stock)
        return None if answer is None else Obstacle(answer)

    def __str__(self) -> str:
        return self.about


@dataclass(frozen=True)
class Signature:
    """Stock takes these parameters.

    Args:
        wanted: their names, or a function of ours; its keyword-only parameters do not count, which a drop-in may add.
        method: of a class.
        optional: a parameter that some versions have besides.
    """

    wanted: Callable[..., object] | tuple[str, ...]
    method: str = ""
    optional: str = ""

    def check(self, stock: Any) -> Obstacle | None:
        theirs = tuple(inspect.signature(getattr(stock, self.method) if self.method else stock).parameters)
        ours = self.wanted
        if not isinstance(ours, tuple):
            found = inspect.signature(ours).parameters.values()
            ours = tuple(parameter.name for parameter in found if parameter.kind is not parameter.KEYWORD_ONLY)
        if tuple(name for name in theirs if name != self.optional) == ours:
            return None
        name = ".".join(filter(None, (describe(stock), self.method)))
        return Obstacle(f"{name} takes ({', '.join(theirs)}), not ({', '.join(ours)}).")

    def __str__(self) -> str:
        return f"parameters of {self.method}" if self.method else "parameters"


@dataclass(frozen=True)
class Behaves:
    """Stock gives what ours gives in a small case. A fork, or another version, may compute something else under the same names.

    Args:
        what: stock's part that is tried, for the sentence.
        case: from stock to what it gives and what ours gives: tensors, arrays and other values, in any nesting. It runs on the
            CPU, and draws no random numbers: a training's own stay what they were.
        tolerance: relative and absolute; 0 wants the same bits and types.
        reference: the version that ours follows.
    """

    what: str
    case: Callable[[Any], tuple[Any, Any]]
    tolerance: float
    reference: str

    def check(self, stock: object) -> Obstacle | None:
        try:
            with plainly_on_the_cpu():
                theirs, ours = self.case(stock)
                found = difference(theirs, ours, self.tolerance)
        except Exception as error:  # whatever its code does
            return Obstacle(f"{self.what} cannot be compared with ours: {type(error).__name__}: {error}")
        if found is None:
            return None
        return Obstacle(f"{self.what} of a small case gives {found[0]}, and not {found[1]} as in {self.reference}.")

    def __str__(self) -> str:
        return f"a small case within {self.tolerance:g}" if self.tolerance else "a small case in the same bits"


def difference(theirs: object, ours: object, tolerance: float) -> tuple[str, str] | None:
    """The first two parts that differ, in words; None where there are none."""
    (found, shape), (wanted, form) = tree_flatten(theirs), tree_flatten(ours)
    if shape != form:
        return f"{len(found)} values", f"{len(wanted)}"
    for a, b in zip(found, wanted):
        if not hasattr(b, "shape") or not hasattr(a, "shape"):
            if type(a) is not type(b) or a != b:
                return repr(a), repr(b)
            continue
        x, y = torch.as_tensor(a), torch.as_tensor(b)
        if x.shape != y.shape:
            return f"{x.numel()} numbers", f"{y.numel()}"
        if not tolerance and x.dtype != y.dtype:
            return str(x.dtype), str(y.dtype)
        far = ~torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        if far.any():
            return f"{float(x[far][0]):g}", f"{float(y[far][0]):g}"
    return None


def agree(theirs: Callable[..., object], ours: Callable[..., object], attributes: dict[str, object], x: Any) -> bool:
    """Whether two methods of (self, x) give the same tensors, in every bit, for a ``self`` with these attributes alone.

    False where one of them raises: their method reads something else.
    """

    def run(method: Callable[..., Any]) -> Any:
        return method(SimpleNamespace(**attributes), [t.clone() for t in x] if isinstance(x, list) else x.clone())

    try:
        with plainly_on_the_cpu():
            return difference(run(theirs), run(ours), 0.0) is None
    except Exception:  # whatever their code does
        return False


def stand_ins(*names: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A function for each of these names. No two of them commute, so another order gives other numbers."""

    def stand_in(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t * t + number

    return {name: stand_in(number) for number, name in enumerate(names)}


def pictures(channels: int = 1) -> torch.Tensor:
    """(1, channels, 2, 3) different numbers, which are not random."""
    return torch.arange(channels * 6, dtype=torch.float64, device="cpu").view(1, channels, 2, 3) / 8


@dataclass(frozen=True)
class Formula:
    """A method of (self, x) computes what a method of ours computes, and its code reads these names and no others.

    The same names do not suffice: a fork may put the activation before the norm, or change the order of a concatenation.

    Args:
        text: the formula, for the sentence.
        method: a method of ours that computes it.
        modules: attributes that the method calls.
        others: the other names that their code may read.
        options: further attributes, for each trial.
    """

    text: str
    method: Callable[[Any, Any], Any]
    modules: tuple[str, ...]
    others: tuple[str, ...] = ()
    options: tuple[dict[str, Any], ...] = ({},)

    def is_that_of(self, forward: Any) -> bool:
        code = getattr(forward, "__code__", None)
        if code is None or code.co_argcount != 2 or code.co_freevars:
            return False
        if names_in(code) != {*self.modules, *self.others}:
            return False
        parts = stand_ins(*self.modules)
        return all(agree(forward, self.method, {**parts, **options}, pictures()) for options in self.options)

    def check(self, stock: object) -> Obstacle | None:
        return None if self.is_that_of(stock) else Obstacle(f"{describe(stock)} is not {self.text}.")

    def __str__(self) -> str:
        return f"it computes {self.text}"


@dataclass(frozen=True)
class SameCode:
    """Stock's source is known: for code that ours stands for and that no small case can try.

    Args:
        known: for each name of stock's module the fingerprints of the code that was read. "" is stock itself.
        reference: the versions that they are of.
    """

    known: Mapping[str, Collection[str]]
    reference: str

    def check(self, stock: Any) -> Obstacle | None:
        for name, fingerprints in self.known.items():
            function = defined_in(stock.__module__, name) if name else stock
            if fingerprint(function) not in fingerprints:
                return Obstacle(f"{name or describe(stock)} is not that of {self.reference}.")
        return None

    def __str__(self) -> str:
        return f"the code of {self.reference}"


def installed_version(package: str) -> str:
    """The version of an imported or importable package, which is imported only where there is no other way."""
    module = sys.modules.get(package)
    if module is not None and isinstance(version := vars(module).get("__version__"), str):
        return version
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(importlib.import_module(package).__version__)


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (8, 4, 120) of "8.4.120.dev1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


@dataclass(frozen=True)
class Version:
    """The installed ``package`` is not older than ``oldest``, the first one whose results ours has."""

    package: str
    oldest: str

    def check(self, stock: object = None) -> Obstacle | None:
        version = installed_version(self.package)
        if release(version) >= release(self.oldest):
            return None
        return Obstacle(f"{self.package} {version} is older than {self.oldest}, the oldest version that it supports.")

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} or later"
