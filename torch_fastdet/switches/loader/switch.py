"""Declares ``loader_optim``: data loaders that read each image once and make batches with one operator."""

from __future__ import annotations

from functools import partial

from torch_fastdet.patching.evidence import OPENCV, Asks, SameCode, Signature
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.frameworks import by, ultralytics, yolov5

_by, _DATA = partial(by, "loader.yolov5"), yolov5("utils.dataloaders")
# Loaders derive from this class of 7.0 (PyPI's 7.0.14 and GitHub's head have the same).
KNOWN = SameCode({"InfiniteDataLoader": ("1fe0ada3",)}, "YOLOv5 7.0 or of GitHub's head")
YOLOV5 = Switch(
    "loader_optim",
    "data loaders read each image once, and make batches with one operator, on the GPU where there is one",
    (
        Target(_DATA, "LoadImagesAndLabels", make=_by("data_set"), evidence=(KNOWN,)),
        Target(_DATA, "InfiniteDataLoader", make=_by("data_loader")),
        Target(
            yolov5("utils.segment.dataloaders"),
            "LoadImagesAndLabelsAndMasks",
            make=_by("data_set_of_masks"),
            otherwise="say",
        ),
        # Loading also works without these.
        *(
            Target(
                yolov5("utils.torch_utils"), name, make=_by(name), evidence=(Signature((parameter,)),), otherwise="say"
            )
            for name, parameter in (("torch_distributed_zero_first", "local_rank"), ("smart_DDP", "model"))
        ),
    ),
    modules=("utils.torch_utils", "utils.dataloaders"),
    evidence=(OPENCV,),
)


CODE = Asks("the code of its data loaders", by("loader.ultralytics", "obstacle_in_read_code"))
BUILD_DATALOADER = ("dataset", "batch", "workers", "shuffle", "rank", "drop_last", "pin_memory", "device")
ULTRALYTICS = Switch(
    "loader_optim",
    "data loaders read each image once, and make batches with one operator, on the GPU where there is one",
    (
        Target(
            ultralytics("data.build"),
            "build_dataloader",
            make=by("loader.ultralytics", "build_dataloader"),
            evidence=(Signature(BUILD_DATALOADER), CODE),
        ),
    ),
    modules=("data.build",),
    evidence=(OPENCV,),
)
