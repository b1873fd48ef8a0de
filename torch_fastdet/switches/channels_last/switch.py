"""Declares ``channels_last``: train on NHWC memory where that is faster."""

from __future__ import annotations

from typing import Literal

from torch_fastdet.patching.evidence import installed_version
from torch_fastdet.patching.switch import GPU, Switch, Target, obstacle_in_device
from torch_fastdet.switches.channels_last.common import in_layout, plain_copy, plain_fuse
from torch_fastdet.switches.frameworks import yolov5


def _targets(model: str, otherwise: Literal["nothing", "refuse"]) -> tuple[Target, ...]:
    where, name = yolov5("models.yolo"), f"{model}.forward"
    return (
        Target(where, name, make=in_layout, otherwise=otherwise),
        Target(where, f"{model}.__deepcopy__", make=lambda *_: plain_copy, adds=True, after=name),
        Target(where, f"{model}.fuse", make=plain_fuse, after=name, quiet=True),
    )


YOLOV5 = Switch(
    "channels_last",
    "train on channels_last (NHWC) memory where that is faster; checkpoints stay contiguous; needs a GPU",
    (
        *_targets("DetectionModel", "refuse"),  # segmentation's derives from it
        *_targets("ClassificationModel", "nothing"),
    ),
    modules=("models.yolo",),
    evidence=(GPU,),
    options={"device": obstacle_in_device},
)


ULTRALYTICS = Switch(
    "channels_last",
    "train on channels_last (NHWC) memory, which ultralytics does itself; needs a GPU",
    (),
    evidence=(GPU,),
    options={"device": obstacle_in_device},
    notice=lambda: f"ultralytics {installed_version('ultralytics')} trains on NHWC memory itself; nothing is replaced",
)
