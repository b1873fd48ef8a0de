"""Changes a model while it is captured, and leaves it as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from torch_fastdet._torch.modules import is_channels_last, own_attributes
from torch_fastdet._torch.private import every_module_has_hooks, runs_plainly
from torch_fastdet.nn.forwards import is_used
from torch_fastdet.patching.evidence import fingerprint
from torch_fastdet.patching.protocols import Head, Model, Stock

#: The attributes to set: owner, name and value.
Changes: TypeAlias = Iterable[tuple[object, str, object]]
#: Returns what it changes in a model, or nothing if it does not know the model.
Rewrite: TypeAlias = Callable[[Any], Changes]


@contextlib.contextmanager
def rewritten(model: nn.Module, rewrites: Iterable[Rewrite]) -> Iterator[None]:
    """Change the model by the rewrites, one after another, while inside."""
    with contextlib.ExitStack() as stack:
        for rewrite in rewrites:
            stack.enter_context(own_attributes([*rewrite(model)]))
        yield


class Framework(NamedTuple):
    """Say where a framework defines what a rewrite must know before it changes a model."""

    #: Modules that define the classes of models, or of heads.
    modules: tuple[str, ...]
    #: Methods of a model, from ``forward`` to the loop over its layers.
    methods: tuple[str, ...] = ()
    #: The class that must define them; "" for any.
    owner: str = ""


YOLOV5 = Framework(("models.yolo", "yolov5.models.yolo"), ("forward", "_forward_once"))
ULTRALYTICS = Framework(("ultralytics.nn.tasks",), ("forward", "predict", "_predict_once"), "BaseModel")
ULTRALYTICS_HEADS = Framework(("ultralytics.nn.modules.head",))


@functools.cache
def is_read(function: Stock, known: str) -> bool:
    """Return whether this is a function of Ultralytics whose source was read, by its fingerprint: 8.4.184 to 8.4.190 have the same."""
    return fingerprint(function) == known


def plain_modules(model: nn.Module, *classes: tuple[str, str]) -> Iterator[Any]:
    """Yield modules of these classes (module, name) whose call is their class's ``forward`` and nothing else."""
    for module in model.modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) in classes and runs_plainly(module, kind.forward):
            yield module


def layers_of(model: object, framework: Framework, loop_alone: bool = False) -> list[Any]:
    """Return the model's layers if the framework's methods, or the last of them with ``loop_alone``, run them in a row unseen; else nothing."""
    layers = getattr(model, "model", None)
    methods = framework.methods[-1:] if loop_alone else framework.methods
    found: list[Any] = [getattr(type(model), name, None) for name in methods]
    known = all(
        getattr(method, "__module__", None) in framework.modules
        and (not framework.owner or method.__qualname__.startswith(f"{framework.owner}."))
        for method in found
    )
    if not known or any(name in vars(model) for name in methods) or every_module_has_hooks():
        return []
    return list(layers) if isinstance(layers, nn.Sequential) else []


def head_of(model: Model, framework: Framework, evaluated: bool = False) -> Head:
    """Return the last layer of a model in training, or ``evaluated`` too, if its class is the framework's; else None."""
    layers = getattr(model, "model", None)
    head = layers[-1] if isinstance(layers, nn.Sequential) and len(layers) else None
    return head if type(head).__module__ in framework.modules and (model.training or evaluated) else None


def detect_of(model: Model, method: str, framework: Framework, evaluated: bool = False) -> Head:
    """Return :func:`head_of` if it is a ``Detect`` whose ``method`` is the class's; else None."""
    head = head_of(model, framework, evaluated)
    return head if type(head).__name__ == "Detect" and method not in vars(head) else None


def adds_freely(model: nn.Module) -> bool:
    """Return whether convolutions of the model, and losses behind it, may add in another order: ``bn_act_optim`` has replaced blocks."""
    return not every_module_has_hooks() and is_used(model)


def is_in_nhwc(model: nn.Module) -> bool:
    """Return whether the model's weights are channels_last: some rewrites are faster in that memory format alone."""
    return any(map(is_channels_last, model.parameters()))
