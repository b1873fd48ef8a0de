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
from torch_fastdet.patching.evidence import Asks, Evidence, Obstacle, fingerprint, obstacle_among
from torch_fastdet.patching.protocols import Head, Model, Stock

#: The attributes to set: owner, name and value.
Changes: TypeAlias = Iterable[tuple[object, str, object]]


class Rewrite(NamedTuple):
    """Describe one change of a model that is captured."""

    #: What it does, for the doctor.
    line: str
    #: What must hold of the whole model.
    evidence: tuple[Evidence, ...]
    #: Returns what it changes in a model with this evidence: nothing where it does not know the model's parts.
    changes: Callable[..., Changes]

    def obstacle(self, model: nn.Module) -> Obstacle | None:
        return obstacle_among(self.evidence, model)

    @contextlib.contextmanager
    def apply(self, model: nn.Module, *given: object) -> Iterator[None]:
        """Change the model while inside. ``given``: what ``changes`` takes beside it."""
        changes = self.changes(model, *given) if self.obstacle(model) is None else ()
        with own_attributes([*changes]):
            yield


class Framework(NamedTuple):
    """Say where a framework defines what a rewrite must know before it changes a model."""

    #: Modules that define the classes of models, or of heads.
    modules: tuple[str, ...]
    #: Methods of a model, from ``forward`` to the loop over its layers.
    methods: tuple[str, ...] = ()
    #: The class that must define them; "" for any.
    owner: str = ""

    def runs(self, model: object, loop_alone: bool) -> bool:
        """Return whether the framework's methods, or the last of them with ``loop_alone``, are those of the model."""
        methods = self.methods[-1:] if loop_alone else self.methods
        found: list[Any] = [getattr(type(model), name, None) for name in methods]
        return all(
            getattr(method, "__module__", None) in self.modules
            and (not self.owner or method.__qualname__.startswith(f"{self.owner}."))
            for method in found
        ) and not any(name in vars(model) for name in methods)


YOLOV5 = Framework(("models.yolo", "yolov5.models.yolo"), ("forward", "_forward_once"))
ULTRALYTICS = Framework(("ultralytics.nn.tasks",), ("forward", "predict", "_predict_once"), "BaseModel")
ULTRALYTICS_HEADS = Framework(("ultralytics.nn.modules.head",))
FRAMEWORKS = (YOLOV5, ULTRALYTICS)


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


def layers_of(model: object, frameworks: Iterable[Framework], loop_alone: bool = False) -> list[Any]:
    """Return the model's layers if a framework, or its loop over them with ``loop_alone``, runs them in a row unseen; else nothing."""
    layers = getattr(model, "model", None)
    known = not every_module_has_hooks() and any(framework.runs(model, loop_alone) for framework in frameworks)
    return list(layers) if known and isinstance(layers, nn.Sequential) else []


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


_NO_BLOCKS = Obstacle("bn_act_optim has replaced none of its blocks.")
ADDS_FREELY = Asks("blocks of bn_act_optim", lambda model: None if adds_freely(model) else _NO_BLOCKS)
_NCHW = Obstacle("its weights are not channels_last.")
#: Some rewrites are faster in this memory format alone.
IN_NHWC = Asks("channels_last weights", lambda model: None if any(map(is_channels_last, model.parameters())) else _NCHW)
