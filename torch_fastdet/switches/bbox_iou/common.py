"""Provides ``bbox_iou`` under the signature of both frameworks, and a small case that tells it from another one."""

from __future__ import annotations

import torch

from torch_fastdet import ops
from torch_fastdet._torch.tensors import as_float
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Function


def bbox_iou(
    box1: torch.Tensor,
    box2: torch.Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> torch.Tensor:
    """Compute IoU, GIoU, DIoU or CIoU of boxes (..., 4) as a new tensor (..., 1): ``ultralytics.utils.metrics.bbox_iou``.

    Where the original function gives NaN (boxes without height) this gives a finite value and gradient.

    Arguments are those of :func:`torch_fastdet.ops.bbox_iou`; integers count as float32.
    """
    return ops.bbox_iou(as_float(box1), as_float(box2), xywh, GIoU, DIoU, CIoU, eps)


def _ious(function: Function) -> list[torch.Tensor]:
    boxes = torch.tensor([[30.0, 20.0, 12.0, 9.0], [33.0, 22.0, 5.0, 16.0], [70.0, 60.0, 8.0, 8.0]])
    kinds: tuple[dict[str, object], ...] = ({}, {"GIoU": True}, {"DIoU": True}, {"CIoU": True})
    return [function(boxes[:2], boxes[1:], xywh=True, **kind) for kind in kinds]


def iou(drop_in: Function, reference: str) -> Behaves:
    return Behaves("its bbox_iou", lambda stock: (_ious(stock), _ious(drop_in)), 1e-5, reference)
