"""Provides modules and forward methods of a detector's layers over :mod:`torch_fastdet.ops`."""

from torch_fastdet.nn.upsample import Upsample2x

__all__ = ["Upsample2x"]
