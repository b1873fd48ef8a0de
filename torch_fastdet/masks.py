"""Makes and crops masks of detections under the original signatures of YOLOv5 and Ultralytics, without float masks at full size.

The functions ``*_process_mask*`` return masks (n, height, width) of 0 and 1: uint8 for Ultralytics, float32 for YOLOv5. They raise
RuntimeError for a wrong shape, dtype or device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fastdet.ops.detection_masks import crop_mask, crop_mask_, instance_masks
from torch_fastdet.ops.letterbox import letterbox, place

__all__ = [
    "ultralytics_crop_mask",
    "ultralytics_process_mask",
    "ultralytics_process_mask_native",
    "yolov5_crop_mask",
    "yolov5_process_mask",
    "yolov5_process_mask_native",
    "yolov5_process_mask_upsample",
]


def _sides(name: str, shape: Sequence[int] | Tensor, most: int = 2) -> tuple[int, int]:
    """Return height and width of a shape of two to ``most`` numbers."""
    if not isinstance(shape, (Sequence, Tensor)) or not 2 <= len(shape) <= most:
        raise TypeError(f"{name}: shape is {shape!r}, but a height and a width are expected")
    return int(shape[0]), int(shape[1])


def _inputs(protos: Tensor, masks_in: Tensor, bboxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all three on the prototypes' device and as floats, as the original arithmetic makes them."""
    protos, coefficients, boxes = (
        tensor.to(protos.device, tensor.dtype if tensor.is_floating_point() else torch.float32)
        for tensor in (protos, masks_in, bboxes)
    )
    if boxes.dim() == 2 and len(boxes) == 1:  # the original crops all masks to a single box
        boxes = boxes.expand(len(coefficients), -1)
    return protos, coefficients, boxes if len(coefficients) else boxes[:0]


def _one_box_each(masks: Tensor, boxes: Tensor) -> Tensor:
    return boxes.expand(len(masks), -1) if len(boxes) == 1 else boxes


def ultralytics_crop_mask(masks: Tensor, boxes: Tensor) -> Tensor:
    """Set what lies outside of the boxes to zero, in place, with a gradient: ``ultralytics.utils.ops.crop_mask``.

    Args:
        masks: (n, height, width), of a floating dtype, bool, uint8, int8, int16, int32 or int64; written.
        boxes: (n, 4) or (1, 4), x1, y1, x2, y2 in the masks' pixels.

    Returns:
        ``masks``.

    Raises:
        RuntimeError: A wrong shape, dtype or layout, or a leaf that requires grad.
    """
    crop_mask_(masks, _one_box_each(masks, boxes.to(masks.device)))
    return masks


def yolov5_crop_mask(masks: Tensor, boxes: Tensor) -> Tensor:
    """Return masks that are zero outside of their boxes, with a gradient: YOLOv5's ``utils.segment.general.crop_mask``.

    Args:
        masks: (n, height, width), of a floating dtype, bool, uint8, int8, int16, int32 or int64.
        boxes: (n, 4) or (1, 4), x1, y1, x2, y2 in the masks' pixels.

    Returns:
        (n, height, width), a new tensor of the same dtype.

    Raises:
        RuntimeError: a wrong shape, dtype, layout or device.
    """
    boxes = _one_box_each(masks, boxes)
    if masks.is_contiguous():
        return crop_mask(masks, boxes)
    cropped = masks.clone()  # in the masks' memory format, as the original product
    crop_mask_(cropped, boxes)
    return cropped


