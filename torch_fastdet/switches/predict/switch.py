"""``predict_optim``: from files and images to results."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch_fastdet.patching.evidence import OPENCV, Behaves, Signature
from torch_fastdet.patching.switch import GPU, Active, Make, Switch, Target
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE, ultralytics, yolov5


def _auto_shape(_: Active, stock: Callable[..., object], stock_class: type) -> object:
    from torch_fastdet.switches.predict import auto_shape  # with cv2, which few of ours need

    return auto_shape.detecting(stock_class, stock, sys.modules[stock_class.__module__])


def _shaped(stock_class: Any) -> tuple[list[object], list[object]]:
    from torch_fastdet.switches.predict.auto_shape import detecting, prepared

    module, stock = sys.modules[stock_class.__module__], stock_class.forward
    ours = detecting(stock_class, stock, module, devices=("cpu",))
    return prepared(stock_class, stock, module), prepared(stock_class, ours, module)


def _load_images(_: Active, stock: Callable[..., object], __: type) -> object:
    from torch_fastdet.switches.predict import yolov5 as files

    return files.reading(stock)


YOLOV5 = Switch(
    "predict_optim",
    "letterbox and division by 255 for AutoShape models (torch.hub) as one operator on the GPU; files of detect.py, "
    "segment/predict.py and classify/predict.py are read ahead by threads; needs a GPU",
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
            note=" (files are read ahead)",
        ),
    ),
    modules=("models.common", "utils.dataloaders"),
    evidence=(GPU,),
    formerly="letterbox_optim",
)


def _in_pipeline(name: str) -> Make:
    def make(active: Active, stock: Any, owner: Any) -> object:
        from torch_fastdet.switches.predict import ultralytics as predictors  # with cv2, which few of ours need

        return getattr(predictors, name)(active, stock, owner)

    return make


def _result(name: str) -> Make:
    def make(active: Active, stock: Any, owner: Any) -> object:
        from torch_fastdet.switches.predict import results

        if name == "lazy_image":
            active.patches.at_end.append(functools.partial(results.read_all, owner))
        return getattr(results, name)(active, stock, owner)

    return make


def _preprocess(active: Active, stock: Callable[..., object], predictor: Any) -> Callable[..., object]:
    from torch_fastdet.switches.predict import ultralytics as predictors

    parts = active.shared(predictors.parts_of)
    return predictors.preprocessing(
        stock, predictor.pre_transform, importlib.import_module(predictor.__module__), parts
    )


def _prepared(predictor: Any) -> tuple[object, object]:
    from torch_fastdet.switches.predict.ultralytics import Parts, prepared, preprocessing

    stock, module = predictor.preprocess, importlib.import_module(predictor.__module__)
    ours = preprocessing(stock, predictor.pre_transform, module, Parts())
    return prepared(predictor, stock), prepared(predictor, ours)


def _predictor(name: str, make: Make, **options: Any) -> Target:
    """A method of ``BasePredictor``."""
    return Target(ultralytics("engine.predictor"), f"BasePredictor.{name}", make=make, **options)


def _detector(name: str, make: str, *parameters: str) -> Target:
    return Target(
        ultralytics("models.yolo.detect.predict"),
        f"DetectionPredictor.{name}",
        make=_in_pipeline(make),
        evidence=(Signature(("self", *parameters)),),
        own=True,
        otherwise="say",
        note=" (of the pipeline's batches)",
    )


ULTRALYTICS = Switch(
    "predict_optim",
    "prediction as one pipeline on a GPU: files are read ahead, JPEG files decoded there, and the next batch runs before this one is "
    "looked at; letterbox and division by 255 as one operator everywhere",
    (
        _predictor(
            "preprocess",
            _preprocess,
            evidence=(Signature(("self", "im")),),
            class_evidence=(
                Signature(("self", "im"), "pre_transform"),
                Behaves("its preprocess", _prepared, 0, REFERENCE),
            ),
            own=True,
            note=" (by torch_fastdet.ops.image_letterbox)",
        ),
        *(
            _predictor(
                name,
                _in_pipeline(make),
                own=True,
                after="BasePredictor.preprocess",
                otherwise="say",
                note=" (images in batches that are ahead, on a GPU)",
            )
            for name, make in (
                ("inference", "inferring"),
                ("stream_inference", "streaming"),
                ("setup_source", "sourcing"),
            )
        ),
        _detector("postprocess", "postprocessing", "preds", "img", "orig_imgs", "kwargs"),
        _detector("construct_result", "constructing", "pred", "img", "orig_img", "img_path"),
        Target(ultralytics("engine.results"), "Results.orig_img", make=_result("lazy_image"), adds=True, quiet=True),
        Target(ultralytics("engine.results"), "Results.new", make=_result("renewing"), quiet=True),
    ),
    modules=("engine.predictor",),
    evidence=(OPENCV,),
    formerly="letterbox_optim",
)
