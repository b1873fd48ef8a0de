"""Ultralytics' model in a captured step, with fewer copies in its neck."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from torch_fastdet.hosts.shared.necks import joined_upsampling

MODULES = ("ultralytics.nn.tasks",)


def fewer_copies(model: nn.Module) -> AbstractContextManager[None]:
    """While inside, the model's values are stock's with fewer copies: :func:`joined_upsampling`."""
    return joined_upsampling(model, "_predict_once", MODULES)
