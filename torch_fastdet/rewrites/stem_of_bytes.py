"""Lets a model take uint8 images: its stem divides them by 255."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from torch_fastdet._torch.modules import put_attributes
from torch_fastdet.nn.bn_act import begins_with_stem, forward_of_bytes
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Model
from torch_fastdet.rewrites.rewrite import Framework, layers_of

_MARK = "torch_fastdet_takes_bytes"


def takes_bytes(model: nn.Module) -> bool:
    """Return whether the model takes uint8 images now, for which its result is that of ``images / 255``."""
    return _MARK in vars(model)


class StemOfBytes:
    """Let the model take uint8 images too (:func:`takes_bytes`). Its first layer alone reads the images."""

    about = "the stem reads uint8 images and divides them by 255"

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def matches(self, model: object) -> Obstacle | None:
        first = next(iter(layers_of(model, self._framework)), None)
        if first is None or getattr(first, "f", None) != -1 or not begins_with_stem(first):
            return Obstacle("its first layer is not a stem of bn_act_optim that alone reads the images.")
        return None

    def apply(self, model: Model) -> Callable[[], None]:
        first = model.model[0]
        return put_attributes([(first, "forward", functools.partial(forward_of_bytes, first)), (model, _MARK, True)])
