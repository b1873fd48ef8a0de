"""Modules over :mod:`torch_fastdet.ops`. They are in :mod:`torch_fastdet.layers.nn`."""

from torch_fastdet.layers.nn import Upsample2x

__all__ = ["Upsample2x"]
