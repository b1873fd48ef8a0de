"""Ultralytics as a host of switches: its version, its modules, and the processes that its trainer starts."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch_fastdet.hosts.engine.host import Host
from torch_fastdet.ultralytics.switches import SWITCHES

PACKAGE = "ultralytics"


class Ultralytics(Host):
    def switch_on(self, names: Iterable[str], by_name: Collection[str], import_now: bool = True) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ImportError("torch_fastdet.ultralytics.patch() found no ultralytics; type: pip install ultralytics")
        super().switch_on(names, by_name, import_now)
        if self.on:
            self._patch_distributed()

    def import_modules(self, names: Iterable[str]) -> None:
        for name in names:
            full = f"{PACKAGE}.{name}"
            try:
                importlib.import_module(full)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{full}.".startswith(f"{error.name}."):
                    raise  # a module that it needs

    def _patch_distributed(self) -> None:
        """A training on several GPUs starts processes of its own, from a script that Ultralytics writes: patch there too."""
        dist = importlib.import_module(f"{PACKAGE}.utils.dist")
        if any(replacement.owner is dist for replacement in self.patches.replacements):
            return
        stock: Callable[..., str] = dist.generate_ddp_file

        def generate_ddp_file(trainer: Any) -> str:
            path = stock(trainer)
            with open(path, encoding="utf-8") as file:
                script = file.read()
            calls = "".join(f"    patch(**{request!r})\n" for request in self.requests)
            with open(path, "w", encoding="utf-8") as file:
                file.write(
                    'if __name__ == "__main__":\n'
                    "    import sys\n\n"
                    f"    sys.path = {sys.path!r}\n"
                    f"    from torch_fastdet.ultralytics import patch\n\n{calls}{script}"
                )
            return path

        generate_ddp_file.__qualname__ = "generate_ddp_file"
        self.patches.replace("several GPUs", dist, "generate_ddp_file", generate_ddp_file)


HOST = Ultralytics(SWITCHES, (PACKAGE,))
