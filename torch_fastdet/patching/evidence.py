"""Tells whether a framework's code is known, when a function or class is replaced, and never at a call.

For a version that gives another answer, add another signature, hash or case to its row.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Protocol

import torch

from torch_fastdet._say import without_counts
from torch_fastdet._torch.private import tree_flatten, without_dispatch_modes
from torch_fastdet.patching.protocols import Function, Names, Stock
from torch_fastdet.patching.replace import describe, original


class Obstacle(str):
    """Say in one sentence why something cannot apply."""


class Follows(Obstacle):
    """Stand for a target that stays because another one does, which has its line already."""


class Evidence(Protocol):
    def obstacle(self, stock: object, /) -> Obstacle | None:
        """Return why ``stock``, a function or class of the framework, is not the known one; None if it is."""

    def __str__(self) -> str:
        """Return a few words for doctor's table."""


def obstacle_among(evidence: Collection[Evidence], stock: object = None) -> Obstacle | None:
    return next((found for each in evidence if (found := each.obstacle(stock)) is not None), None)


@contextlib.contextmanager
def plainly_on_the_cpu() -> Iterator[None]:
    """Suspend the caller's default device, dtype, autocast, inference mode and dispatch modes."""
    # The default dtype belongs to the process, not to a thread, so leave it alone if it is the usual one. If it is not, tensors that
    # another thread makes meanwhile without a dtype are float32, which the frameworks expect.
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with (
            without_dispatch_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            contextlib.nullcontext() if torch.empty(0).is_cpu else torch.device("cpu"),  # which looks at each call
            torch.autocast("cpu", enabled=False),
            without_counts(),
        ):
            yield
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class Asks:
    """Ask a question of its own ``about`` something, by a function of the original."""

    about: str
    obstacle: Callable[[Stock], Obstacle | None]

    def __str__(self) -> str:
        return self.about


_NO_OPENCV = Obstacle("OpenCV (cv2) is not installed.")
OPENCV = Asks("OpenCV", lambda _: None if importlib.util.find_spec("cv2") else _NO_OPENCV)


@dataclass(frozen=True)
class Signature:
    """Ask whether the original, or its ``method``, takes these parameters: names, or those of a drop-in that are not keyword-only."""

    wanted: Function | tuple[str, ...]
    method: str = ""

    def obstacle(self, stock: Stock) -> Obstacle | None:
        found = tuple(inspect.signature(getattr(stock, self.method) if self.method else stock).parameters)
        wanted = self.wanted
        if not isinstance(wanted, tuple):
            parameters = inspect.signature(wanted).parameters.values()
            wanted = tuple(each.name for each in parameters if each.kind is not each.KEYWORD_ONLY)
        if found == wanted:
            return None
        name = ".".join(filter(None, (describe(stock), self.method)))
        return Obstacle(f"{name} takes ({', '.join(found)}), not ({', '.join(wanted)}).")

    def __str__(self) -> str:
        return f"parameters of {self.method}" if self.method else "parameters"


@dataclass(frozen=True)
class Behaves:
    """Ask whether the original gives what the drop-in gives in a small case: a fork may compute something else under the same names.

    Args:
        what: the part of the original that is tried, for the sentence.
        case: returns what the original and the drop-in give, in any nesting. It runs on the CPU and draws no random numbers.
        tolerance: relative and absolute. 0 asks for the same bits and types.
        reference: the version that the drop-in follows.
    """

    what: str
    case: Callable[[Stock], tuple[object, object]]
    tolerance: float
    reference: str

    def obstacle(self, stock: object) -> Obstacle | None:
        try:
            with plainly_on_the_cpu():
                found = difference(*self.case(stock), self.tolerance)
        except Exception as error:  # the code is somebody else's
            return Obstacle(f"{self.what} cannot be compared with torch_fastdet's: {type(error).__name__}: {error}")
        if found is None:
            return None
        return Obstacle(f"{self.what} of a small case gives {found[0]}, and not {found[1]} as in {self.reference}.")

    def __str__(self) -> str:
        return f"a small case within {self.tolerance:g}" if self.tolerance else "a small case in the same bits"


