"""``non_max_suppression`` with the parameters of the installed Ultralytics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_fastdet.patching.evidence import (
    plainly_on_the_cpu,
)
from torch_fastdet.suppression import ultralytics_non_max_suppression as non_max_suppression

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