def ultralytics_process_mask(
    protos: Tensor, masks_in: Tensor, bboxes: Tensor, shape: Sequence[int], upsample: bool = False
) -> Tensor:
    """Return masks of ``shape``, or without ``upsample`` of the prototypes' size: ``ultralytics.utils.ops.process_mask``.

    Args:
        protos: (channels, h, w), the prototypes of an image.
        masks_in: (n, channels), the coefficients of its detections.
        bboxes: (n, 4), their boxes x1, y1, x2, y2, in pixels of ``shape``.
        shape: Height and width, of the network's input.
        upsample: Whether masks have that size.
    """
    # Without resampling the original also accepts an image's shape.
    size = _sides("ultralytics_process_mask", shape, 2 if upsample else 3)
    inputs = _inputs(protos, masks_in, bboxes)
    if upsample:
        return instance_masks(*inputs, list(size))
    height, width = protos.shape[1:]
    return instance_masks(*inputs, [height, width], box_scale=[width / size[1], height / size[0]])


def ultralytics_process_mask_native(protos: Tensor, masks_in: Tensor, bboxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Return masks in the pixels of the original image: ``ultralytics.utils.ops.process_mask_native``.

    The other arguments are those of :func:`ultralytics_process_mask`.

    Args:
        bboxes: (n, 4), x1, y1, x2, y2, in pixels of the original image.
        shape: Height and width of the original image.
    """
    size = _sides("ultralytics_process_mask_native", shape)
    factor, window = _letterbox_window((int(protos.shape[1]), int(protos.shape[2])), size)
    return instance_masks(*_inputs(protos, masks_in, bboxes), list(size), window, factor)


def _letterbox_window(protos: tuple[int, int], size: tuple[int, int]) -> tuple[int, list[int]]:
    """Return how Ultralytics cuts a letterbox's border off: the factor that prototypes are enlarged by, and the window."""
    # The network's input is four times as large as the prototypes. These are enlarged, at most four times, until half of the border, which
    # lies on each side, is a whole number of their pixels.
    network = [4 * protos[0], 4 * protos[1]]
    inner = place(list(size), network)
    borders = network[0] - inner.height, network[1] - inner.width
    factor = next((factor for factor in (1, 2) if all(border * factor % 8 == 0 for border in borders)), 4)
    height, width = factor * protos[0], factor * protos[1]
    inner = place(list(size), [height, width])
    return factor, [inner.top, inner.left, min(inner.top + inner.height, height), min(inner.left + inner.width, width)]


def yolov5_process_mask(
    protos: Tensor, masks_in: Tensor, bboxes: Tensor, shape: Sequence[int], upsample: bool = False
) -> Tensor:
    """Return masks, cropped and then resampled: YOLOv5's ``utils.segment.general.process_mask``.

    Masks are of ``shape`` with ``upsample``, otherwise of the prototypes' size. Arguments are those of
    :func:`ultralytics_process_mask`.
    """
    size = _sides("yolov5_process_mask", shape)
    height, width = protos.shape[1:]
    scale = [width / size[1], height / size[0]]
    inputs, made = _inputs(protos, masks_in, bboxes), list(size) if upsample else [height, width]
    return instance_masks(*inputs, made, box_scale=scale, sigmoid=True, crop_first=True, dtype=torch.float32)


def yolov5_process_mask_upsample(protos: Tensor, masks_in: Tensor, bboxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Return masks, resampled to ``shape`` and then cropped: YOLOv5's ``utils.segment.general.process_mask_upsample``.

    Arguments are those of :func:`ultralytics_process_mask`.
    """
    size = list(_sides("yolov5_process_mask_upsample", shape))
    return instance_masks(*_inputs(protos, masks_in, bboxes), size, sigmoid=True, dtype=torch.float32)


def yolov5_process_mask_native(protos: Tensor, masks_in: Tensor, bboxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Return masks in the pixels of the original image: YOLOv5's ``utils.segment.general.process_mask_native``.

    Arguments are those of :func:`ultralytics_process_mask_native`.
    """
    size = list(_sides("yolov5_process_mask_native", shape))
    height, width = protos.shape[1:]
    _, _, left, top, _, _ = letterbox([height, width], size)
    window = [int(top), int(left), int(height - top), int(width - left)]
    inputs = _inputs(protos, masks_in, bboxes)
    return instance_masks(*inputs, size, window, sigmoid=True, dtype=torch.float32)
