"""Provides the losses of YOLOv5, with its constructors, calls and results."""

from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss

__all__ = ["ComputeLoss", "SegmentationLoss"]
