"""Declares ``predict_optim``: from files and images to results."""

from __future__ import annotations

from typing import Any

from torch_fastdet.patching.evidence import OPENCV, Behaves, SameCode, Signature
from torch_fastdet.patching.switch import GPU, Make, Switch, Target
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE, by, ultralytics, yolov5

AUTO_SHAPE = SameCode(
    {"": ("682ef1b5", "fabc6950", "3d64e9fd"), "letterbox": ("c04b349e", "f051914d")},
    f"{YOLOV5_REFERENCE} or of GitHub's head",
)

YOLOV5 = Switch(
    "predict_optim",
    "letterbox and division by 255 for AutoShape models (torch.hub) as one operator on the GPU; files of detect.py, "
    "segment/predict.py and classify/predict.py are read ahead by threads; needs a GPU",
    (
        # `letterbox` itself is not replaced, because the loaders of detect.py call it and want an array on the host (docs/yolov5.md).
        Target(
            yolov5("models.common"),
            "AutoShape.forward",
            make=by("predict.auto_shape", "detecting"),
            evidence=(AUTO_SHAPE,),
            own=True,
        ),
        Target(
            yolov5("utils.dataloaders"),
            "LoadImages.__next__",
            make=by("predict.yolov5", "read_ahead"),
            evidence=(Signature(("self",)),),
            own=True,
            otherwise="say",
        ),
    ),
    modules=("models.common", "utils.dataloaders"),
    evidence=(GPU,),
    formerly="letterbox_optim",
)


def _predictor(name: str, make: Make, **options: Any) -> Target:
    return Target(ultralytics("engine.predictor"), f"BasePredictor.{name}", make=make, **options)


def _detector(name: str, make: str, *parameters: str) -> Target:
    return Target(
        ultralytics("models.yolo.detect.predict"),
        f"DetectionPredictor.{name}",
        make=by("predict.ultralytics", make),
        evidence=(Signature(("self", *parameters)),),
        own=True,
        otherwise="say",
    )


ULTRALYTICS = Switch(
    "predict_optim",
    "prediction as one pipeline on a GPU: files are read ahead, JPEG files decoded there, and the next batch runs before this one is "
    "looked at; letterbox and division by 255 as one operator everywhere",
    (
        _predictor(
            "preprocess",
            by("predict.ultralytics", "preprocessing"),
            evidence=(Signature(("self", "im")),),
            class_evidence=(
                Signature(("self", "im"), "pre_transform"),
                Behaves("its preprocess", by("predict.ultralytics", "prepared"), 0, REFERENCE),
            ),
            own=True,
        ),
        *(
            _predictor(
                name, by("predict.ultralytics", make), own=True, after="BasePredictor.preprocess", otherwise="say"
            )
            for name, make in (
                ("inference", "inferring"),
                ("stream_inference", "streaming"),
                ("setup_source", "sourcing"),
            )
        ),
        _detector("postprocess", "postprocessing", "preds", "img", "orig_imgs", "kwargs"),
        _detector("construct_results", "constructing", "preds", "img", "orig_imgs"),
        Target(
            ultralytics("models.rtdetr.predict"),
            "RTDETRPredictor.postprocess",
            make=by("predict.ultralytics", "selecting"),
            evidence=(
                Signature(("self", "preds", "img", "orig_imgs")),
                Behaves("its postprocess", by("predict.ultralytics", "selected"), 0, REFERENCE),
            ),
            own=True,
            otherwise="say",
        ),
        Target(
            ultralytics("engine.results"),
            "Results.orig_img",
            make=by("predict.ultralytics", "lazy_image"),
            adds=True,
            quiet=True,
        ),
        Target(ultralytics("engine.results"), "Results.new", make=by("predict.results", "renew"), quiet=True),
    ),
    modules=("engine.predictor",),
    evidence=(OPENCV,),
    formerly="letterbox_optim",
)
