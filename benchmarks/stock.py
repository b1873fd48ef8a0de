"""Provide what users run today, from the installed packages, as the benchmarks' baselines.

Each function returns one of them as a callable, or None, reported once, if its package cannot be imported.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _or_none(get: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get)
    def call(*arguments: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return get(*arguments)
        except ImportError as error:
            _say(f"no rows of stock: {error}")
            return None

    return call


@functools.cache
def _say(line: str) -> None:
    print(line, flush=True)


def _without_time_limit(module: types.ModuleType) -> None:
    """Lift the limit of non_max_suppression, after which it returns nothing for later images."""
    module.time = types.SimpleNamespace(time=lambda: 0.0)  # type: ignore[attr-defined]


@_or_none
def yolov5_non_max_suppression() -> Callable[..., list[Tensor]]:
    from yolov5.utils import general

    _without_time_limit(general)
    return general.non_max_suppression


@_or_none
def yolov5_scale_boxes() -> Callable[..., Tensor]:
    from yolov5.utils.general import scale_boxes

    return scale_boxes


@_or_none
def yolov5_decode(
    anchors: Tensor, strides: list[float], classes: int, like: Tensor
) -> Callable[[list[Tensor]], Tensor]:
    """Run YOLOv5's Detect without its convolutions. `anchors` (nl, na, 2) are in cells; `like` has device and type."""
    from yolov5.models.yolo import Detect

    detect = Detect(classes, anchors.flatten(1).tolist(), [1] * len(strides))
    detect.stride = torch.tensor(strides, device=like.device)
    detect.m = nn.ModuleList(nn.Identity() for _ in strides)
    detect.to(like).eval()
    return lambda heads: detect(list(heads))[0]


@_or_none
def yolov5_bbox_iou() -> Callable[..., Tensor]:
    from yolov5.utils.metrics import bbox_iou

    return bbox_iou


@_or_none
def yolov5_loss(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    from yolov5.utils.loss import ComputeLoss

    return ComputeLoss(model)


@_or_none
def yolov5_segmentation_loss(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    from yolov5.utils.segment.loss import ComputeLoss

    return ComputeLoss(model, overlap=True)


@_or_none
def yolov5_ema(model: nn.Module) -> Any:
    from yolov5.utils.torch_utils import ModelEMA

    return ModelEMA(model)


@_or_none
def ultralytics_model(name: str) -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel(f"{name}.yaml", verbose=False)


@_or_none
def ultralytics_musgd() -> Any:
    from ultralytics.optim import MuSGD

    return MuSGD


@_or_none
def ultralytics_non_max_suppression() -> Callable[..., list[Tensor]]:
    from ultralytics.utils import nms

    _without_time_limit(nms)
    return nms.non_max_suppression


@_or_none
def ultralytics_decode(
    strides: list[float], classes: int, like: Tensor
) -> Callable[[list[Tensor], list[Tensor]], Tensor]:
    """Do what Ultralytics' Detect does in inference after its convolutions. `like` gives the device and the type."""
    from ultralytics.nn.modules.head import Detect

    detect = Detect(nc=classes, ch=(16,) * len(strides))
    detect.stride = torch.tensor(strides, device=like.device)
    detect.to(like).eval()

    def decode(boxes: list[Tensor], scores: list[Tensor]) -> Tensor:
        joined: dict[str, Any] = {
            key: torch.cat([x.flatten(2) for x in maps], 2) for key, maps in (("boxes", boxes), ("scores", scores))
        }
        return detect._inference(joined | {"feats": boxes})

    return decode
