"""Implements ``python -m torch_fastdet.yolov5 train.py ... --bbox_iou_optim``: runs an unmodified YOLOv5 script with switches on.

It runs in this process as ``python train.py`` would run it, without our flags among its arguments.
"""

from __future__ import annotations

import builtins
import io
import itertools
import logging
import runpy
import sys
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from torch_fastdet._deferred import raised_at_the_end
from torch_fastdet._say import say
from torch_fastdet.patching import doctor as examination
from torch_fastdet.patching.command_line import Launcher
from torch_fastdet.patching.switch import SwitchError
from torch_fastdet.switches.registry import YOLOV5 as SWITCHES
from torch_fastdet.yolov5 import host
from torch_fastdet.yolov5.host import HOST

PROG = "python -m torch_fastdet.yolov5"
LAUNCHER = Launcher(
    HOST,
    PROG,
    f"{PROG} [switches] train.py [its arguments] | {PROG} [switches] -m yolov5.train [its arguments] | {PROG} doctor [--json] [the same]",
    "Run a YOLOv5 script with torch_fastdet.",
)
HELP = "-h", "--help"


@dataclass
class Command:
    script: str | None = None
    module: str | None = None
    arguments: list[str] = field(default_factory=list)
    switches: dict[str, bool] = field(default_factory=dict)
    help: bool = False


def parse(argv: list[str]) -> Command:
    """Split a command line into torch_fastdet's words (switches anywhere before ``--``) and the script's (all the rest, in its order)."""
    switches, rest = LAUNCHER.split(argv)
    command, words = Command(switches=switches), iter(rest)
    for word in words:
        if word in HELP:
            command.arguments.append(word)
        elif word.startswith("-m"):
            command.module = word[2:] or next(words, None)  # as Python's own -m: -m name, or -mname
            if command.module is None:
                LAUNCHER.fail("-m needs the name of a module, such as yolov5.train.")
            break
        elif word.startswith("-"):
            LAUNCHER.fail(f"{word} came before the script, and is not one of {', '.join(HOST.flags())}.")
        else:
            command.script = word
            break
    command.arguments += words
    command.help = any(word in HELP for word in itertools.takewhile(lambda word: word != "--", command.arguments))
    return command


def doctor(argv: list[str]) -> int:
    """Run ``doctor [--json] [train.py and its arguments, or -m yolov5.train ...]``."""
    as_json = "--json" in argv
    command = parse([argument for argument in argv if argument != "--json"])
    if command.script is not None:
        _check_script(command.script)
        HOST.script = Path(command.script)
        # segment/train.py adds the second.
        sys.path[:0] = [str(folder) for folder in list(HOST.script.resolve().parents)[:2]]
    words, options = command.arguments, {}
    for name, value in zip(words, [*words[1:], ""]):
        option, equals, given = name.partition("=")
        if option.startswith("--"):
            options[option[2:]] = given if equals else value
    asked = [name for name, on in command.switches.items() if on]
    return examination.run(HOST, "yolov5", host.version(), asked, options, as_json)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:
        raise SystemExit(doctor(argv[1:]))
    command = parse(argv)
    if command.help:
        LAUNCHER.print_help()
    if command.script is None and command.module is None:
        if command.help:
            return
        LAUNCHER.fail("name the script to run, such as train.py, or -m yolov5.train.")
    # Set the path first: a module is found in the current folder, and a script's imports are beside the script.
    if command.script is not None:
        _check_script(command.script)
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(command.script).resolve().parent)
    if not command.help:
        HOST.script = None if command.script is None else Path(command.script)
        LAUNCHER.switch_on(command.switches, import_now=False)
    code, names = _load_script(command.script) if command.script is not None else _load_module(str(command.module))
    sys.argv = [command.script or str(names["__file__"]), *command.arguments]
    try:
        # Only rank 0 of train.py validates after the last step, and so notices an error in that step.
        with raised_at_the_end():
            _run_as_main(code, names)
    except SystemExit as end:
        if end.code is None or (isinstance(end.code, int) and end.code == 0):
            _tell_unused(command)
        raise
    except SwitchError as error:  # of a switch that found out only in the script, such as for --optimizer RMSProp
        LAUNCHER.refuse(error)
    _tell_unused(command)


def _tell_unused(command: Command) -> None:
    """Say after a script that went well what ran on torch_fastdet, and which switches asked for by name replaced nothing."""
    if command.help:  # nothing was switched on
        return
    HOST.report()
    # A replaced name of torch (clip_grad_norm_) does not show that a switch for YOLOv5 found YOLOv5.
    used = {
        replacement.switch
        for replacement in HOST.patches.replacements
        if not (SWITCHES[replacement.switch].needs_host and HOST.patches.is_outside(replacement))
    }
    lost = not host.is_loaded()
    unused = [name for name in HOST.on if name not in used and (lost or command.switches.get(name))]
    if not unused:
        return
    is_error = lost and any(command.switches.get(name) for name in unused)
    reason = "no YOLOv5, neither a checkout's modules nor the package's" if lost else "nothing that is replaced"
    line = f"{', '.join(unused)} replaced nothing of YOLOv5: {command.script or command.module} imported {reason}"
    say(f"error: {line}" if is_error else line, logging.ERROR if is_error else logging.WARNING)
    if is_error:
        raise SystemExit(2) from None


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        LAUNCHER.fail(f"there is no script {script} in {Path.cwd()}.")


def _load_script(script: str) -> tuple[CodeType, dict[str, object]]:
    path = str(Path(script).absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return code, {"__file__": path, "__loader__": SourceFileLoader("__main__", path), "__cached__": None}


class _NoModule(Exception):
    pass


def _load_module(name: str) -> tuple[CodeType, dict[str, object]]:
    try:  # as Python's own -m, and pdb's
        _, spec, code = vars(runpy)["_get_module_details"](name, _NoModule)
    except _NoModule:
        LAUNCHER.fail(f"there is no module {name} to run.")
    return code, {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
        "__cached__": spec.cached,
    }


def _run_as_main(code: CodeType, names: dict[str, object]) -> None:
    # The module stays __main__ until the process ends: worker processes, pickles and exit handlers look there.
    sys.modules["__main__"] = module = ModuleType("__main__")
    vars(module).update(names, __builtins__=builtins)
    exec(code, vars(module))
