"""What graphs, resume and the hosts ask of modules, and what stands in for their methods for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn


def is_channels_last(parameter: Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


@contextlib.contextmanager
def methods_of_modules(methods: Collection[tuple[nn.Module, str, Callable[..., object]]]) -> Iterator[None]:
    """While inside, each module has a method of its own in place of its class's. None of them has one before."""
    try:
        for module, name, method in methods:
            module.__dict__[name] = method
        yield
    finally:
        for module, name, _ in methods:
            module.__dict__.pop(name, None)
