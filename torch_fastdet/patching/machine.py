"""Evidence of the machine that tables of both hosts ask for."""

from __future__ import annotations

import importlib.util
import os

from torch_fastdet.patching.evidence import Asks

_NO_MEMFD = "decoded pictures are shared through memfd_create, which this system does not have."
MEMFD = Asks("memfd_create", lambda _: None if hasattr(os, "memfd_create") else _NO_MEMFD)
OPENCV = Asks("OpenCV", lambda _: None if importlib.util.find_spec("cv2") else "OpenCV (cv2) is not installed.")


def needs_gpu(device: str) -> str | None:
    """For the doctor: why a switch for training on a GPU cannot apply with this ``--device``."""
    return "the model trains on the CPU, not on a GPU." if device == "cpu" else None
