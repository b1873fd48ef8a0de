"""Modules for the end of a detector. They are in :mod:`torch_fastdet.detections.postprocess`."""

from torch_fastdet.detections import postprocess
from torch_fastdet.detections.postprocess import *  # noqa: F403

__all__ = postprocess.__all__
