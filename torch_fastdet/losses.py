"""Wraps :mod:`torch_fastdet.ops` as modules that compute losses."""

from __future__ import annotations

import torch

from torch_fastdet import ops

__all__ = ["IoULoss"]


class IoULoss(torch.nn.Module):
    """Compute 1 - IoU of pairs of boxes (..., 4), reduced, in one pass over them.

    Gradients go to both boxes, the reduction is in a fixed order, and the result is that of :func:`torch_fastdet.ops.iou_loss`.
    The module works in TorchScript and ``torch.compile(fullgraph=True)``.

    Args:
        kind: "iou", "giou", "diou" or "ciou".
        xywh: Boxes are center x, center y, width, height in any one unit. False: they are corners.
        reduction: "mean", "sum" or "none".
        eps: As in :func:`torch_fastdet.ops.bbox_iou`.
    """

    def __init__(self, kind: str = "ciou", xywh: bool = True, reduction: str = "mean", eps: float = 1e-7) -> None:
        super().__init__()
        nothing = torch.empty(0, 4, device="cpu")
        ops.iou_loss(nothing, nothing, kind, bool(xywh), reduction, eps)  # which raises errors of the options
        self.kind = kind
        self.xywh = bool(xywh)
        self.reduction = reduction
        self.eps = float(eps)

    def forward(self, box1: torch.Tensor, box2: torch.Tensor) -> torch.Tensor:
        return ops.iou_loss(box1, box2, self.kind, self.xywh, self.reduction, self.eps)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, xywh={self.xywh}, reduction={self.reduction!r}, eps={self.eps}"
