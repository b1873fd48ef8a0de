"""Typed wrappers over ``torch.ops.torch_fastdet``: one for each operator, usable in TorchScript and torch.compile.

A wrong argument raises an error of one line that names it:

- ``TypeError``: it has another type than its annotation, as a string for a number or a list for a tensor.
- ``ValueError``: it is a number, a word or a list of numbers that is not taken, as a threshold of 2 or an unknown reduction.
- ``RuntimeError``: it is a tensor of a wrong shape, dtype, layout or device.
"""

from torch_fastdet.ops import _checks
from torch_fastdet.ops.bbox_iou import bbox_iou, iou_loss
from torch_fastdet.ops.bn_act import bn_act, bn_act_cat
from torch_fastdet.ops.deformable_attention import deformable_attention
from torch_fastdet.ops.image import (
    image_augment,
    image_augment_,
    image_gather_,
    image_letterbox,
    image_letterbox_,
    image_resize_,
    opencv_rules,
)
from torch_fastdet.ops.jpeg import decode_jpeg, jpeg_decode_, jpeg_pack, jpeg_plan
from torch_fastdet.ops.letterbox import letterbox
from torch_fastdet.ops.linear_assignment import linear_assignment
from torch_fastdet.ops.masks import crop_mask, crop_mask_, instance_masks
from torch_fastdet.ops.metrics import confusion_matrix_, match_detections
from torch_fastdet.ops.multi_tensor import (
    multi_tensor_clip_grad_norm_,
    multi_tensor_ema_,
    multi_tensor_norm,
    multi_tensor_sgd_,
    multi_tensor_unscale_,
)
from torch_fastdet.ops.nms import (
    non_max_suppression_padded,
    scale_boxes,
    scale_boxes_batched,
    ultralytics_non_max_suppression_padded,
    ultralytics_postprocess,
    yolov5_decode,
    yolov5_postprocess,
)
from torch_fastdet.ops.pool import max_pools_cat
from torch_fastdet.ops.rtdetr_loss import rtdetr_loss, rtdetr_loss_fault
from torch_fastdet.ops.space_to_depth import space_to_depth
from torch_fastdet.ops.stem_conv import stem_conv2d
from torch_fastdet.ops.upsample import upsample_nearest2x, upsample_nearest2x_cat
from torch_fastdet.ops.v8_loss import (
    v8_loss,
    v8_loss_fault,
    v8_loss_settings,
    v8_obb_loss,
    v8_pose_loss,
    v8_segmentation_loss,
)
from torch_fastdet.ops.yolov5_loss import yolov5_loss, yolov5_loss_fault, yolov5_segmentation_loss

__all__ = [
    "bbox_iou",
    "bn_act",
    "bn_act_cat",
    "confusion_matrix_",
    "crop_mask",
    "crop_mask_",
    "decode_jpeg",
    "deformable_attention",
    "image_augment",
    "image_augment_",
    "image_gather_",
    "image_letterbox",
    "image_letterbox_",
    "image_resize_",
    "instance_masks",
    "iou_loss",
    "jpeg_decode_",
    "jpeg_pack",
    "jpeg_plan",
    "letterbox",
    "linear_assignment",
    "match_detections",
    "max_pools_cat",
    "multi_tensor_clip_grad_norm_",
    "multi_tensor_ema_",
    "multi_tensor_norm",
    "multi_tensor_sgd_",
    "multi_tensor_unscale_",
    "non_max_suppression_padded",
    "opencv_rules",
    "rtdetr_loss",
    "rtdetr_loss_fault",
    "scale_boxes",
    "scale_boxes_batched",
    "space_to_depth",
    "stem_conv2d",
    "ultralytics_non_max_suppression_padded",
    "ultralytics_postprocess",
    "upsample_nearest2x",
    "upsample_nearest2x_cat",
    "v8_loss",
    "v8_loss_fault",
    "v8_loss_settings",
    "v8_obb_loss",
    "v8_pose_loss",
    "v8_segmentation_loss",
    "yolov5_decode",
    "yolov5_loss",
    "yolov5_loss_fault",
    "yolov5_postprocess",
    "yolov5_segmentation_loss",
]

for _name in __all__:
    _checks.learn(globals()[_name])
