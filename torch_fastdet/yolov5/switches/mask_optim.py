"""``mask_optim``: masks of detections in one pass, in segment/predict.py, segment/val.py and the loss of segment/train.py."""

from __future__ import annotations

from torch_fastdet.hosts.engine.switch import Name
from torch_fastdet.hosts.shared import masks as mask_optim
from torch_fastdet.yolov5.dropins import crop_mask, process_mask, process_mask_native, process_mask_upsample

GENERAL = ("utils.segment.general", "yolov5.utils.segment.general")


class MaskOptim(mask_optim.MaskOptim):
    modules = ("utils.segment.general",)
    names = (
        Name("process_mask", process_mask, GENERAL),
        Name("process_mask_native", process_mask_native, GENERAL),
        Name("process_mask_upsample", process_mask_upsample, GENERAL),
        Name("crop_mask", crop_mask, GENERAL),
    )
