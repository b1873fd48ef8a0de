"""Write tests/api.txt (the public names with their parameters, the switches, and the operators' schemas) and the table of docs/operators.md.

``python -m tools.api`` writes both, and a test compares them with the package. A change shows in the diff, and needs a line in
CHANGELOG.md (``make release-check``).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torch_fastdet import ops  # registers the operators, too

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/api.txt"
PAGE = ROOT / "docs/operators.md"
TABLE = re.compile(r"(<!-- operators -->\n).*?(<!-- end operators -->)", re.DOTALL)
PACKAGE = ROOT / "torch_fastdet"
HOSTS = ("yolov5", "ultralytics")


def modules() -> list[str]:
    """Return the package and those of its modules that say what is public in them, by ``__all__``."""
    paths = [*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("[!_]*/__init__.py")]
    public = [path for path in paths if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE)]
    names = sorted(path.stem if path.parent == PACKAGE else path.parent.name for path in public)
    return ["torch_fastdet", *(f"torch_fastdet.{name}" for name in names)]


def parameters(function: Callable[..., Any]) -> str:
    """Return names and defaults. Types stand in the schemas and the docstrings: how Python writes them depends on its version."""
    found = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found]
    return re.sub(r"<.*? at 0x\w+>", "...", str(inspect.Signature(plain)))


def lines_of(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__ if base is not object)})".replace(
            "()", ""
        )
        ours = [vars(base) for base in reversed(value.__mro__) if base.__module__.startswith("torch_fastdet")]
        for key, member in sorted({key: member for each in ours for key, member in each.items()}.items()):
            raw = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if key.startswith("_") and key not in ("__init__", "__call__", "__new__"):
                continue
            if inspect.isfunction(raw):
                yield f"{name}.{key}{parameters(raw)}"
            elif isinstance(raw, property):
                yield f"{name}.{key}"
    elif callable(value):
        yield f"{name}{parameters(value)}"
    else:
        yield name


def schemas() -> list[str]:
    return sorted(
        str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("torch_fastdet::")
    )


def text() -> str:
    """Return what tests/api.txt has to hold."""
    lines = [
        "# What torch_fastdet promises: `python -m tools.api` writes this file, and tools/api.py says what stands in it."
    ]
    for name in modules():
        module = importlib.import_module(name)
        lines += ["", f"[{name}]"]
        for public in sorted(module.__all__):
            lines += lines_of(public, getattr(module, public))
    for host in HOSTS:
        switches = importlib.import_module(f"torch_fastdet.{host}").SWITCHES
        lines += ["", f"[switches of torch_fastdet.{host}]", *sorted(switches)]
    return "\n".join([*lines, "", "[operators]", *schemas(), ""])


def page() -> str:
    """Return what docs/operators.md has to hold: its text, with each operator's first sentence and parameters in its table."""
    rows = ["| operator | what it computes | parameters |", "|---|---|---|"]
    for name in sorted(ops.__all__):
        function = getattr(ops, name)
        sentence = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", inspect.cleandoc(function.__doc__).partition("\n\n")[0])
        given = f"`{parameters(function)[1:-1]}`".replace("``", "")
        sentence = " ".join(sentence.split()).replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{name}` | {sentence} | {given} |")
    return TABLE.sub(lambda found: "\n".join([found[1], *rows, "", found[2]]), PAGE.read_text())


if __name__ == "__main__":
    FILE.write_text(text())
    PAGE.write_text(page())
