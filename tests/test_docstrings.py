"""Every operator is in the reference, its docstring says what an operator's has to say, and all of them are imperative."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.api import modules
from torch_fastdet import ops

REFERENCE = (Path(__file__).resolve().parents[1] / "docs/reference.md").read_text()


def text_of(name: str, seen: set[str] | None = None) -> str:
    """The docstring, that of its module, and those of the operators that it refers to."""
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
        assert f"::: {module}\n" in REFERENCE + "\n"


def test_parameters_are_explained():
    """An operator, or the one that it refers to, explains each parameter, and nothing that does not exist."""
    explained = re.compile(r"^ {8}(\w+): ", re.MULTILINE)
    for name in ops.__all__:
        names = set(inspect.signature(getattr(ops, name)).parameters)
        assert names <= set(explained.findall(text_of(name))), name
        arguments = re.search(r"    Args:\n(.*?)(\n\n|\Z)", getattr(ops, name).__doc__, re.DOTALL)
        assert not arguments or set(explained.findall(arguments.group(1))) <= names, name


def public() -> Iterator[tuple[str, object]]:
    """What the public modules list in ``__all__``, with the methods and properties of their classes."""
    for module in map(importlib.import_module, modules()):
        for value in (getattr(module, name) for name in getattr(module, "__all__", ())):
            if not getattr(value, "__module__", "").startswith("torch_fastdet"):
                continue
            yield value.__qualname__, value
            for key, member in vars(value).items() if inspect.isclass(value) else ():
                if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                    yield f"{value.__qualname__}.{key}", member


#: No verb, or one in the third person.
OTHER = r"(A|An|The|One|What|Which|Why|Whether|How|Where|While|In|Of|For|By|As|With)\b|[^A-Z]|\w+(?<!s)s\b"


def test_docstrings_are_imperative():
    """They begin with a verb: no article, no question word, no code, and no third person."""
    texts = [(name, value.__doc__.strip()) for name, value in public() if value.__doc__]
    assert len(texts) > 100
    assert [(name, text[:60]) for name, text in texts if re.match(OTHER, text)] == []


def test_private_docstrings_begin_with_a_verb():
    """Modules' say what a module does, so theirs is in the third person."""
    found = []
    for path in sorted(Path(ops.__file__).parents[1].rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))):
            text, of_module = ast.get_docstring(node), isinstance(node, ast.Module)
            if text and bool(re.match(r"[A-Z]\w+s\b" if of_module else OTHER, text)) != of_module:
                found.append((path.name, text[:60]))
    assert found == []