def difference(found: object, wanted: object, tolerance: float) -> tuple[str, str] | None:
    """Return the first two parts that differ, in words; None if there are none."""
    (parts, form), (others, other_form) = tree_flatten(found), tree_flatten(wanted)
    if form != other_form:
        return f"{len(parts)} values", f"{len(others)}"
    for a, b in zip(parts, others):
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


def agree(
    method: Function, other: Function, attributes: dict[str, object], x: torch.Tensor | list[torch.Tensor]
) -> bool:
    """Return whether two methods of (self, x) give the same bits for a ``self`` with these attributes alone; False if either raises."""

    def run(method: Function) -> object:
        return method(SimpleNamespace(**attributes), [t.clone() for t in x] if isinstance(x, list) else x.clone())

    return Behaves("", lambda each: (run(each), run(other)), 0, "").obstacle(method) is None


def stand_ins(*names: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a function for each name. No two of them commute, so another order gives other numbers."""

    def stand_in(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: t * t + number

    return {name: stand_in(number) for number, name in enumerate(names)}


def make_images(channels: int = 1) -> torch.Tensor:
    """Return (1, channels, 2, 3) different numbers, which are not random."""
    return torch.arange(6 * channels, dtype=torch.float64, device="cpu").view(1, channels, 2, 3) / 8


@dataclass(frozen=True)
class Formula:
    """Ask whether a method of (self, x) computes what ``method`` computes, and its code reads the same names.

    The names alone do not suffice: a fork may put the activation before the norm. ``options`` are attributes in each trial.
    """

    text: str
    method: Stock
    options: tuple[Names, ...] = ({},)

    def is_that_of(self, forward: Stock) -> bool:
        code = getattr(forward, "__code__", None)
        if code is None or code.co_argcount != 2 or code.co_freevars:
            return False
        names = names_in(self.method.__code__)
        if names_in(code) != names:
            return False
        parts = stand_ins(*sorted(names))
        return all(agree(forward, self.method, {**parts, **options}, make_images()) for options in self.options)

    def obstacle(self, stock: object) -> Obstacle | None:
        return None if self.is_that_of(stock) else Obstacle(f"{describe(stock)} is not {self.text}.")

    def __str__(self) -> str:
        return f"it computes {self.text}"


def fingerprint(function: Function) -> str:
    """Return eight hexadecimal digits of what a function does, whatever its layout, comments and annotations; "" without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256("\n".join(_words(tree)).encode()).hexdigest()[:8]


def names_in(code: CodeType) -> set[str]:
    """Return the names that a function's code looks up, functions and comprehensions inside it included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _words(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "type_ignores", "type_comment", "kind", "ctx"):
            continue
        if name == "body" and isinstance(value, list) and value and isinstance(value[0], ast.Expr):
            docstring = isinstance(value[0].value, ast.Constant) and isinstance(value[0].value.value, str)
            value = value[docstring:]
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _words(part)
            elif part is not None:
                yield f"{name}={part!r}"


@dataclass(frozen=True)
class SameCode:
    """Ask whether the original's source was read, for code that no small case can try.

    ``known`` maps names of its module ("": the original itself) to the fingerprints of the versions ``reference``.
    """

    known: Mapping[str, Collection[str]]
    reference: str

    def obstacle(self, stock: Stock) -> Obstacle | None:
        for name, fingerprints in self.known.items():
            function = original(sys.modules[stock.__module__], name) if name else stock
            if fingerprint(function) not in fingerprints:
                return Obstacle(f"{name or describe(stock)} is not that of {self.reference}.")
        return None

    def __str__(self) -> str:
        return f"the code of {self.reference}"


def installed_version(package: str) -> str:
    """Return the version of a package. Import it only if there is no other way."""
    module = sys.modules.get(package)
    if module is not None and isinstance(version := vars(module).get("__version__"), str):
        return version
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(importlib.import_module(package).__version__)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (8, 4, 120) of "8.4.120.dev1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def at_least(package: str, oldest: str) -> Asks:
    """Ask whether the installed ``package`` is not older than ``oldest``, the first version whose results the drop-ins have."""

    def obstacle(_: object = None) -> Obstacle | None:
        if release(version := installed_version(package)) >= release(oldest):
            return None
        supported = f"{oldest}, the oldest version that is supported"
        return Obstacle(f"{package} {version} is older than {supported}; type: pip install -U {package}")

    return Asks(f"{package} {oldest} or later", obstacle)
