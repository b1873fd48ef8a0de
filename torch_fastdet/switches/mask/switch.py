"""Declares ``mask_optim``: :mod:`torch_fastdet.masks` replaces the mask functions whose bits it gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_fastdet import masks
from torch_fastdet._say import counting
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Function, Names
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.frameworks import REFERENCE, YOLOV5_REFERENCE, ultralytics, yolov5


def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return prototypes 12 x 16, coefficients, and boxes in an image of 41 x 64.

    A letterbox's border of a multiple of 8 would give the same masks whether prototypes are enlarged before or after it is cut off.
    """
    g = torch.Generator().manual_seed(0)
    boxes = [[3.0, 5, 41, 33], [0, 0, 64, 40], [20.5, 10.5, 60.25, 38], [50, 30, 20, 10]]
    kind: Names = {"dtype": torch.float32, "device": "cpu"}  # whatever the user's defaults are
    return (
        torch.randn(4, 12, 16, generator=g, **kind),
        torch.randn(4, 4, generator=g, **kind),
        torch.tensor(boxes, **kind),
    )


def _masks(function: Function, name: str) -> list[object]:
    protos, coefficients, boxes = sample()
    if name == "crop_mask":  # both crop in place, or neither of them
        return [function(protos, boxes / 4), protos]
    ways = [((48, 64), False), ((48, 64), True)] if name == "process_mask" else [((41, 64),)]
    return [function(protos.clone(), coefficients.clone(), boxes.clone(), *way) for way in ways]


def _switch(framework: Callable[[str], tuple[str, ...]], module: str, reference: str, *names: str) -> Switch:
    """Return the switch of a framework whose ``module`` defines functions of these names, as ``reference`` does."""

    def target(name: str) -> Target:
        ours = getattr(masks, f"{framework.__name__}_{name}")
        case = Behaves(f"its {name}", lambda stock: (_masks(stock, name), _masks(ours, name)), 0.0, reference)
        gone = name == "process_mask_upsample"  # from YOLOv5's head, where nothing called it
        counted = counting("mask_optim", "masks", len)(ours)
        return Target(framework(module), name, counted, evidence=(case,), otherwise="nothing" if gone else "refuse")

    return Switch(
        "mask_optim",
        "masks of detections in one pass, without float masks at full size, in the validation, prediction and loss of segmentation",
        tuple(map(target, names)),
        modules=(module,),
    )


_NAMES = "process_mask", "process_mask_native", "crop_mask"
YOLOV5 = _switch(yolov5, "utils.segment.general", YOLOV5_REFERENCE, *_NAMES, "process_mask_upsample")
ULTRALYTICS = _switch(ultralytics, "utils.ops", REFERENCE, *_NAMES)
