"""Describes Ultralytics as a host of switches: its version, its modules, and the processes that its trainer starts."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_fastdet._say import counts, warn
from torch_fastdet._torch.tensors import unwrap
from torch_fastdet.patching.engine import ALL, Host, one_thread
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.import_hook import is_run, namespace
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import around
from torch_fastdet.switches.frameworks import VERSION
from torch_fastdet.switches.registry import ULTRALYTICS as SWITCHES
from torch_fastdet.ultralytics import trials

PACKAGE = "ultralytics"
#: Only ``YOLO.tune`` imports it.
TUNER = f"{PACKAGE}.engine.tuner"


def _is_installed() -> bool:
    return PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None


@around
def _reported(host: Host, stock: Function, *args: object, **kwargs: object) -> object:
    counts.clear()  # those of predictions or of an interrupted training
    result = stock(*args, **kwargs)
    host.report(_name_of(getattr(args[0], "model", None)))
    return result


def _name_of(model: Any) -> str:
    """Return a name by which ``benchmark`` makes the detector that a trainer or ``YOLO()`` holds; "" where it cannot."""
    described = getattr(unwrap(model), "yaml", None)
    name = Path(str(described.get("yaml_file"))).stem if isinstance(described, dict) else ""
    return name if re.fullmatch(r"yolov?\d+[a-z]|rtdetr-[lx]", name) else ""


class Ultralytics(Host):
    door = "torch_fastdet.ultralytics"

    def patch(self, switches: Mapping[str, bool], import_now: bool = True) -> tuple[str, ...]:
        if not _is_installed():
            raise ImportError("torch_fastdet.ultralytics.patch() found no ultralytics; type: pip install ultralytics")
        with one_thread:
            super().patch(switches, import_now)
            if self.on:
                self._patch_distributed()
                self._report_at_the_end()
                self._patch_programs()
            return self.patches.lines()

    def obstacle_to_host(self) -> Obstacle | None:
        if not _is_installed():
            return Obstacle("ultralytics is not installed (pip install ultralytics).")
        return VERSION.obstacle(None)

    def prefix(self) -> str:
        return f"{PACKAGE}."

    def _report_at_the_end(self) -> None:
        """Report a training and a validation; what predictions did is said when the process ends, for there may be many calls."""
        atexit.unregister(self.report)
        atexit.register(self.report)
        for module, owner, name in (("engine.trainer", "BaseTrainer", "train"), ("engine.model", "Model", "val")):
            kind = vars(importlib.import_module(f"{PACKAGE}.{module}"))[owner]
            stock = vars(kind).get(name)
            known = any(r.owner is kind and r.attribute == name for r in self.patches.replacements)
            if stock is not None and not known:
                self.patches.replace("report", kind, name, _reported(self, stock), quietly=True)

    def _patch_distributed(self) -> None:
        """Patch in the processes of a training on several GPUs, too: they run a script that Ultralytics writes."""
        dist = importlib.import_module(f"{PACKAGE}.utils.dist")
        if any(replacement.owner is dist for replacement in self.patches.replacements):
            return
        stock: Callable[..., str] = dist.generate_ddp_file

        def generate_ddp_file(trainer: object) -> str:
            path = stock(trainer)
            with open(path, encoding="utf-8") as file:
                script = file.read()
            calls = "".join(f"    patch(**{request!r})\n" for request in self.patches.requests)
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

    def _patch_programs(self) -> None:
        """Start the ``yolo`` programs of ``YOLO.tune`` and of a training on several data sets with the same switches."""
        trainer = importlib.import_module(f"{PACKAGE}.engine.trainer")
        if "_YOLO_CLI_COMMAND" not in vars(trainer):
            warn("YOLO.tune() of this version starts programs in which no switch is on")
            return
        flags = {name: on for request in self.patches.requests for name, on in (request or {ALL: True}).items()}
        words = [f"--{name}" if on else f"--no-{name}" for name, on in flags.items() if on or name != ALL]
        programs = trainer.subprocess
        if not isinstance(programs, trials.Subprocess):
            programs = trials.Subprocess()
            self.patches.replace("programs", trainer, "subprocess", programs, quietly=True)
        programs.command = [sys.executable, "-m", self.door, *words]
        self.patches.replace("programs", trainer, "_YOLO_CLI_COMMAND", programs.command, quietly=True)
        if is_run(TUNER):
            self._patch_tuner(sys.modules[TUNER], programs)

    def _visit(self, module: ModuleType) -> None:
        super()._visit(module)
        if namespace(module).get("__name__") == TUNER:
            programs = getattr(sys.modules.get(f"{PACKAGE}.engine.trainer"), "subprocess", None)
            if isinstance(programs, trials.Subprocess):
                self._patch_tuner(module, programs)

    def _patch_tuner(self, tuner: Any, programs: trials.Subprocess) -> None:
        if not hasattr(tuner, "plot_tune_results"):
            warn("YOLO.tune() of this version draws its plots between two trials")
        elif not isinstance(tuner.plot_tune_results, trials.Plots):
            programs.plots = trials.Plots(tuner.plot_tune_results)
            self.patches.replace("programs", tuner, "plot_tune_results", programs.plots, quietly=True)
            ahead = trials.with_programs_ahead(programs, tuner.Tuner.__call__)
            self.patches.replace("programs", tuner.Tuner, "__call__", ahead, quietly=True)


HOST = Ultralytics(SWITCHES, (PACKAGE,))
