"""Every operator is in the reference, and its docstring explains its parameters."""

import inspect
import re
import sys
from pathlib import Path

from torch_fastdet import ops

REFERENCE = (Path(__file__).resolve().parents[1] / "docs/reference.md").read_text()


def text_of(name: str, seen: set[str] | None = None) -> str:
    """Return the docstring, that of its module, and those of the operators to which it refers."""
    seen = set() if seen is None else seen
    seen.add(name)
    function = getattr(ops, name)
    texts = [function.__doc__, sys.modules[function.__module__].__doc__]
    for other in re.findall(r":func:`(\w+)`", function.__doc__):
        if other not in seen:
            texts.append(text_of(other, seen))
    return "\n".join(texts)


def test_reference_has_them():
    for module in {getattr(ops, name).__module__ for name in ops.__all__}:
        assert f"- [{module}](" in REFERENCE


def test_parameters_are_explained():
    """An operator, or the one to which it refers, explains each of its parameters and no others."""
    explained = re.compile(r"^ {8}(\w+): ", re.MULTILINE)
    for name in ops.__all__:
        names = set(inspect.signature(getattr(ops, name)).parameters)
        assert names <= set(explained.findall(text_of(name))), name
        arguments = re.search(r"    Args:\n(.*?)(\n\n|\Z)", getattr(ops, name).__doc__, re.DOTALL)
        assert not arguments or set(explained.findall(arguments.group(1))) <= names, name
