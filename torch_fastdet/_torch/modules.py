"""Asks modules what graphs, resume and the frameworks need to know, and replaces attributes for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import Tensor

_MISSING = object()


def is_channels_last(parameter: Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


@contextlib.contextmanager
def own_attributes(values: Collection[tuple[object, str, object]]) -> Iterator[None]:
    """Give each object an attribute of its own with this name and value, such as a method, while inside."""
    before = [(vars(owner), name, vars(owner).get(name, _MISSING)) for owner, name, _ in values]
    for owner, name, value in values:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            if value is not _MISSING:
                own[name] = value
