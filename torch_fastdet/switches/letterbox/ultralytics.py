"""The predictor's letterbox, BGR to RGB, HWC to CHW and division by 255 of a list of pictures, by one operator; and its JPEG files.

Where pictures go is not computed here: the predictor's own ``pre_transform`` runs with a ``LetterBox`` that says where it would
put a picture, in place of moving its pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from torch_fastdet.ops.letterbox import Placing
from torch_fastdet.patching.by_name import FiledAsStock
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.protocols import Predictor
from torch_fastdet.patching.replace import is_code_of, with_names
from torch_fastdet.switches.letterbox.common import fits, letterbox
from torch_fastdet.switches.letterbox.files import imread_on

GREY = 114  # of the operator's border


def _asking(pre_transform: object, stock_letterbox: Any) -> Callable[[object, object], list[Placing | None]]:
    """``pre_transform`` that returns where each picture goes; None for one that the operator cannot put there."""

    class Asked(stock_letterbox):
        def apply_image(self, labels: dict[str, object], params: dict[str, Any]) -> dict[str, Any]:
            width, height = params["new_unpad"]
            top, bottom, left, right = (params[side] for side in ("top", "bottom", "left", "right"))
            known = self.padding_value == GREY and self.interpolation == cv2.INTER_LINEAR
            size = (top + height + bottom, left + width + right)
            whole = known and min(top, bottom, left, right) >= 0
            labels["img"] = Placing(height, width, top, left, size) if whole else None
            return labels

    return with_names(pre_transform, LetterBox=Asked)


def preprocessing(stock: Callable, stock_pre_transform: Callable, module: ModuleType) -> Callable:
    """``BasePredictor.preprocess`` whose lists of pictures go through :func:`letterbox`; all else gets stock's."""
    stock_letterbox = namespace(module).get("LetterBox")
    where = _asking(stock_pre_transform, stock_letterbox)

    @functools.wraps(stock)
    def preprocess(self: Predictor, im: Any) -> Tensor:
        if type(self).pre_transform is not stock_pre_transform or "pre_transform" in vars(self):
            return stock(self, im)  # a predictor with a pre_transform of its own keeps it
        if namespace(module).get("LetterBox") is not stock_letterbox or not fits(im):
            return stock(self, im)
        device = torch.device(self.device)
        placings = [placing for placing in where(self, im) if placing is not None]
        if device.type not in ("cpu", "cuda") or len(placings) != len(im) or len({p.size for p in placings}) != 1:
            return stock(self, im)
        return letterbox(im, placings, device, torch.float16 if self.model.fp16 else torch.float32)

    return preprocess


def sourcing(stock: Callable) -> Callable:
    """``BasePredictor.setup_source`` that has JPEG files decoded on the predictor's GPU."""

    @functools.wraps(stock)
    def setup_source(self: Any, *args: object, **kwargs: object) -> None:
        stock(self, *args, **kwargs)
        if str(self.device).startswith("cuda"):  # None before the model is there
            decode_on(torch.device(self.device), self.dataset)

    return setup_source


def decode_on(device: torch.device, dataset: object) -> None:
    """Have a ``LoadImagesAndVideos`` read pictures of JPEG files there. Other loaders stay as they are."""
    from ultralytics.data.loaders import LoadImagesAndVideos

    if type(dataset) is not LoadImagesAndVideos:
        return
    stock = LoadImagesAndVideos.__next__
    stock_imread: Any = getattr(stock, "__globals__", {}).get("imread")
    if not is_code_of(stock_imread, "ultralytics"):
        return  # somebody else's
    following = {"__next__": with_names(stock, imread=imread_on(device, stock_imread))}
    dataset.__class__ = type(LoadImagesAndVideos.__name__, (FiledAsStock, LoadImagesAndVideos), following)


def prepared(predictor: Any, preprocess: Callable[..., Tensor]) -> list[Tensor]:
    """What ``preprocess`` makes of small pictures for this class of predictors."""
    picture = np.arange(3 * 40 * 31, dtype=np.uint8).reshape(31, 40, 3)
    cases = [
        ([picture], "pt", False, True, False),
        ([picture[:20], picture[:20, :17]], "pt", False, True, True),
        ([picture[:, :, :1]], "onnx", False, True, False),
        ([picture], "onnx", True, False, False),
    ]
    found = []
    for pictures, kind, dynamic, rect, half in cases:
        model = SimpleNamespace(format=kind, dynamic=dynamic, fp16=half, stride=32)
        settings = {"imgsz": [64, 96], "args": SimpleNamespace(rect=rect), "model": model, "device": "cpu"}
        probe = type("Probe", (predictor,), {"__init__": lambda self: None})()
        vars(probe).update(settings)
        found.append(preprocess(probe, pictures))
    return found
