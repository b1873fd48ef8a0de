"""``nms_optim``: non-maximum suppression of validation, prediction and tracking, without host syncs or a time limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_fastdet.hosts.engine.signature import parameters
from torch_fastdet.hosts.engine.switch import Name
from torch_fastdet.ultralytics.dropins import non_max_suppression
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

# 8.4.120 takes these labels in front of max_det, and its end-to-end rows keep the prediction's dtype.
LABELS = "labels"


class NmsOptim(UltralyticsSwitch):
    name = "nms_optim"
    help = "non-maximum suppression without host syncs or a time limit, in val, predict and track"
    modules = ("utils.nms",)
    names = (Name("non_max_suppression", non_max_suppression, ("ultralytics.utils.nms",)),)

    def refusal(self, name: Name, stock: Any) -> str | None:
        theirs = [parameter for parameter in inspect.signature(stock).parameters if parameter != LABELS]
        return None if tuple(theirs) == parameters(non_max_suppression) else name.difference(stock)

    def drop_in(self, name: Name, stock: Any) -> Any:
        has_labels = LABELS in inspect.signature(stock).parameters
        keeps_dtype = stock(torch.zeros(1, 1, 6, dtype=torch.float16, device="cpu"))[0].dtype == torch.float16
        return _as_older(stock, keeps_dtype) if has_labels or keeps_dtype else non_max_suppression


def _as_older(stock: Callable[..., Any], keeps_dtype: bool) -> Callable[..., Any]:
    """Ours with the parameters and the dtype of an older version's function; labels are left to that function."""
    signature = inspect.signature(stock)

    def non_max_suppression_as_older(*args: Any, **kwargs: Any) -> Any:
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
