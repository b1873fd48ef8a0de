"""Provides fused CUDA and C++ operators for YOLO training and post-processing, with the results of the code they replace.

Operators are in :mod:`torch_fastdet.ops`; drop-in replacements for YOLOv5's names in :mod:`torch_fastdet.yolov5`.
``python -m torch_fastdet`` prints :func:`build_info`.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _installed_copy() -> Path | None:
    """Return the built package further back on ``sys.path`` where this one is a source folder without a library."""
    here = Path(__file__).resolve().parent
    if (here / "libtorch_fastdet.so").exists():
        return None
    folders = (Path(folder, __name__).resolve() for folder in sys.path)
    return next((folder for folder in folders if (folder / "libtorch_fastdet.so").exists()), None)


if _copy := _installed_copy():  # Python was started in the source folder, whose package comes first
    _source, __path__[:] = __path__[0], [str(_copy)]

from torch_fastdet import _library  # noqa: E402  (of the copy)
from torch_fastdet._say import logger  # noqa: E402
from torch_fastdet._version import __version__  # noqa: E402

if _copy:
    logger.warning(f"torch_fastdet: {_source} is not built: the copy in {_copy} runs")
_library.load()

from torch_fastdet import ops  # noqa: E402  (needs the library)
from torch_fastdet._build_info import build_info  # noqa: E402

#: The CMAKE_PREFIX_PATH with which find_package(TorchFastdet) finds the library.
cmake_prefix_path = str(_library.PACKAGE / "share/cmake")

__all__ = ["__version__", "build_info", "cmake_prefix_path", "logger", "ops"]


def __getattr__(name: str) -> ModuleType:
    """Import a submodule at its first use: ``torch_fastdet.yolov5`` needs no import statement, and costs nothing unused."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
