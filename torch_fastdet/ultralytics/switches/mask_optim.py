"""``mask_optim``: masks of detections in one pass, in the segmentation predictor, validator and loss."""

from __future__ import annotations

from torch_fastdet.hosts.engine.switch import Name
from torch_fastdet.hosts.shared import masks as mask_optim
from torch_fastdet.ultralytics.dropins import crop_mask, process_mask, process_mask_native
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

OPS = ("ultralytics.utils.ops",)


class MaskOptim(mask_optim.MaskOptim, UltralyticsSwitch):
    modules = ("utils.ops",)
    names = (
        Name("process_mask", process_mask, OPS),
        Name("process_mask_native", process_mask_native, OPS),
        Name("crop_mask", crop_mask, OPS),
    )
