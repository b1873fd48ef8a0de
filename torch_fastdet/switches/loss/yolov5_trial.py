"""Tries YOLOv5's losses, or those of a fork, on small cases that show what they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Head, Names, Stock
from torch_fastdet.patching.replace import stand_in
from torch_fastdet.patching.switch import Active
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
    def __init__(self, options: Names) -> None:
        super().__init__()
        self.model = nn.Sequential(DetectLike())
        self.weight = nn.Parameter(torch.zeros(1))
        self.hyp = {**HYP, **options}


def heads() -> list[Tensor]:
    shapes = [(2, ANCHORS, size, size, 5 + CLASSES) for size in SIZES]
    return [
        torch.linspace(0.0, 40.0 + i, torch.Size(shape).numel()).sin().view(shape) for i, shape in enumerate(shapes)
    ]


def _losses(kind: type, *hyps: Names) -> list[Tensor]:
    found: list[Tensor] = []
    for hyp in hyps or OPTIONS:
        found += kind(ModelLike(hyp))(heads(), torch.tensor(TARGETS))
    return [loss.reshape(-1) for loss in found]


def _segmentation_losses(kind: type, hyp: Names = OPTIONS[0]) -> list[Tensor]:
    def wave(*shape: int) -> Tensor:
        return torch.linspace(0.0, 50.0, torch.Size(shape).numel()).cos().view(shape)

    found: list[Tensor] = []
    for overlap in (False, True):
        model = ModelLike(hyp)
        detect: Head = model.model[-1]
        detect.nm = CHANNELS
        maps = [torch.cat((head, wave(*head.shape[:4], CHANNELS)), -1) for head in heads()]
        masks = wave(2 if overlap else len(TARGETS), 48, 48).mul(2).round().abs()
        preds = maps, wave(2, CHANNELS, 32, 32)
        found += kind(model, overlap=overlap)(preds, torch.tensor(TARGETS), masks)
    return [loss.reshape(-1) for loss in found]


def trial_of(ours: type[ComputeLoss], *hyp: Names) -> Behaves:
    """Return the trial of the loss that ``ours`` replaces, with a training's hyperparameters if there are any: they may choose another loss."""
    losses, of_masks = (_segmentation_losses, " of segmentation") if ours is SegmentationLoss else (_losses, "")
    what = f"its ComputeLoss{of_masks}{' with the hyperparameters of this training' if hyp else ''}"
    return Behaves(what, lambda stock: (losses(stock, *hyp), losses(ours, *hyp)), 1e-4, YOLOV5_REFERENCE)


def in_place(active: Active, stock: type, ours: type[ComputeLoss]) -> type:
    """Return the class that replaces ``stock`` by ``ours``, unless hyperparameters choose another loss; pickles hold an object of ``stock``."""

    def make(*args: Stock, **kwargs: Stock) -> object:
        made = ours(*args, **kwargs)
        if (obstacle := trial_of(ours, made.hyp).obstacle(stock)) is not None:
            active.cannot_apply(obstacle)
            return stock(*args, **kwargs)
        made._stock = stock
        return made

    return stand_in(active.name, stock, ours, make)
