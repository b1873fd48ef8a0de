"""``loader_optim``: each picture is decoded once, and batches are made by one operator, on the GPU where there is one."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from torch_fastdet.hosts.engine.switch import Name
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

BASE, BUILD = "ultralytics.data.base", "ultralytics.data.build"


def build_dataloader(
    dataset: Any,
    batch: int,
    workers: int,
    shuffle: bool = True,
    rank: int = -1,
    drop_last: bool = False,
    pin_memory: bool = True,
    device: Any = "cuda",
) -> Any:
    """Stands for the parameters of stock's."""


class LoaderOptim(UltralyticsSwitch):
    name = "loader_optim"
    help = "data loaders decode each picture once, and make batches with one operator, on the GPU where there is one"
    modules = ("data.build",)
    names = (Name("build_dataloader", build_dataloader, (BUILD,)),)

    def unsupported(self) -> str | None:
        if not hasattr(os, "memfd_create"):
            return "decoded pictures are shared through memfd_create, which this system does not have."
        if not importlib.util.find_spec("cv2"):
            return "OpenCV (cv2) is not installed."
        return super().unsupported()

    def refusal(self, name: Name, stock: Any) -> str | None:
        found = super().refusal(name, stock)
        if found is not None:
            return found
        from torch_fastdet.ultralytics import loader  # with cv2, which nothing else of ours needs

        reasons = (loader.unknown_code(importlib.import_module(module)) for module in loader.KNOWN)
        return next((reason for reason in reasons if reason is not None), None)

    def drop_in(self, name: Name, stock: Any) -> Any:
        from torch_fastdet.ultralytics import loader

        base = importlib.import_module(BASE).BaseDataset
        for method in ("cache_images", "set_rectangle"):
            self.replace(base, method, getattr(loader, method)(vars(base)[method]))
        return loader.build_dataloader(stock, importlib.import_module(BUILD).InfiniteDataLoader)
