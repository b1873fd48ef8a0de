"""The predictor's letterbox, BGR to RGB, HWC to CHW and division by 255 of a list of pictures, by one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.shapes import Predictor
from torch_fastdet.hosts.shared.letterbox import fits, letterbox
from torch_fastdet.ops.letterbox import place


def preprocessing(stock: Callable, stock_pre_transform: Callable, module: ModuleType) -> Callable:
    """``BasePredictor.preprocess`` whose lists of pictures go through :func:`letterbox`; all else gets stock's."""
    stock_letterbox = namespace(module).get("LetterBox")

    @functools.wraps(stock)
    def preprocess(self: Predictor, im: Any) -> Tensor:
        if type(self).pre_transform is not stock_pre_transform or "pre_transform" in vars(self):
            return stock(self, im)  # a predictor with a pre_transform of its own keeps it
        if namespace(module).get("LetterBox") is not stock_letterbox or not fits(im):
            return stock(self, im)
        device = torch.device(self.device)
        model = self.model
        rectangle = len({x.shape for x in im}) == 1 and self.args.rect and not self.scale_fill
        shrinks = model.format == "pt" or (getattr(model, "dynamic", False) and model.format != "imx")
        size = [self.imgsz] * 2 if isinstance(self.imgsz, int) else self.imgsz
        placings = [place(x.shape[:2], size, rectangle and shrinks, self.scale_fill, int(model.stride)) for x in im]
        if device.type not in ("cpu", "cuda") or len({p.size for p in placings}) != 1:
            return stock(self, im)
        return letterbox(im, placings, device, torch.float16 if model.fp16 else torch.float32)

    return preprocess


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
