"""Define the matching of detections and labels, one pair after the other (see torch_fastdet.ops.metrics)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def ious(labels: Tensor, detections: Tensor) -> np.ndarray:
    """Return (m, n) in float32 with each step rounded, which both validators compare with a threshold."""
    a, b = labels[:, None, -4:].float(), detections[None, :, :4].float()
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    common = size[..., 0] * size[..., 1]
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    return (common / (area_a + area_b - common + 1e-7)).numpy()


def match(detections: Tensor, labels: Tensor, iouv: Tensor, rule: str, iou: np.ndarray | None = None) -> np.ndarray:
    """Match detections (n, 6) with labels (m, 5) of one image, by other overlaps (m, n) if given; return (n, t)."""
    iou = ious(labels, detections) if iou is None else iou.copy()
    iou[labels[:, 0].float().numpy()[:, None] != detections[:, 5].float().numpy()] = 0
    correct = np.zeros((len(detections), len(iouv)), dtype=bool)
    for t, threshold in enumerate(iouv.float().numpy()):
        taken: set[int] = set()
        for d in range(len(detections)):
            best = -1
            for m in range(len(labels)):
                if rule == "greedy" and m in taken:
                    continue
                better = iou[m, d] > iou[best, d] or (rule == "best" and iou[m, d] == iou[best, d])
                if iou[m, d] > 0 and (best < 0 or better):
                    best = m
            if best >= 0 and iou[best, d] >= threshold and best not in taken:
                taken.add(best)
                correct[d, t] = True
    return correct


def confusion(
    matrix: np.ndarray,
    detections: Tensor,
    labels: Tensor,
    conf: float,
    iou_thres: float,
    rule: str,
    iou: np.ndarray | None = None,
) -> None:
    """Add one image to ``matrix``, by other overlaps (m, n) if given."""
    background = len(matrix) - 1
    above = detections[:, 4] > conf
    detections = detections[above]
    iou = ious(labels, detections) if iou is None else iou[:, above.numpy()]
    owner: dict[int, int] = {}
    for d in range(len(detections)):
        free = [m for m in range(len(labels)) if iou[m, d] > iou_thres and (rule == "best" or m not in owner)]
        if not free:
            continue
        last = 1 if rule == "best" else -1
        best = max(free, key=lambda m: (iou[m, d], last * m))
        if best not in owner or iou[best, d] >= iou[best, owner[best]]:
            owner[best] = d
    classes = [int(detection[5]) for detection in detections]
    pairs = [(classes[owner[m]] if m in owner else background, int(label[0])) for m, label in enumerate(labels)]
    if owner or rule == "greedy":
        pairs += [(classes[d], background) for d in set(range(len(classes))) - set(owner.values())]
    for pair in pairs:
        if min(pair) >= 0 and max(pair) <= background:
            matrix[pair] += 1
