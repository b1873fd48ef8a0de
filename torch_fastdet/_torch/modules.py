"""What graphs, resume and the hosts ask of modules, and what stands in for attributes for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import Tensor

_MISSING = object()


def is_channels_last(parameter: Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


@contextlib.contextmanager
def own_attributes(values: Collection[tuple[object, str, object]]) -> Iterator[None]:
    """While inside, each object has an attribute of its own with this name and value, such as a method in place of its class's."""
    before = [(vars(owner), name, vars(owner).get(name, _MISSING)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            vars(owner)[name] = value
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            if value is not _MISSING:
                own[name] = value
