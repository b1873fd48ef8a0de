"""Small cases in which stock's code of both hosts shows what it computes.

No random numbers are drawn: a training's own stay what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_fastdet.patching.evidence import Behaves


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.register_buffer("mean", torch.tensor([0.5]))


def _averages(kind: Any) -> list[object]:
    """At the beginning and late in its ramp."""
    found: list[object] = []
    for updates in (0, 1500):
        model: Any = _Model()
        ema = kind(model, updates=updates)
        for _ in range(2):
            model.weight.mul_(1.5)
            model.mean.add_(8.0)
            ema.update(model)
        found += [ema.ema.weight.detach(), ema.ema.mean, torch.tensor([float(ema.updates), ema.decay(2000)])]
    return found


def moving_average(drop_in: object, reference: str) -> Behaves:
    """A ModelEMA moves as ``drop_in`` does."""
    return Behaves("its moving average", lambda stock: (_averages(stock), _averages(drop_in)), 1e-6, reference)


def _ious(function: Any) -> list[torch.Tensor]:
    boxes = torch.tensor([[30.0, 20.0, 12.0, 9.0], [33.0, 22.0, 5.0, 16.0], [70.0, 60.0, 8.0, 8.0]])
    kinds: tuple[dict[str, object], ...] = ({}, {"GIoU": True}, {"DIoU": True}, {"CIoU": True})
    return [function(boxes[:2], boxes[1:], xywh=True, **kind) for kind in kinds]


def iou(drop_in: object, reference: str) -> Behaves:
    """A bbox_iou gives what ``drop_in`` gives, of any kind."""
    return Behaves("its bbox_iou", lambda stock: (_ious(stock), _ious(drop_in)), 1e-5, reference)


# Detections and labels that the rules of matching match differently. The second detection overlaps most with the first label,
# which the first detection gets, and less with the second label. By the rule "best" it then gets nothing, by "greedy" the second
# label (:func:`torch_fastdet.ops.match_detections`).
#: (n, 6): x1, y1, x2, y2, confidence, class.
DETECTIONS = torch.tensor(
    [[0.0, 0, 10, 10, 0.9, 1], [0, 0, 10, 9, 0.8, 1], [30, 30, 40, 40, 0.7, 0], [80, 80, 90, 90, 0.6, 1]],
    device="cpu",  # whatever the user's defaults are
    dtype=torch.float32,
)
#: (m, 5): class, x1, y1, x2, y2.
LABELS = DETECTIONS.new_tensor([[1, 0, 0, 10, 10], [1, 0, 0, 10, 7], [1, 30, 30, 40, 41], [0, 60, 60, 70, 70]])
#: IoU thresholds.
IOUV = DETECTIONS.new_tensor([0.5, 0.75, 0.95])
