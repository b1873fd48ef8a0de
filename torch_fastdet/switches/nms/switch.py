"""Declares ``nms_optim``: decoding and suppression without host syncs."""

from __future__ import annotations

from torch_fastdet._say import counting
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.suppression import ultralytics_non_max_suppression, yolov5_non_max_suppression
from torch_fastdet.switches.frameworks import ultralytics, yolov5
from torch_fastdet.switches.nms import trial
from torch_fastdet.switches.nms import yolov5 as decoding

_counting = counting("nms_optim", "batches suppressed")
#: These replace the frameworks' functions.
YOLOV5_SUPPRESSION = _counting(yolov5_non_max_suppression)
ULTRALYTICS_SUPPRESSION = _counting(ultralytics_non_max_suppression)
YOLOV5 = Switch(
    "nms_optim",
    "decode and non-maximum suppression without host syncs or a time limit, in val, detect, segment and validation",
    (
        Target(yolov5("utils.general"), "non_max_suppression", YOLOV5_SUPPRESSION, evidence=(trial.SUPPRESSION,)),
        # Suppression also works without these.
        Target(
            yolov5("models.yolo"),
            "Detect.forward",
            make=lambda _, stock, __: decoding.OfInstances(stock),
            class_evidence=(trial.DECODING,),
            own=True,
            otherwise="say",
        ),
        Target(
            yolov5("models.yolo"),
            "Segment.forward",
            make=decoding.segmenting,
            after="Detect.forward",
            otherwise="nothing",
        ),
    ),
    modules=("utils.general", "models.yolo", "models.common"),
)

ULTRALYTICS = Switch(
    "nms_optim",
    "non-maximum suppression without host syncs or a time limit, in val, predict and track",
    (
        Target(
            ultralytics("utils.nms"),
            "non_max_suppression",
            ULTRALYTICS_SUPPRESSION,
            evidence=(trial.ULTRALYTICS_SUPPRESSION,),
        ),
    ),
    modules=("utils.nms",),
)
