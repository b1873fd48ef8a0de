"""Masks of detections under both hosts' signatures. They are in :mod:`torch_fastdet.detections.masks`."""

from torch_fastdet.detections import masks
from torch_fastdet.detections.masks import *  # noqa: F403

__all__ = masks.__all__
