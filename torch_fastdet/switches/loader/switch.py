"""Declares ``loader_optim``: data loaders that read each image once and make batches with one operator."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch_fastdet.patching.evidence import MEMFD, OPENCV, Asks, Obstacle, SameCode, Signature
from torch_fastdet.patching.protocols import Stock
from torch_fastdet.patching.switch import Active, Switch, Target
from torch_fastdet.switches.frameworks import ALL_READ, ultralytics, yolov5
from torch_fastdet.switches.loader import labels
from torch_fastdet.switches.loader import yolov5_ranks as ranks


def _data_set(active: Active, stock: object, module: Stock) -> object:
    from torch_fastdet.switches.loader import yolov5 as loader  # with cv2, which few commands need

    if not module.__name__.endswith(".segment.dataloaders"):
        labels.scan_by_threads(active, module, "Pool", labels.yolov5_result, labels.YOLOV5)
    return loader.dataset_class(stock)


def _data_set_of_masks(active: Active, stock: object, module: Stock) -> object:
    boxes = sys.modules[module.__name__.replace(".segment.", ".")]
    if not active.has_replaced(boxes, "InfiniteDataLoader"):
        return None
    active.replace(module, "DataLoader", boxes.DataLoader)
    return _data_set(active, stock, module)


def _data_loader(active: Active, stock: type, module: object) -> object:
    if not active.has_replaced(module, "LoadImagesAndLabels"):
        return None
    from torch_fastdet.switches.loader import yolov5 as loader

    infinite, plain = loader.loader_classes(stock)
    active.replace(module, "DataLoader", plain)  # what create_dataloader takes for --image-weights
    return infinite


# Loaders derive from this class of 7.0 (PyPI's 7.0.14 and GitHub's head have the same).
KNOWN = SameCode({"InfiniteDataLoader": ("1fe0ada3",)}, "YOLOv5 7.0 or of GitHub's head")
YOLOV5 = Switch(
    "loader_optim",
    "data loaders read each image once, and make batches with one operator, on the GPU where there is one",
    (
        Target(yolov5("utils.dataloaders"), "LoadImagesAndLabels", make=_data_set, evidence=(KNOWN,)),
        Target(yolov5("utils.dataloaders"), "InfiniteDataLoader", make=_data_loader),
        Target(
            yolov5("utils.segment.dataloaders"), "LoadImagesAndLabelsAndMasks", make=_data_set_of_masks, otherwise="say"
        ),
        # Loading also works without these.
        *(
            Target(yolov5("utils.torch_utils"), name, make=make, evidence=(Signature((parameter,)),), otherwise="say")
            for name, make, parameter in (
                ("torch_distributed_zero_first", ranks.torch_distributed_zero_first, "local_rank"),
                ("smart_DDP", ranks.smart_DDP, "model"),
            )
        ),
    ),
    modules=("utils.torch_utils", "utils.dataloaders"),
    evidence=(MEMFD, OPENCV),
)


def _obstacle_in_code(_: object) -> Obstacle | None:
    from torch_fastdet.switches.loader import ultralytics as loader  # with cv2, which few commands need

    return loader.obstacle_in_code(f"is not that of {ALL_READ}.")


def _build_dataloader(active: Active, stock: Callable[..., object], build: Stock) -> Callable[..., object]:
    from torch_fastdet.switches.loader import ultralytics as loader

    base = importlib.import_module("ultralytics.data.base").BaseDataset
    for method in ("cache_images", "set_rectangle"):
        active.replace(base, method, getattr(loader, method)(active, vars(base)[method], base))
    scans = importlib.import_module("ultralytics.data.dataset")
    labels.scan_by_threads(active, scans, "ThreadPool", labels.ultralytics_result, labels.ULTRALYTICS)
    return loader.build_dataloader(stock, build.InfiniteDataLoader)


BUILD_DATALOADER = ("dataset", "batch", "workers", "shuffle", "rank", "drop_last", "pin_memory", "device")
ULTRALYTICS = Switch(
    "loader_optim",
    "data loaders read each image once, and make batches with one operator, on the GPU where there is one",
    (
        Target(
            ultralytics("data.build"),
            "build_dataloader",
            make=_build_dataloader,
            evidence=(Signature(BUILD_DATALOADER), Asks("the code of its data loaders", _obstacle_in_code)),
        ),
    ),
    modules=("data.build",),
    evidence=(MEMFD, OPENCV),
)
