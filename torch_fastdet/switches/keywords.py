"""Types the keywords of ``patch()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar, get_type_hints

from typing_extensions import TypedDict

from torch_fastdet.patching.protocols import Function

F = TypeVar("F", bound=Function)


class Switches(TypedDict, total=False):
    """List the switches of both frameworks: True switches one on, and False leaves it out."""

    fastdet: bool | None  #: every switch that applies
    bbox_iou_optim: bool | None  #: IoU in the losses, and in target assignment
    upsample_optim: bool | None  #: nearest-neighbour upsampling by two
    loss_optim: bool | None  #: the whole loss
    nms_optim: bool | None  #: non-maximum suppression, and decoding in YOLOv5
    mask_optim: bool | None  #: masks of detections
    predict_optim: bool | None  #: prediction, from files and images to results
    val_optim: bool | None  #: matching in validation, the confusion matrix and average precision
    loader_optim: bool | None  #: the data loaders
    multi_tensor_optimizer: bool | None  #: the optimizer, the moving average, unscaling and clipping
    bn_act_optim: bool | None  #: BatchNorm and activation
    channels_last: bool | None  #: NHWC memory where it is faster
    cuda_graph: bool | None  #: the model's passes as CUDA graphs
    resume_exact: bool | None  #: a resumed training has the bits of one that was not stopped
    letterbox_optim: bool | None  #: the same as predict_optim


class UltralyticsSwitches(Switches, total=False):
    """List the switches of Ultralytics."""

    track_optim: bool | None  #: the trackers


def named_by(keywords: type) -> Callable[[F], F]:
    """Return a decorator that shows the keywords in the signature of ``patch(**switches)``, for editors that ask at run time."""

    def decorate(patch: F) -> F:
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in get_type_hints(keywords).items()
        ]
        vars(patch)["__signature__"] = inspect.Signature(parameters, return_annotation="tuple[str, ...]")
        return patch

    return decorate
