"""Detections and labels that known rules of matching match differently."""

from __future__ import annotations

import torch

# Detections and labels that rules of matching match differently. The second detection overlaps most with the first label,
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
