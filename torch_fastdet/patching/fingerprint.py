"""Tells whether a function of a host is one that is known here, whatever its formatting, comments and type hints."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType

from torch_fastdet.patching.protocols import Function


def fingerprint(function: Function) -> str:
    """Return eight hexadecimal digits of what a function does, whatever its layout, comments and annotations; "" without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256("\n".join(_words(tree)).encode()).hexdigest()[:8]


def names_in(code: CodeType) -> set[str]:
    """Return the names that a function's code looks up, functions and comprehensions inside it included."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _words(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "type_ignores", "type_comment", "kind", "ctx"):
            continue
        if name == "body" and isinstance(value, list) and value and isinstance(value[0], ast.Expr):
            docstring = isinstance(value[0].value, ast.Constant) and isinstance(value[0].value.value, str)
            value = value[docstring:]
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _words(part)
            elif part is not None:
                yield f"{name}={part!r}"
