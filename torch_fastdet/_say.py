"""Prints the lines of the package: records of ``torch_fastdet.logger``, which launchers and ``patch()`` show on stderr.

The variable ``TORCH_FASTDET_LOG`` chooses which: ``debug`` (each replaced name, too), ``info`` (the default), ``warning`` (only what does
not apply or falls back), ``error``, or ``quiet``. A user who configures logging gets the records instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("torch_fastdet")


class _Lines(logging.Handler):
    """Write ``torch_fastdet: <message>`` to whatever ``sys.stderr`` is now."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not is_configured():
            # A closed terminal or file must not end a training.
            with contextlib.suppress(OSError, ValueError):
                print(f"torch_fastdet: {record.getMessage()}", file=sys.stderr, flush=True)


#: Counts what each switch did since ``patch()``, by the switch's name and a description.
counts: Counter[tuple[str, str]] = Counter()
#: Holds, in order, the lines since ``patch()`` that say what did not run on torch_fastdet, and why.
fallbacks: dict[str, None] = {}


def note_fallback(line: str) -> None:
    """Remember for the report at the end of a run that something does not run on torch_fastdet."""
    fallbacks[line] = None


_paused = threading.local()


@contextlib.contextmanager
def without_counts() -> Iterator[None]:
    """Count nothing in this thread while inside: trials are not the run's work."""
    before, _paused.on = getattr(_paused, "on", False), True
    try:
        yield
    finally:
        _paused.on = before


def count(switch: str, what: str, times: int = 1) -> None:
    """Note that ``switch`` did ``what``, in the plural, so often, for the report at the end of a run."""
    if times and not getattr(_paused, "on", False):
        counts[switch, what] += times


def counting(switch: str, what: str, size: Callable[[Any], int] = lambda result: 1) -> Callable[[F], F]:
    """Return a decorator for what takes the place of a function: it notes ``size`` of each result."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            count(switch, what, size(result))
            return result

        return cast(F, call)

    return decorate


def counted(number: int, what: str) -> str:
    """Return ``number`` and a noun that is given in the plural: "2 batches", "1 batch"."""
    if number == 1:
        what = re.sub(r"\b(\w+(?:ss|ch)(?=es\b)|\w+(?=s\b))e?s\b", r"\1", what, count=1)
    return f"{number:,} {what}"


_lines = _Lines()
_showing: set[object] = set()
_level = logging.NOTSET  # the logger's own level, before show()
LEVEL = "TORCH_FASTDET_LOG"
LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
LEVELS["quiet"] = logging.CRITICAL


def _chosen_level() -> int:
    wanted = os.environ.get(LEVEL, "").lower() or "info"
    if wanted not in LEVELS:
        raise ValueError(f"{LEVEL} is {wanted!r}, but one of {', '.join(LEVELS)} is expected")
    return int(LEVELS[wanted])


def is_configured() -> bool:
    """Return whether the user has configured logging: the root logger or torch_fastdet's has a handler that is not from here."""
    return bool(logging.getLogger().handlers) or any(handler is not _lines for handler in logger.handlers)


def show(owner: object) -> None:
    """Show lines on stderr until ``hide(owner)``, unless the user configures logging, before or later."""
    global _level
    level = _chosen_level()
    if not _showing and not is_configured():
        _level = logger.level
        logger.addHandler(_lines)
        if logger.level == logging.NOTSET:
            logger.setLevel(level)
    _showing.add(owner)


def hide(owner: object) -> None:
    """Leave logging as :func:`show` found it, and forget what was counted, where no other owner needs it."""
    _showing.discard(owner)
    if not _showing:
        counts.clear()
        fallbacks.clear()
        _remove()


def _remove() -> None:
    if _lines in logger.handlers:
        logger.removeHandler(_lines)
        logger.setLevel(_level)


def rank() -> str:
    """Return this process's rank in a distributed run, as torchrun tells it; "" without one."""
    value = os.environ.get("RANK", "-1")
    return "" if value == "-1" else value


def say(line: str, level: int = logging.INFO, every_rank: bool = False) -> None:
    """Log one line; in a distributed run on rank 0 alone, unless ``every_rank``."""
    if every_rank or rank() in ("", "0"):
        # Names of files that are not UTF-8 contain characters that a handler cannot write.
        line = line.encode(errors="backslashreplace").decode()
        if is_configured():
            _remove()  # before the record goes on to the user's handlers, whose level decides
        logger.log(level, line)


def warn(line: str, every_rank: bool = False) -> None:
    """Say, by :func:`say`, and once a run, that something does not apply or falls back; the report at its end counts it."""
    if every_rank or rank() in ("", "0"):
        if line in fallbacks:
            return
        note_fallback(line)
    say(line, logging.WARNING, every_rank)


def saying_once(switch: str, how: Callable[[str], None] = say) -> Callable[[str], None]:
    """Return a function that says each line of a switch the first time that it gets it."""
    return functools.cache(lambda line: how(f"{switch}: {line}"))
