"""Makes a class that can replace the original class even if users derive from the original."""

from __future__ import annotations

from torch_fastdet._say import warn
from torch_fastdet.patching.protocols import Function, Names, Stock


def stand_in(switch: str, stock: type, ours: type, make: Function | None = None) -> type:
    """Return a class that makes instances by ``make`` or of ``ours``, and whose subclasses derive from the original ``stock``.

    Subclasses build on its inner steps, so they keep its code, and one line says so. ``isinstance`` and ``issubclass`` know both.
    """
    made: list[type] = []

    class StandIn(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], body: Names, **keywords: object) -> Stock:
            if not made:
                return super().__new__(mcs, name, bases, body)
            warn(f"{switch}: {name} derives from {stock.__module__}.{stock.__name__}, and runs the original code")
            bases = tuple(stock if base is made[0] else base for base in bases)
            return type(stock)(name, bases, body, **keywords)

        def __call__(cls, *args: object, **keywords: object) -> object:
            return (make or ours)(*args, **keywords)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (ours, stock))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return subclass is cls or issubclass(subclass, (ours, stock))

    described = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
        "_stock": stock,
    }
    made.append(StandIn(ours.__name__, (ours,), described))
    return made[0]
