"""Modules for the end of a detector. They are in :mod:`torch_fastdet.detections.postprocess`."""

from torch_fastdet.detections.postprocess import (
    PictureDetector,
    UltralyticsPostProcess,
    YOLOv5PostProcess,
    split_ultralytics_heads,
)

__all__ = ["PictureDetector", "UltralyticsPostProcess", "YOLOv5PostProcess", "split_ultralytics_heads"]
