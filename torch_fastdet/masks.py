"""Masks of detections under both hosts' signatures. They are in :mod:`torch_fastdet.detections.masks`."""

from torch_fastdet.detections.masks import (
    ultralytics_crop_mask,
    ultralytics_process_mask,
    ultralytics_process_mask_native,
    yolov5_crop_mask,
    yolov5_process_mask,
    yolov5_process_mask_native,
    yolov5_process_mask_upsample,
)

__all__ = [
    "ultralytics_crop_mask",
    "ultralytics_process_mask",
    "ultralytics_process_mask_native",
    "yolov5_crop_mask",
    "yolov5_process_mask",
    "yolov5_process_mask_native",
    "yolov5_process_mask_upsample",
]
