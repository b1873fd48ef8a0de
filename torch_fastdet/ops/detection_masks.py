"""Makes masks of detections from mask coefficients and prototypes, and crops them."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def instance_masks(
    protos: Tensor,
    coefficients: Tensor,
    boxes: Tensor,
    size: list[int],
    window: list[int] | None = None,
    factor: int = 1,
    box_scale: list[float] | None = None,
    sigmoid: bool = False,
    crop_first: bool = False,
    packed: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Make masks of detections: coefficients times prototypes, resampled, thresholded and cropped, in one pass.

    No float mask is written to memory, and nothing is computed far from a box. It takes one launch, without a host
    sync, and has no gradient. A padded batch of :func:`yolov5_postprocess` or :func:`ultralytics_postprocess` can be
    passed as it is: rows past the count have empty boxes, and so empty masks. :mod:`torch_fastdet.masks` has the
    functions of YOLOv5 and Ultralytics, which are this operator with their settings.

    Args:
        protos: (channels, height, width) or (images, channels, height, width), float16, bfloat16, float32 or float64. Any
            strides. The CPU copies what is not float32 with dense rows, the GPU float64 only.
        coefficients: (n, channels), with images (images, n, channels). Same device. They and the boxes are float32: other types,
            and rows that are not dense, are copied first.
        boxes: (n, 4), with images (images, n, 4): x1, y1, x2, y2 in pixels of the result. A pixel is kept where x1 <= x < x2 and
            y1 <= y < y2.
        size: height and width of the masks. The window is resampled to it, bilinear as ``torch.nn.functional.interpolate`` with
            ``align_corners=False``.
        window: top, left, bottom, right of the part of the prototypes that becomes the mask, in pixels of the prototypes
            enlarged ``factor`` times. None: all of them.
        factor: 1, 2 or 4: enlarge the prototypes so many times, bilinear, before the window is cut out.
        box_scale: two factors, of x and y, applied to the boxes before the crop.
        sigmoid: keep pixels with sigmoid(logit) > 0.5, the sigmoid taken before the resampling. Otherwise logit > 0.
        crop_first: crop the prototypes, before the resampling; scaled boxes are then in pixels of the prototypes.
        packed: eight pixels a byte: pixel x is bit x % 8 of byte x // 8, as ``numpy.unpackbits(..., bitorder="little")`` reads it.
        dtype: torch.uint8 (the default), torch.bool or torch.float32.

    Returns:
        (n, height, width), with images (images, n, height, width), 0 or 1, contiguous; if packed, the last dimension has
        ceil(width / 8) bytes.

    Raises:
        RuntimeError: a wrong shape, dtype, layout or device.
        ValueError: a window outside of the prototypes, another factor, or more than 2**22 pixels along a side.

    Behavior: ``process_mask`` and ``process_mask_native`` of YOLOv5 v7.0 and of Ultralytics 8.4.190.
    """
    scale = [1.0, 1.0] if box_scale is None else box_scale
    return torch.ops.torch_fastdet.instance_masks(
        protos,
        coefficients,
        boxes,
        size,
        window=window,
        factor=factor,
        box_scale=scale,
        sigmoid=sigmoid,
        crop_first=crop_first,
        packed=packed,
        dtype=dtype,
    )


@checked
def crop_mask(masks: Tensor, boxes: Tensor) -> Tensor:
    """Return masks that are zero outside of their boxes, in one launch. The masks get a gradient.

    Args:
        masks: (n, height, width), of a floating dtype, bool, uint8, int8, int16, int32 or int64. Copied first
            where they are not contiguous.
        boxes: (n, 4), x1, y1, x2, y2 in pixels, any real dtype, rounded to float32. Same device. A pixel is kept where
            x1 <= x < x2 and y1 <= y < y2.

    Returns:
        (n, height, width), of the masks' dtype, contiguous. What lies outside is multiplied by zero, so NaN and infinity give NaN.

    Raises:
        RuntimeError: a wrong shape, dtype, layout or device.
        ValueError: more than 2**22 pixels along a side.

    Behavior: ``crop_mask`` of YOLOv5 v7.0.
    """
    return torch.ops.torch_fastdet.crop_mask(masks, boxes)


@checked
def crop_mask_(masks: Tensor, boxes: Tensor) -> None:
    """Crop masks as :func:`crop_mask` does, in place: what lies inside of the boxes is not touched.

    Args:
        masks: (n, height, width), written. Those that are not contiguous are copied, cropped and copied back.

    Raises:
        RuntimeError: a leaf that requires grad. Other errors are those of :func:`crop_mask`.

    Behavior: ``crop_mask`` of Ultralytics 8.4.190.
    """
    torch.ops.torch_fastdet.crop_mask_(masks, boxes)
