"""Provides the losses of Ultralytics under its names, and imports Ultralytics when one is asked for."""

from __future__ import annotations

from typing import Any

from torch_fastdet.switches.loss import ultralytics


def __getattr__(name: str) -> Any:
    return getattr(ultralytics, name)
