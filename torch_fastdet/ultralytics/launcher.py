"""Implements ``python -m torch_fastdet.ultralytics train model=yolo11s.yaml --fastdet``: ``yolo`` with switches on."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from torch_fastdet.patching import doctor as examination
from torch_fastdet.patching.command_line import Launcher
from torch_fastdet.patching.evidence import installed_version
from torch_fastdet.patching.switch import SwitchError
from torch_fastdet.ultralytics.host import HOST

PROG = "python -m torch_fastdet.ultralytics"
LAUNCHER = Launcher(
    HOST,
    PROG,
    f"{PROG} [switches and the words of the yolo command] | {PROG} doctor [--json] [the same]",
    "Run the yolo command with torch_fastdet.",
)


# No switch replaces the losses, loaders and validators of these tasks.
STOCKS = (
    "Of the tasks, semantic segmentation, depth and classification run on Ultralytics' own losses, loaders and validation.",
)


def doctor(argv: list[str]) -> int:
    """Run ``doctor [--json] [the words of a yolo command]``."""
    chosen, words = LAUNCHER.split(argv)
    found = importlib.util.find_spec("ultralytics") is not None
    options = dict(word.split("=", 1) for word in words if "=" in word)
    version = installed_version("ultralytics") if found else None
    asked = [name for name, on in chosen.items() if on]
    return examination.run(HOST, "ultralytics", version, asked, options, "--json" in words, STOCKS)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:
        raise SystemExit(doctor(argv[1:]))
    chosen, words = LAUNCHER.split(argv)
    wants_help = not words or bool({"-h", "--help", "help"} & set(words))
    if wants_help:
        LAUNCHER.print_help()
        words = ["help"]
    if importlib.util.find_spec("ultralytics") is None:
        LAUNCHER.fail("found no ultralytics; type: pip install ultralytics")
    # Ultralytics stores this very list on import, and looks for its command's name there.
    sys.argv[:] = ["yolo", *words]
    if not wants_help:
        LAUNCHER.switch_on(chosen, import_now=True)
    run()


def run() -> None:
    """Run the ``yolo`` command whose words are in ``sys.argv``."""
    try:
        importlib.import_module("ultralytics.cfg").entrypoint()
    except SwitchError as error:  # of a switch that found out only in the training
        LAUNCHER.refuse(error)
