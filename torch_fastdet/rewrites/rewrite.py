"""Declares a :class:`Rewrite`, which changes a model while it is captured, and leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import nn

from torch_fastdet._torch.modules import is_channels_last, put_attributes
from torch_fastdet._torch.private import every_module_has_hooks
from torch_fastdet.nn.bn_act import is_used
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Function, Head, Model


class Rewrite(Protocol):
    """Describe one change of a model."""

    #: What it changes, in a line.
    about: str

    def matches(self, model: Model) -> Obstacle | None:
        """Return why the model stays as it is, or None if :meth:`apply` can change it."""

    def apply(self, model: Model) -> Callable[[], None]:
        """Change a model that :meth:`matches`, and return a function that undoes it."""


@contextlib.contextmanager
def rewritten(model: nn.Module, rewrites: Iterable[Rewrite]) -> Iterator[None]:
    """Change the model by those of the rewrites that match it while inside."""
    with contextlib.ExitStack() as stack:
        for rewrite in rewrites:
            if rewrite.matches(model) is None:
                stack.callback(rewrite.apply(model))
        yield


class Forwards:
    """Give modules of a model another ``forward``."""

    about: str
    #: What is said of a model that has no such module.
    without: str
    #: What else keeps a model as it is.
    obstacles: tuple[Callable[[nn.Module], Obstacle | None], ...] = ()

    def forwards(self, model: nn.Module) -> Iterable[tuple[nn.Module, Function]]:
        """Return the modules, each with its other ``forward``."""
        raise NotImplementedError

    def matches(self, model: nn.Module) -> Obstacle | None:
        found = next((obstacle for each in self.obstacles if (obstacle := each(model)) is not None), None)
        return found or (None if any(True for _ in self.forwards(model)) else Obstacle(self.without))

    def apply(self, model: nn.Module) -> Callable[[], None]:
        return put_attributes([(module, "forward", forward) for module, forward in self.forwards(model)])


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


def obstacle_to_other_sums(model: nn.Module) -> Obstacle | None:
    """Return why convolutions of the model, and losses behind it, may not add in another order; None if they may."""
    if every_module_has_hooks():
        return Obstacle("hooks are registered on all modules.")
    return None if is_used(model) else Obstacle("bn_act_optim has replaced none of its blocks.")


def obstacle_to_rows(model: nn.Module) -> Obstacle | None:
    """Return the same for what is faster in NHWC memory alone."""
    if not any(map(is_channels_last, model.parameters())):
        return Obstacle("its weights are not channels_last.")
    return None
