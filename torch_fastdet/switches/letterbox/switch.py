"""``letterbox_optim``: images to a network's input by one operator."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch_fastdet.patching.evidence import OPENCV, Behaves, Signature
from torch_fastdet.patching.switch import GPU, Active, Switch, Target
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE, ultralytics, yolov5


def _auto_shape(_: Active, stock: Callable[..., object], stock_class: type) -> object:
    from torch_fastdet.switches.letterbox import auto_shape  # with cv2, which few of ours need

    return auto_shape.detecting(stock_class, stock, sys.modules[stock_class.__module__])


def _shaped(stock_class: Any) -> tuple[list[object], list[object]]:
    from torch_fastdet.switches.letterbox.auto_shape import detecting, prepared

    module, stock = sys.modules[stock_class.__module__], stock_class.forward
    ours = detecting(stock_class, stock, module, devices=("cpu",))
    return prepared(stock_class, stock, module), prepared(stock_class, ours, module)


def _load_images(_: Active, stock: Callable[..., object], __: type) -> object:
    from torch_fastdet.switches.letterbox import yolov5 as files

    return files.reading(stock)


YOLOV5 = Switch(
    "letterbox_optim",
    "letterbox and division by 255 for AutoShape models (torch.hub) as one operator on the GPU, and JPEG files of detect.py, "
    "segment/predict.py and classify/predict.py decoded there; needs a GPU",
    (
        # `letterbox` itself, which the loaders of detect.py call, stays: they want an array on the host (docs/yolov5.md).
        Target(
            yolov5("models.common"),
            "AutoShape.forward",
            make=_auto_shape,
            evidence=(Signature(("self", "ims", "size", "augment", "profile")),),
            class_evidence=(Behaves("its AutoShape", _shaped, 0, YOLOV5_REFERENCE),),
            own=True,
            note=" (pictures by torch_fastdet.ops.image_letterbox)",
        ),
        Target(
            yolov5("utils.dataloaders"),
            "LoadImages.__next__",
            make=_load_images,
            evidence=(Signature(("self",)),),
            own=True,
            otherwise="say",
            note=" (JPEG files by torch_fastdet.ops.decode_jpeg)",
        ),
    ),
    modules=("models.common", "utils.dataloaders"),
    evidence=(GPU,),
)


def _preprocess(_: Active, stock: Callable[..., object], predictor: Any) -> Callable[..., object]:
    from torch_fastdet.switches.letterbox import ultralytics as letterbox  # with cv2, which few of ours need

    return letterbox.preprocessing(stock, predictor.pre_transform, importlib.import_module(predictor.__module__))


def _prepared(predictor: Any) -> tuple[object, object]:
    from torch_fastdet.switches.letterbox.ultralytics import prepared

    stock = predictor.preprocess
    return prepared(predictor, stock), prepared(predictor, _preprocess(None, stock, predictor))  # type: ignore[arg-type]


def _setup_source(_: Active, stock: Callable[..., object], __: object) -> Callable[..., object]:
    from torch_fastdet.switches.letterbox import ultralytics as letterbox

    return letterbox.sourcing(stock)


ULTRALYTICS = Switch(
    "letterbox_optim",
    "letterbox, BGR to RGB and division by 255 of the predictor as one operator, on the GPU where there is one; JPEG files "
    "are decoded there",
    (
        Target(
            ultralytics("engine.predictor"),
            "BasePredictor.preprocess",
            make=_preprocess,
            evidence=(Signature(("self", "im")),),
            class_evidence=(
                Signature(("self", "im"), "pre_transform"),
                Behaves("its preprocess", _prepared, 0, REFERENCE),
            ),
            own=True,
            note=" (by torch_fastdet.ops.image_letterbox)",
        ),
        Target(
            ultralytics("engine.predictor"),
            "BasePredictor.setup_source",
            make=_setup_source,
            after="BasePredictor.preprocess",
            otherwise="say",
            note=" (JPEG files by torch_fastdet.ops.decode_jpeg on a GPU)",
        ),
    ),
    modules=("engine.predictor",),
    evidence=(OPENCV,),
)
