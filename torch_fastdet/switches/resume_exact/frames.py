"""Reads the local variables of a framework's training function: they alone say where an accumulation is."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import FrameType

from torch_fastdet.patching.protocols import Names


def training_frame(function: str, variables: Iterable[str]) -> FrameType | None:
    """Return the innermost calling frame of a function of this name that has these local variables."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == function and set(variables) <= set(frame.f_code.co_varnames):
            return frame
        frame = frame.f_back
    return None


def read(frame: FrameType, names: Iterable[str]) -> Names:
    """Return those of the local variables that are set."""
    variables = frame.f_locals
    found = {name: variables[name] for name in names if name in variables}
    if sys.version_info < (3, 13):
        variables.clear()  # the frame keeps this copy, which would hold every tensor of the step
    return found


def write(frame: FrameType, values: Mapping[str, object]) -> None:
    """Set local variables of a function that is running."""
    variables = frame.f_locals
    variables.update(values)
    if sys.version_info < (3, 13):  # later what is written reaches the function (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()
