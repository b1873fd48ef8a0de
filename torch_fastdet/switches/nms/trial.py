"""Tries YOLOv5's decoding and suppression, or those of a fork, on small cases that show what they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Function, Head, Names
from torch_fastdet.suppression import ultralytics_non_max_suppression
from torch_fastdet.suppression import yolov5_non_max_suppression as non_max_suppression
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE
from torch_fastdet.switches.loss.yolov5_trial import ANCHORS, CLASSES, SIZES, DetectLike, heads


def _prediction(scores: int) -> Tensor:
    """Return boxes whose centers are on a grid, so that they overlap, with so many scores each from .05 to .95, without ties."""
    count = torch.arange(24)
    x, y = 20.0 + 7 * count.remainder(6), 20.0 + 9 * count.div(6, rounding_mode="floor")
    values = 0.5 + 0.45 * torch.linspace(0.0, 37.0, len(count) * scores).sin()
    return torch.cat((torch.stack((x, y, 16 + x.sin(), 20 + y.cos()), 1), values.view(len(count), -1)), 1)


def _kept(function: Function, prediction: Tensor) -> list[Tensor]:
    kinds: tuple[Names, ...] = ({}, {"multi_label": True}, {"agnostic": True}, {"classes": [1]}, {"max_det": 3})
    return [image for kind in kinds for image in function(prediction.clone(), 0.2, 0.35, **kind)]


def _rows(function: Function) -> list[Tensor]:
    prediction = _prediction(1 + CLASSES).repeat(2, 1, 1)
    prediction[1, :, 4] *= 0.7
    return _kept(function, prediction)


def _ultralytics_rows(function: Function) -> list[Tensor]:
    return _kept(function, _prediction(CLASSES).T[None])


def _decoded(detect: Head) -> tuple[Tensor, Tensor]:
    like = DetectLike()
    head = detect.__new__(detect)
    nn.Module.__init__(head)
    head.nc, head.no, head.nl, head.na = CLASSES, 5 + CLASSES, len(SIZES), ANCHORS
    head.grid, head.anchor_grid = ([torch.empty(0) for _ in SIZES] for _ in range(2))
    head.m, head.inplace, head.stride = nn.ModuleList(nn.Identity() for _ in SIZES), True, like.stride
    head.register_buffer("anchors", like.anchors)
    maps = [x.permute(0, 1, 4, 2, 3).flatten(1, 2) for x in heads()]
    return head.eval()(list(maps))[0], ops.yolov5_decode(heads(), like.anchors, like.stride.tolist())


def _suppression(rows: Function, ours: Function, reference: str) -> Behaves:
    return Behaves("its non_max_suppression", lambda stock: (rows(stock), rows(ours)), 1e-4, reference)


SUPPRESSION = _suppression(_rows, non_max_suppression, YOLOV5_REFERENCE)
ULTRALYTICS_SUPPRESSION = _suppression(_ultralytics_rows, ultralytics_non_max_suppression, REFERENCE)
DECODING = Behaves("its Detect", _decoded, 1e-4, YOLOV5_REFERENCE)
