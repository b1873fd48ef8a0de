"""Wraps each operator of ``torch.ops.torch_fastdet`` with types, for eager code, TorchScript and torch.compile.

A wrong argument raises an error of one line that names it:

- ``TypeError``: it has another type than its annotation, as a string for a number or a list for a tensor.
- ``ValueError``: it is a number or a list of numbers out of range, as a threshold of 2, or an unknown string.
- ``RuntimeError``: it is a tensor of a wrong shape, dtype, layout or device.
"""

from torch_fastdet.ops.bbox_iou import bbox_iou as bbox_iou
from torch_fastdet.ops.bbox_iou import iou_loss as iou_loss
from torch_fastdet.ops.bn_act import bias_act as bias_act
from torch_fastdet.ops.bn_act import bn_act as bn_act
from torch_fastdet.ops.bn_act import bn_act_cat as bn_act_cat
from torch_fastdet.ops.deformable_attention import deformable_attention as deformable_attention
from torch_fastdet.ops.detection_masks import crop_mask as crop_mask
from torch_fastdet.ops.detection_masks import crop_mask_ as crop_mask_
from torch_fastdet.ops.detection_masks import instance_masks as instance_masks
from torch_fastdet.ops.image import image_augment as image_augment
from torch_fastdet.ops.image import image_augment_ as image_augment_
from torch_fastdet.ops.image import image_gather_ as image_gather_
from torch_fastdet.ops.image import image_letterbox as image_letterbox
from torch_fastdet.ops.image import image_letterbox_ as image_letterbox_
from torch_fastdet.ops.image import image_resize_ as image_resize_
from torch_fastdet.ops.image import opencv_rules as opencv_rules
from torch_fastdet.ops.jpeg import decode_jpeg as decode_jpeg
from torch_fastdet.ops.jpeg import jpeg_decode_ as jpeg_decode_
from torch_fastdet.ops.jpeg import jpeg_pack as jpeg_pack
from torch_fastdet.ops.jpeg import jpeg_plan as jpeg_plan
from torch_fastdet.ops.letterbox import letterbox as letterbox
from torch_fastdet.ops.linear_assignment import linear_assignment as linear_assignment
from torch_fastdet.ops.metrics import confusion_matrix_ as confusion_matrix_
from torch_fastdet.ops.metrics import match_detections as match_detections
from torch_fastdet.ops.multi_tensor import multi_tensor_clip_grad_norm_ as multi_tensor_clip_grad_norm_
from torch_fastdet.ops.multi_tensor import multi_tensor_ema_ as multi_tensor_ema_
from torch_fastdet.ops.multi_tensor import multi_tensor_norm as multi_tensor_norm
from torch_fastdet.ops.multi_tensor import multi_tensor_sgd_ as multi_tensor_sgd_
from torch_fastdet.ops.multi_tensor import multi_tensor_unscale_ as multi_tensor_unscale_
from torch_fastdet.ops.nms import filter_detections as filter_detections
from torch_fastdet.ops.nms import non_max_suppression_padded as non_max_suppression_padded
from torch_fastdet.ops.nms import scale_boxes as scale_boxes
from torch_fastdet.ops.nms import scale_boxes_batched as scale_boxes_batched
from torch_fastdet.ops.nms import ultralytics_non_max_suppression_padded as ultralytics_non_max_suppression_padded
from torch_fastdet.ops.nms import ultralytics_postprocess as ultralytics_postprocess
from torch_fastdet.ops.nms import yolov5_decode as yolov5_decode
from torch_fastdet.ops.nms import yolov5_postprocess as yolov5_postprocess
from torch_fastdet.ops.pool import max_pools_cat as max_pools_cat
from torch_fastdet.ops.rtdetr_loss import rtdetr_loss as rtdetr_loss
from torch_fastdet.ops.rtdetr_loss import rtdetr_loss_fault as rtdetr_loss_fault
from torch_fastdet.ops.space_to_depth import space_to_depth as space_to_depth
from torch_fastdet.ops.stem_conv import stem_conv2d as stem_conv2d
from torch_fastdet.ops.upsample import upsample_nearest2x as upsample_nearest2x
from torch_fastdet.ops.upsample import upsample_nearest2x_cat as upsample_nearest2x_cat
from torch_fastdet.ops.v8_loss import v8_loss as v8_loss
from torch_fastdet.ops.v8_loss import v8_loss_fault as v8_loss_fault
from torch_fastdet.ops.v8_loss import v8_loss_settings as v8_loss_settings
from torch_fastdet.ops.v8_loss import v8_obb_loss as v8_obb_loss
from torch_fastdet.ops.v8_loss import v8_pose_loss as v8_pose_loss
from torch_fastdet.ops.v8_loss import v8_segmentation_loss as v8_segmentation_loss
from torch_fastdet.ops.yolov5_loss import yolov5_loss as yolov5_loss
from torch_fastdet.ops.yolov5_loss import yolov5_loss_fault as yolov5_loss_fault
from torch_fastdet.ops.yolov5_loss import yolov5_segmentation_loss as yolov5_segmentation_loss

__all__ = sorted(name for name, value in globals().items() if callable(value))
