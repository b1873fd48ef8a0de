"""A detector in a graph: its stem divides the images, and an upsampling writes straight into the concatenation behind it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet._torch.private import every_module_has_hooks, runs_plainly
from torch_fastdet.nn.bn_act import begins_with_stem, forward_of_bytes
from torch_fastdet.nn.stem import TAKES_BYTES
from torch_fastdet.patching.evidence import agree, pictures
from torch_fastdet.switches.upsample.switch import doubles, upsample_forward


def _cat(concat: Any, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, concat.d)


@functools.cache
def _concatenates(forward: Any) -> bool:
    return agree(forward, _cat, {"d": 1}, [pictures(), -pictures()])


def _is_pair(upsample: nn.Module, concat: Any, save: Collection[object]) -> bool:
    """Whether ``concat`` alone reads what ``upsample`` makes, and puts one other tensor behind it along the channels."""
    return (
        type(upsample) is nn.Upsample
        and runs_plainly(upsample, upsample_forward)  # the switch is on
        and getattr(upsample, "f", None) == -1
        and getattr(upsample, "i", None) not in save
        and _concatenates(type(concat).forward)
        and runs_plainly(concat, type(concat).forward)
        and concat.d == 1
        and isinstance(getattr(concat, "f", None), list)
        and len(concat.f) == 2
        and concat.f[0] == -1
        and concat.f[1] != -1
    )


def _joined(upsample: Any, concat: object) -> Callable[[list[Tensor]], Tensor]:
    def forward(parts: list[Tensor]) -> Tensor:
        x, skip = parts
        if doubles(upsample, x) and type(skip) is Tensor and skip.dtype == x.dtype and skip.device == x.device:
            return ops.upsample_nearest2x_cat(x, skip)
        return _cat(concat, [upsample_forward(upsample, x), skip])

    return forward


def _layers(model: object, methods: tuple[str, ...], modules: tuple[str, ...]) -> list[Any]:
    """The model's layers, where these methods are the host's own and nothing sees each module's call."""
    layers = getattr(model, "model", None)
    known = all(
        getattr(getattr(type(model), name, None), "__module__", None) in modules and name not in vars(model)
        for name in methods
    )
    return list(layers) if known and isinstance(layers, nn.Sequential) and not every_module_has_hooks() else []


def stock_head(model: Any, modules: tuple[str, ...]) -> Any:
    """The last layer of a model in training, if its class is the host's; else None."""
    layers = getattr(model, "model", None)
    head = layers[-1] if isinstance(layers, nn.Sequential) and len(layers) else None
    return head if type(head).__module__ in modules and model.training else None


def stock_detect(model: Any, method: str, modules: tuple[str, ...]) -> Any:
    """:func:`stock_head`, if it is a ``Detect`` whose ``method`` is the class's; else None."""
    head = stock_head(model, modules)
    return head if type(head).__name__ == "Detect" and method not in vars(head) else None


@contextlib.contextmanager
def images_of_bytes(model: Any, methods: tuple[str, ...], modules: tuple[str, ...]) -> Iterator[None]:
    """While inside, the model takes uint8 images too, for which its result is that of ``images / 255``: its stem divides them
    (:data:`torch_fastdet.nn.stem.TAKES_BYTES`).

    Args:
        model: the host's model. Its first layer alone reads the images.
        methods: those from ``forward`` to the loop over the layers.
        modules: where the host defines them.
    """
    first = next(iter(_layers(model, methods, modules)), None)
    if first is None or getattr(first, "f", None) != -1 or not begins_with_stem(first):
        yield
        return
    TAKES_BYTES.add(model)
    try:
        with own_attributes([(first, "forward", functools.partial(forward_of_bytes, first))]):
            yield
    finally:
        TAKES_BYTES.discard(model)


@contextlib.contextmanager
def joined_upsampling(model: object, loop: str, modules: tuple[str, ...]) -> Iterator[None]:
    """While inside, each upsampling of ``upsample_optim`` whose result only a concatenation reads is one operator with it.

    Both hosts run their layers in a row, each on the results that its attribute ``f`` names; ``model.save`` has the numbers of
    those that later layers read. A model that does otherwise is left alone.

    Args:
        model: the host's model; its layers are ``model.model``.
        loop: the method that runs them.
        modules: where the host defines that method.
    """
    chain, save = _layers(model, (loop,), modules), getattr(model, "save", None)
    pairs = []
    if isinstance(save, (list, tuple, set)):
        pairs = [(up, cat) for up, cat in itertools.pairwise(chain) if _is_pair(up, cat, save)]
    methods = [(up, "forward", lambda x: x) for up, _ in pairs] + [
        (cat, "forward", _joined(up, cat)) for up, cat in pairs
    ]
    with own_attributes(methods):
        yield
