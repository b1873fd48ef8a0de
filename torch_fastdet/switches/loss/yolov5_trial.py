"""Tries YOLOv5's losses, or those of a fork, on small cases that show what they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Head
from torch_fastdet.switches.frameworks import YOLOV5_REFERENCE
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss

ANCHORS, CLASSES, SIZES, CHANNELS = 2, 3, (16, 8, 4), 4
HYP = {"box": 0.05, "cls": 0.5, "cls_pw": 1.2, "obj": 1.0, "obj_pw": 0.9, "anchor_t": 4.0}
# No two targets share a cell, for which the original's unordered write could take either.
TARGETS = [[0, 0, 0.22, 0.31, 0.2, 0.25], [0, 2, 0.7, 0.8, 0.4, 0.3], [1, 1, 0.45, 0.6, 0.15, 0.2]]
OPTIONS = ({"fl_gamma": 0.0, "label_smoothing": 0.0}, {"fl_gamma": 1.5, "label_smoothing": 0.1})


class DetectLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.na, self.nc, self.nl = ANCHORS, CLASSES, len(SIZES)
        self.anchors = torch.tensor([[[1.0, 1.2], [2.0, 1.6]]]).repeat(self.nl, 1, 1)
        self.stride = torch.tensor([8.0, 16.0, 32.0])


class ModelLike(nn.Module):
    def __init__(self, options: dict[str, float]) -> None:
        super().__init__()
        self.model = nn.Sequential(DetectLike())
        self.weight = nn.Parameter(torch.zeros(1))
        self.hyp = {**HYP, **options}


def heads() -> list[Tensor]:
    shapes = [(2, ANCHORS, size, size, 5 + CLASSES) for size in SIZES]
    return [
        torch.linspace(0.0, 40.0 + i, torch.Size(shape).numel()).sin().view(shape) for i, shape in enumerate(shapes)
    ]


def _losses(kind: type) -> list[Tensor]:
    found: list[Tensor] = []
    for options in OPTIONS:
        found += kind(ModelLike(options))(heads(), torch.tensor(TARGETS))
    return [loss.reshape(-1) for loss in found]


def _segmentation_losses(kind: type) -> list[Tensor]:
    def wave(*shape: int) -> Tensor:
        return torch.linspace(0.0, 50.0, torch.Size(shape).numel()).cos().view(shape)

    found: list[Tensor] = []
    for overlap in (False, True):
        model = ModelLike(OPTIONS[0])
        detect: Head = model.model[-1]
        detect.nm = CHANNELS
        maps = [torch.cat((head, wave(*head.shape[:4], CHANNELS)), -1) for head in heads()]
        masks = wave(2 if overlap else len(TARGETS), 48, 48).mul(2).round().abs()
        preds = maps, wave(2, CHANNELS, 32, 32)
        found += kind(model, overlap=overlap)(preds, torch.tensor(TARGETS), masks)
    return [loss.reshape(-1) for loss in found]


LOSS = Behaves("its ComputeLoss", lambda stock: (_losses(stock), _losses(ComputeLoss)), 1e-4, YOLOV5_REFERENCE)
SEGMENTATION_LOSS = Behaves(
    "its ComputeLoss of segmentation",
    lambda stock: (_segmentation_losses(stock), _segmentation_losses(SegmentationLoss)),
    1e-4,
    YOLOV5_REFERENCE,
)
