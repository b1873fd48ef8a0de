"""Fused CUDA and C++ operators for YOLO training and post-processing, with the results of the code they replace.

Operators are in :mod:`torch_fastdet.ops`; drop-in replacements for YOLOv5's names in :mod:`torch_fastdet.yolov5`.
``python -m torch_fastdet`` prints :func:`build_info`.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

from torch_fastdet import _library
from torch_fastdet._say import logger
from torch_fastdet._version import __version__

_library.load()

from torch_fastdet import flops, ops  # noqa: E402  (needs the library)
from torch_fastdet._build_info import build_info  # noqa: E402

if "torch.utils.flop_counter" in sys.modules:  # else flops.register() is the user's call
    flops.register()

#: For CMAKE_PREFIX_PATH: where find_package(TorchFastdet) looks.
cmake_prefix_path = str(_library.PACKAGE / "share/cmake")

__all__ = ["__version__", "build_info", "cmake_prefix_path", "logger", "ops"]


def __getattr__(name: str) -> ModuleType:
    """Import a submodule at its first use: ``torch_fastdet.yolov5`` needs no import statement, and costs nothing unused."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
