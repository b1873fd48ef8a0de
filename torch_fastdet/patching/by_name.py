"""Writes pickles of the frameworks' classes that load without torch_fastdet."""

from __future__ import annotations

import copy
import copyreg
import importlib

from typing_extensions import Self

from torch_fastdet.patching.protocols import Names


class ByName:
    """Pickle as a module of that name, or as what it holds under ``attribute``, whatever that is when it is loaded."""

    def __init__(self, module: str, attribute: str | None = None) -> None:
        self.module, self.attribute = module, attribute

    def __reduce__(self) -> tuple[object, ...]:
        if self.attribute is None:
            return importlib.import_module, (self.module,)
        return getattr, (ByName(self.module), self.attribute)

    def __call__(self, *args: object) -> object:
        """Call it: pickles hold calls of what can be called."""
        return getattr(importlib.import_module(self.module), str(self.attribute))(*args)


def filed_as(stock: type, state: Names) -> tuple[object, ...]:
    """Return what ``__reduce_ex__`` has to return for an object that loads as one of the framework's class."""
    return copyreg._reconstructor, (ByName(stock.__module__, stock.__name__), object, None), state  # type: ignore[attr-defined]


class CopiedAsItIs:
    """Give copies and deep copies the class of the object, whatever class its files name."""

    def __getstate__(self) -> Names:
        return vars(self)

    def __copy__(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(self.__getstate__())
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied
