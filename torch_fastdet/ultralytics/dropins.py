"""Functions and classes with the names, signatures and results of ultralytics 8.4."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

import torch

from torch_fastdet import ema, ops
from torch_fastdet._torch.floats import as_float
from torch_fastdet.masks import ultralytics_crop_mask as crop_mask
from torch_fastdet.masks import ultralytics_process_mask as process_mask
from torch_fastdet.masks import ultralytics_process_mask_native as process_mask_native
from torch_fastdet.patching.evidence import plainly_on_the_cpu
from torch_fastdet.suppression import ultralytics_non_max_suppression as non_max_suppression

__all__ = ["ModelEMA", "bbox_iou", "crop_mask", "non_max_suppression", "process_mask", "process_mask_native"]


def bbox_iou(
    box1: torch.Tensor,
    box2: torch.Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> torch.Tensor:
    """IoU, GIoU, DIoU or CIoU of boxes (..., 4), as ``ultralytics.utils.metrics.bbox_iou``: returns (..., 1), a new tensor.

    ``box1`` and ``box2`` broadcast over the leading dimensions; boxes are centre x, centre y, width, height in any one
    unit, or corners with ``xywh=False``. If several kinds are asked for, CIoU takes precedence over DIoU, and DIoU over GIoU.
    Where the stock function gives NaN (boxes without height) this gives a finite value and gradient.
    """
    return ops.bbox_iou(as_float(box1), as_float(box2), xywh, GIoU, DIoU, CIoU, eps)


class ModelEMA(ema.ModelEMA):
    """``ultralytics.utils.torch_utils.ModelEMA``: see :class:`torch_fastdet.ema.ModelEMA`. A distillation teacher that the
    model carries is dropped from the copy."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999, tau: float = 2000, updates: int = 0):
        super().__init__(model, decay, tau, updates)
        ema: Any = self.ema
        if hasattr(ema, "teacher_model"):
            ema.teacher_model = None

    def update_attr(self, model: torch.nn.Module, include: Container[str] = (), exclude: Container[str] = ()) -> None:
        """Copy the model's attributes to the EMA: those in ``include`` (all, if empty), but none in ``exclude`` or with a
        leading underscore."""
        super().update_attr(model, include, exclude)


# 8.4.120 takes these labels in front of max_det, and its end-to-end rows keep the prediction's dtype.
LABELS = "labels"


def suppression_like(stock: Callable[..., Any]) -> Callable[..., object]:
    """:func:`non_max_suppression` with the parameters and dtypes of the installed version's function."""
    has_labels = LABELS in inspect.signature(stock).parameters
    with plainly_on_the_cpu():
        keeps_dtype = stock(torch.zeros(1, 1, 6, dtype=torch.float16))[0].dtype == torch.float16
    return _as_older(stock, keeps_dtype) if has_labels or keeps_dtype else non_max_suppression


def _as_older(stock: Callable[..., object], keeps_dtype: bool) -> Callable[..., object]:
    """Ours with the parameters and the dtype of an older version's function; labels are left to that function."""
    signature = inspect.signature(stock)

    def non_max_suppression_as_older(*args: object, **kwargs: object) -> object:
        arguments = signature.bind(*args, **kwargs).arguments
        if len(arguments.pop(LABELS, ())):
            return stock(*args, **kwargs)
        result = non_max_suppression(**arguments)
        prediction = arguments["prediction"]
        prediction = prediction[0] if isinstance(prediction, (list, tuple)) else prediction
        if not keeps_dtype or (prediction.shape[-1] != 6 and not arguments.get("end2end")):
            return result
        rows = [image.to(prediction.dtype) for image in (result[0] if isinstance(result, tuple) else result)]
        return (rows, result[1]) if isinstance(result, tuple) else rows

    return non_max_suppression_as_older
