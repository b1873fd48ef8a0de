"""Raises one-line errors for arguments of a wrong type, because PyTorch's own error prints the operator's whole schema."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


class _Rule(NamedTuple):
    """Say what an argument may be: of these classes, or what converts itself by ``method``; ``item`` is the rule of a list's items."""

    classes: tuple[type, ...]
    expected: str
    method: str = ""
    item: _Rule | None = None


# A number may also be a NumPy number or a tensor of one element, as in PyTorch.
_RULES: dict[object, _Rule] = {
    float: _Rule((float, int, torch.SymFloat, torch.SymInt), "a number", "__float__"),
    int: _Rule((int, torch.SymInt), "an integer", "__index__"),
    bool: _Rule((bool, int, torch.SymBool), "a bool", "__bool__"),
    str: _Rule((str,), "a string"),
    Tensor: _Rule((Tensor,), "a tensor"),
    torch.dtype: _Rule((torch.dtype,), "a dtype"),
    torch.device: _Rule((torch.device,), "a device"),
    types.NoneType: _Rule((types.NoneType,), "None"),
    object: _Rule((object,), "anything"),
}


@functools.cache
def _rule(hint: object) -> _Rule:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (list, tuple):
        item = _rule(inner[0])
        _, noun, *rest = item.expected.split(" ")
        return _Rule((list, tuple), " ".join(["a list of", f"{noun}s", *rest]), item=item)
    if inner:
        rules = [_rule(part) for part in inner]
        return _Rule(
            tuple(known for rule in rules for known in rule.classes),
            " or ".join(rule.expected for rule in rules),
            "".join(rule.method for rule in rules),
            next((rule.item for rule in rules if rule.item), None),
        )
    return _RULES[hint]


def _converts(value: object, method: str) -> bool:
    try:
        getattr(value, method)()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return value is not None


def _fault(name: str, value: object, rule: _Rule) -> str:
    if not isinstance(value, rule.classes) and not (rule.method and _converts(value, rule.method)):
        return f"{name} is a {type(value).__name__}, but {rule.expected} is expected"
    if rule.item is not None and isinstance(value, (list, tuple)):
        # Items are checked without a call for each, because lists of hundreds of tensors are common.
        if rule.item.item is None and all(map(isinstance, value, repeat(rule.item.classes))):
            return ""
        for i, item in enumerate(value):
            fault = _fault(f"{name}[{i}]", item, rule.item)
            if fault:
                return fault
    return ""


def checked(function: F, lone: str = "") -> F:
    """Return ``function`` that first raises a TypeError that names an argument whose type is not the annotated one.

    The list ``lone`` may also come as a single item. TorchScript, which checks types itself, and torch.compile take ``function`` as it is.
    """
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    rules = {p.name: _rule(hints.get(p.name, object)) for p in parameters if p.kind is not p.VAR_KEYWORD}
    # The error of a constructor names its class.
    spoken = function.__qualname__.partition(".")[0] if function.__name__ == "__init__" else function.__name__
    if lone:
        rules[lone] = rules[lone]._replace(classes=(*rules[lone].classes, int))

    classes = [rule.classes for rule in rules.values()]
    lists = [(i, name) for i, (name, rule) in enumerate(rules.items()) if rule.item]

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if kwargs or not all(map(isinstance, args, classes)):
            given: Iterable[tuple[str, object]] = chain(zip(rules, args), kwargs.items())
        else:  # the usual case, fast: nothing but items of lists is left to look at
            given = ((name, args[i]) for i, name in lists if i < len(args))
        for name, value in given:
            fault = _fault(name, value, rules[name]) if name in rules else ""
            if fault:
                raise TypeError(f"{spoken}: {fault}")
        return function(*args, **kwargs)

    # torch.jit.script_if_tracing marks its functions in this way.
    vars(call).update(__original_fn=function, __script_if_tracing_wrapper=True)
    return typing.cast(F, call)


def check_type(op: str, name: str, value: object, hint: object) -> None:
    """Raise the same error for one argument of a function that is not :func:`checked`."""
    fault = "" if torch.compiler.is_compiling() else _fault(name, value, _rule(hint))
    if fault:
        raise TypeError(f"{op}: {fault}")
