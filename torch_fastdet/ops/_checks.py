"""One-line errors for arguments of a wrong type. PyTorch's own error prints the operator's whole schema."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Rule(NamedTuple):
    """What an argument may be: of these classes, or what converts itself by ``method``; ``item`` is the rule of a list's items."""

    classes: tuple[type, ...]
    expected: str
    method: str = ""
    item: _Rule | None = None


# A number may also be NumPy's, or a tensor of one element, as PyTorch takes it.
_RULES: dict[object, _Rule] = {
    float: _Rule((float, int, torch.SymFloat, torch.SymInt), "a number", "__float__"),
    int: _Rule((int, torch.SymInt), "an integer", "__index__"),
    bool: _Rule((bool, int, torch.SymBool), "a bool", "__bool__"),
    str: _Rule((str,), "a string"),
    Tensor: _Rule((Tensor,), "a tensor"),
    torch.dtype: _Rule((torch.dtype,), "a dtype"),
    torch.device: _Rule((torch.device,), "a device"),
    types.NoneType: _Rule((types.NoneType,), "None"),
}
_parameters: dict[str, dict[str, _Rule]] = {}
_classes: dict[str, list[tuple[type, ...]]] = {}  # of the parameters of functions that take no lists


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


def learn(function: Callable) -> None:
    """Take the types from the function's annotations, so that :func:`check` knows them by its name."""
    hints = typing.get_type_hints(function)
    rules = {name: _rule(hints[name]) for name in inspect.signature(function).parameters}
    _parameters[function.__name__] = rules
    if not any(rule.item for rule in rules.values()):
        _classes[function.__name__] = [rule.classes for rule in rules.values()]


def _converts(value: object, method: str) -> bool:
    try:
        getattr(value, method)()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return value is not None


def _fault(name: str, value: Any, rule: _Rule) -> str:
    if not isinstance(value, rule.classes) and not (rule.method and _converts(value, rule.method)):
        return f"{name} is a {type(value).__name__}, but {rule.expected} is expected"
    if rule.item is not None and value is not None:
        # Lists of hundreds of tensors are usual: no call for each.
        if rule.item.item is None and all(map(isinstance, value, repeat(rule.item.classes))):
            return ""
        for i, item in enumerate(value):
            fault = _fault(f"{name}[{i}]", item, rule.item)
            if fault:
                return fault
    return ""


def check(op: str, *values: object) -> None:
    """Raise a TypeError that names the first of ``values`` whose type is not what the function ``op`` of this package annotates.

    Args:
        op: the function's name.
        values: all of its arguments, in order.

    Call it only if ``not torch.jit.is_scripting()``: TorchScript checks types itself and does not compile that branch. So does
    torch.compile.
    """
    if torch.compiler.is_compiling():
        return
    if op in _classes and all(map(isinstance, values, _classes[op])):
        return  # the usual case, fast
    for value, (name, rule) in zip(values, _parameters[op].items(), strict=True):
        fault = _fault(name, value, rule)
        if fault:
            raise TypeError(f"{op}: {fault}")


def check_type(op: str, name: str, value: object, hint: object) -> None:
    """Raise the same error for one argument of a function that is not in this package."""
    fault = "" if torch.compiler.is_compiling() else _fault(name, value, _rule(hint))
    if fault:
        raise TypeError(f"{op}: {fault}")
