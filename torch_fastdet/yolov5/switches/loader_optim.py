"""``loader_optim``: each picture is decoded once, and batches are made by one operator, on the GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from typing import Any

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import Switch, class_of

HOSTS = ("utils.dataloaders", "yolov5.utils.dataloaders")


class LoaderOptim(Switch):
    name = "loader_optim"
    help = "data loaders decode each picture once, and make batches with one operator, on the GPU where there is one"
    modules = ("utils.dataloaders",)

    def unsupported(self) -> str | None:
        if not hasattr(os, "memfd_create"):
            return "decoded pictures are shared through memfd_create, which this system does not have."
        return None if importlib.util.find_spec("cv2") else "OpenCV (cv2) is not installed."

    def visit(self, module: ModuleType) -> None:
        name = namespace(module).get("__name__")
        if name not in HOSTS or self.has_replaced(module):
            return
        stock: dict[str, Any] = {kind: class_of(module, kind) for kind in ("LoadImagesAndLabels", "InfiniteDataLoader")}
        if missing := [kind for kind, value in stock.items() if value is None]:
            self.cannot_apply(f"{name} has no {missing[0]} of its own.")
            return
        from torch_fastdet.yolov5 import loader  # with cv2, which nothing else of ours needs

        reason = loader.unknown_code(module)
        if reason is not None:
            self.cannot_apply(reason)
            return
        infinite, plain = loader.loader_classes(stock["InfiniteDataLoader"])
        dataset = loader.dataset_class(stock["LoadImagesAndLabels"])
        for old, new in ((stock["LoadImagesAndLabels"], dataset), (stock["InfiniteDataLoader"], infinite)):
            self.patches.replace_everywhere(self.name, old, new, self.patches.modules())
        self.replace(module, "DataLoader", plain)  # what create_dataloader takes for --image-weights
