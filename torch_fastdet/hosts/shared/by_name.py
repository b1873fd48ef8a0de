"""Pickles of the hosts' classes that load without torch_fastdet."""

from __future__ import annotations

import importlib
from typing import Any


class ByName:
    """Pickles as a module of that name, or as what it holds under ``attribute``, whatever that is when it is loaded."""

    def __init__(self, module: str, attribute: str | None = None) -> None:
        self.module, self.attribute = module, attribute

    def __reduce__(self) -> Any:
        if self.attribute is None:
            return importlib.import_module, (self.module,)
        return getattr, (ByName(self.module), self.attribute)
