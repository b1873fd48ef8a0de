"""``python -m torch_fastdet.yolov5 train.py ... --bbox_iou_optim``: run an unmodified YOLOv5 script with switches on.

The script runs in this process as ``python train.py`` (or ``python -m yolov5.train``) would run it: as ``__main__``, with
the same ``__file__``, ``sys.argv`` and ``sys.path[0]``, and its exit code is ours. Only our flags are gone from its
arguments. Nothing of YOLOv5 is imported before the script imports it.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import io
import sys
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from torch_fastdet import yolov5
from torch_fastdet._say import say
from torch_fastdet.yolov5 import layout
from torch_fastdet.yolov5.registry import ALL, SWITCHES
from torch_fastdet.yolov5.switch import SwitchError

PROG = "python -m torch_fastdet.yolov5"
USAGE = f"{PROG} [switches] train.py [its arguments] | {PROG} [switches] -m yolov5.train [its arguments]"
FLAGS = {f"--{name}": name for name in (*SWITCHES, ALL)}


@dataclass
class Command:
    script: str | None = None
    module: str | None = None
    arguments: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    help: bool = False


def parse(argv: list[str]) -> Command:
    """Split a command line into ours (switches anywhere before ``--``) and the script's (all the rest, in its order)."""
    command = Command()
    rest = iter(argv)
    for argument in rest:
        started = command.script is not None or command.module is not None
        name, equals, _ = argument.partition("=")
        if argument == "--" and started:
            command.arguments += [argument, *rest]
        elif name in FLAGS:
            if equals:
                _fail(f"{name} takes no value; it came as {argument}. Leave {name} out to keep that switch off.")
            if FLAGS[name] not in command.switches:
                command.switches.append(FLAGS[name])
        elif started:
            command.help |= argument in ("-h", "--help")
            command.arguments.append(argument)
        elif argument in ("-h", "--help"):
            command.help = True
            command.arguments.append(argument)
        elif argument.startswith("-m"):
            command.module = argument[2:] or next(rest, None)  # as Python's own -m: -m name, or -mname
            if command.module is None:
                _fail("-m needs the name of a module, such as yolov5.train.")
        elif argument.startswith("-"):
            _fail(f"{argument} came before the script, and is not one of {', '.join(FLAGS)}.")
        else:
            command.script = argument
    return command


def main(argv: list[str] | None = None) -> None:
    command = parse(sys.argv[1:] if argv is None else argv)
    if command.help:
        parser = argparse.ArgumentParser(prog=PROG, usage=USAGE, description="Run a YOLOv5 script with torch_fastdet.")
        yolov5.add_arguments(parser)
        print(parser.format_help(), flush=True)
    if command.script is None and command.module is None:
        if command.help:
            return
        _fail("which script? For instance train.py, or -m yolov5.train.")
    # Before anything is loaded by name: a module is found in the current folder, a script's imports beside the script.
    if command.script is not None:
        _check_script(command.script)
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(command.script).resolve().parent)
    if not command.help:
        _patch(command)
    code, module = _load_script(command.script) if command.script is not None else _load_module(str(command.module))
    sys.argv = [str(command.script) if command.script is not None else str(module.__file__), *command.arguments]
    try:
        _run_as_main(code, module)
    except SystemExit as end:
        if end.code is None or (isinstance(end.code, int) and end.code == 0):
            _tell_unused(command)
        raise
    except SwitchError as error:  # of a switch that found out only in the script, such as for --optimizer Adam
        _refuse(error)
    _tell_unused(command)


def _fail(message: str) -> NoReturn:
    print(f"usage: {USAGE}\n{PROG}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _patch(command: Command) -> None:
    if not command.switches:
        say(f"no switch is given ({', '.join(FLAGS)}): the script runs as it is")
        return
    everything = ALL in command.switches
    names = [name for name in SWITCHES if everything or name in command.switches]
    try:
        yolov5._switch_on(
            names, command.switches, Path(command.script) if command.script is not None else None, import_now=False
        )
    except SwitchError as error:
        _refuse(error)


def _refuse(error: SwitchError) -> NoReturn:
    print(f"{PROG}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2) from None


def _tell_unused(command: Command) -> None:
    """After a script that went well: one line for each switch that replaced nothing.

    A YOLOv5 script need not use everything. But where no YOLOv5 was imported at all, what was asked for by name was not
    done, and that is an error.
    """
    if command.help:  # nothing was switched on
        return
    # What a switch for YOLOv5 replaced in torch (clip_grad_norm_) does not show that it met YOLOv5.
    used = {
        replacement.switch
        for replacement in yolov5._patches.replacements
        if not (SWITCHES[replacement.switch].needs_yolov5 and replacement.is_foreign)
    }
    unused = [name for name in yolov5._patches.switches if name not in used]
    lost = not layout.is_loaded()
    for name in unused:
        is_error = lost and name in command.switches
        reason = "no YOLOv5, neither a checkout's modules nor the package's" if lost else "nothing that it replaces"
        line = f"{name} replaced nothing of YOLOv5: {command.script or command.module} imported {reason}"
        say(f"error: {line}" if is_error else line, file=sys.stderr if is_error else sys.stdout)
    if lost and any(name in command.switches for name in unused):
        raise SystemExit(2) from None


def _check_script(script: str) -> None:
    if not Path(script).is_file():
        _fail(f"there is no script {script} in {Path.cwd()}.")


def _load_script(script: str) -> tuple[CodeType, ModuleType]:
    path = str(Path(script).absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__cached__"] = None
    return code, module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that it needs, and not the one that was asked for
        spec = None
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        _fail(f"there is no module {name} to run.")
    module = ModuleType("__main__")
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    module.__spec__ = spec
    vars(module)["__cached__"] = spec.cached
    return code, module


def _run_as_main(code: CodeType, module: ModuleType) -> None:
    # It stays __main__ to the end of the process: worker processes, pickles and exit handlers look there.
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    exec(code, vars(module))
