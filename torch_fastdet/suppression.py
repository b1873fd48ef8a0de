"""Non-maximum suppression under the stock signatures. It is in :mod:`torch_fastdet.detections.suppression`."""

from torch_fastdet.detections.suppression import ultralytics_non_max_suppression, yolov5_non_max_suppression

__all__ = ["ultralytics_non_max_suppression", "yolov5_non_max_suppression"]
