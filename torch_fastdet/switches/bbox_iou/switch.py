"""Declares ``bbox_iou_optim``: the fused IoU in the losses."""

from __future__ import annotations

from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.bbox_iou.common import bbox_iou, iou
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE, ultralytics, yolov5

YOLOV5 = Switch(
    "bbox_iou_optim",
    "fused bbox_iou in the loss of train.py and segment/train.py",
    # v7.0 and the PyPI package define it themselves, but YOLOv5's head imports it from ultralytics.
    (
        Target(
            yolov5("utils.metrics"),
            "bbox_iou",
            bbox_iou,
            moved=("ultralytics.utils.metrics",),
            evidence=(iou(bbox_iou, YOLOV5_REFERENCE),),
        ),
    ),
    modules=("utils.metrics", "utils.loss"),
)

ULTRALYTICS = Switch(
    "bbox_iou_optim",
    "fused bbox_iou in the losses and in target assignment",
    (Target(ultralytics("utils.metrics"), "bbox_iou", bbox_iou, evidence=(iou(bbox_iou, REFERENCE),)),),
    modules=("utils.metrics", "utils.loss", "utils.tal"),
)
