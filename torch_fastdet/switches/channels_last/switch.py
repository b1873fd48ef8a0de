"""Declares ``channels_last``: train on NHWC memory where that is faster."""

from __future__ import annotations

from torch_fastdet.patching.evidence import installed_version
from torch_fastdet.patching.switch import GPU, Switch, obstacle_in_device
from torch_fastdet.switches.channels_last.common import layout_targets
from torch_fastdet.switches.frameworks import yolov5

YOLOV5 = Switch(
    "channels_last",
    "train on channels_last (NHWC) memory where that is faster; checkpoints stay contiguous; needs a GPU",
    (
        *layout_targets(yolov5("models.yolo"), "DetectionModel", "refuse"),  # segmentation's derives from it
        *layout_targets(yolov5("models.yolo"), "ClassificationModel", "nothing"),
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
