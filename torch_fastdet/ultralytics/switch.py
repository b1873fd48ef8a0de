"""A switch of Ultralytics: one that knows which versions it follows."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import ClassVar

from torch_fastdet.hosts.engine.switch import Switch

OLDEST = "8.4.120"


def installed_version() -> str:
    """The version of the imported or importable ultralytics, without importing it."""
    module = sys.modules.get("ultralytics")
    if module is not None and isinstance(version := vars(module).get("__version__"), str):
        return version
    try:
        return importlib.metadata.version("ultralytics")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(importlib.import_module("ultralytics").__version__)


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (8, 4, 120) of "8.4.120.dev1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


class UltralyticsSwitch(Switch):
    #: The first version whose results the drop-in has.
    oldest: ClassVar[str] = OLDEST

    def unsupported(self) -> str | None:
        version = installed_version()
        if release(version) < release(self.oldest):
            return f"ultralytics {version} is older than {self.oldest}, the oldest version that it supports."
        return None
