"""Small cases in which YOLOv5's code, or that of a fork, shows what it computes.

People change YOLOv5's loss, IoU, suppression and average in their own checkouts, under stock's names and with stock's parameters. What they have
changed must not be replaced by stock's arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.switches import cases
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss
from torch_fastdet.yolov5.dropins import bbox_iou, non_max_suppression

REFERENCE = "YOLOv5 7.0"
ANCHORS, CLASSES, SIZES, CHANNELS = 2, 3, (16, 8, 4), 4
HYP = {"box": 0.05, "cls": 0.5, "cls_pw": 1.2, "obj": 1.0, "obj_pw": 0.9, "anchor_t": 4.0}
# No two of them share a cell, where stock's unordered write may take either.
TARGETS = [[0, 0, 0.22, 0.31, 0.2, 0.25], [0, 2, 0.7, 0.8, 0.4, 0.3], [1, 1, 0.45, 0.6, 0.15, 0.2]]
OPTIONS = ({"fl_gamma": 0.0, "label_smoothing": 0.0}, {"fl_gamma": 1.5, "label_smoothing": 0.1})


class _Detect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.na, self.nc, self.nl = ANCHORS, CLASSES, len(SIZES)
        self.anchors = torch.tensor([[[1.0, 1.2], [2.0, 1.6]]]).repeat(self.nl, 1, 1)
        self.stride = torch.tensor([8.0, 16.0, 32.0])


class _Model(nn.Module):
    def __init__(self, options: dict[str, float]) -> None:
        super().__init__()
        self.model = nn.Sequential(_Detect())
        self.weight = nn.Parameter(torch.zeros(1))
        self.hyp = {**HYP, **options}


def _heads() -> list[Tensor]:
    shapes = [(2, ANCHORS, size, size, 5 + CLASSES) for size in SIZES]
    return [
        torch.linspace(0.0, 40.0 + i, torch.Size(shape).numel()).sin().view(shape) for i, shape in enumerate(shapes)
    ]


def _losses(kind: type) -> list[Tensor]:
    found: list[Tensor] = []
    for options in OPTIONS:
        found += kind(_Model(options))(_heads(), torch.tensor(TARGETS))
    return [loss.reshape(-1) for loss in found]


def _rows(function: Any) -> list[Tensor]:
    count = 24
    # Centers on a grid whose boxes overlap; scores from .05 to .95 without ties.
    x, y = 20.0 + 7 * torch.arange(count).remainder(6), 20.0 + 9 * torch.arange(count).div(6, rounding_mode="floor")
    scores = 0.5 + 0.45 * torch.linspace(0.0, 37.0, count * (1 + CLASSES)).sin().view(count, -1)
    boxes = torch.stack((x, y, 16 + x.sin(), 20 + y.cos()), 1)
    prediction = torch.cat((boxes, scores), 1).repeat(2, 1, 1)
    prediction[1, :, 4] *= 0.7
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"multi_label": True},
        {"agnostic": True},
        {"classes": [1]},
        {"max_det": 3},
    )
    return [image for kind in kinds for image in function(prediction.clone(), 0.2, 0.35, **kind)]


def _decoded(detect: Any) -> tuple[Tensor, Tensor]:
    like = _Detect()
    head = detect.__new__(detect)
    nn.Module.__init__(head)
    head.nc, head.no, head.nl, head.na = CLASSES, 5 + CLASSES, len(SIZES), ANCHORS
    head.grid, head.anchor_grid = ([torch.empty(0) for _ in SIZES] for _ in range(2))
    head.m, head.inplace, head.stride = nn.ModuleList(nn.Identity() for _ in SIZES), True, like.stride
    head.register_buffer("anchors", like.anchors)
    maps = [x.permute(0, 1, 4, 2, 3).flatten(1, 2) for x in _heads()]
    return head.eval()(list(maps))[0], ops.yolov5_decode(_heads(), like.anchors, like.stride.tolist())


def _segmentation_losses(kind: type) -> list[Tensor]:
    def wave(*shape: int) -> Tensor:
        return torch.linspace(0.0, 50.0, torch.Size(shape).numel()).cos().view(shape)

    found: list[Tensor] = []
    for overlap in (False, True):
        model = _Model(OPTIONS[0])
        detect: Any = model.model[-1]
        detect.nm = CHANNELS
        heads = [torch.cat((head, wave(*head.shape[:4], CHANNELS)), -1) for head in _heads()]
        masks = wave(2 if overlap else len(TARGETS), 48, 48).mul(2).round().abs()
        preds = heads, wave(2, CHANNELS, 32, 32)
        found += kind(model, overlap=overlap)(preds, torch.tensor(TARGETS), masks)
    return [loss.reshape(-1) for loss in found]


LOSS = Behaves("its ComputeLoss", lambda stock: (_losses(stock), _losses(ComputeLoss)), 1e-4, REFERENCE)
SEGMENTATION_LOSS = Behaves(
    "its ComputeLoss of segmentation",
    lambda stock: (_segmentation_losses(stock), _segmentation_losses(SegmentationLoss)),
    1e-4,
    REFERENCE,
)
AVERAGE = cases.moving_average(ModelEMA, REFERENCE)
IOU = cases.iou(bbox_iou, REFERENCE)
SUPPRESSION = Behaves(
    "its non_max_suppression", lambda stock: (_rows(stock), _rows(non_max_suppression)), 1e-4, REFERENCE
)
DECODING = Behaves("its Detect", _decoded, 1e-4, REFERENCE)
