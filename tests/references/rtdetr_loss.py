"""Define RT-DETR's loss in float64: costs, SciPy's assignment, and the terms of each prediction set."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

GAINS = {"class_gain": 1.0, "box_gain": 5.0, "giou_gain": 2.0}
COSTS = {"class_cost": 2.0, "box_cost": 5.0, "giou_cost": 2.0}


def overlaps(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and GIoU of pairs of x, y, w, h boxes."""
    low, high, other_low, other_high = (
        box[..., :2] + sign * box[..., 2:] / 2 for box in (boxes, others) for sign in (-1, 1)
    )
    shared = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0).prod(-1)
    union = boxes[..., 2:].prod(-1) + others[..., 2:].prod(-1) - shared + 1e-7
    hull = (torch.maximum(high, other_high) - torch.minimum(low, other_low)).prod(-1) + 1e-7
    return shared / union, shared / union - (hull - union) / hull


def costs(boxes: Tensor, scores: Tensor, classes: Tensor, targets: Tensor, gains: dict[str, float]) -> Tensor:
    """Return the costs (queries, targets) of one image; scores are logits."""
    p = scores.sigmoid()[:, classes]
    focal = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log()
    distance = (boxes[:, None] - targets[None]).abs().sum(-1)
    _, giou = overlaps(boxes[:, None], targets[None])
    cost = gains["class_cost"] * focal + gains["box_cost"] * distance + gains["giou_cost"] * (1 - giou)
    return torch.where(cost.isfinite(), cost, torch.zeros_like(cost))


def match(boxes: Tensor, scores: Tensor, targets: Tensor, gains: dict[str, float]) -> Tensor:
    """Return the target of each query of one image, or -1."""
    found = torch.full((len(boxes),), -1)
    cost = costs(boxes, scores, targets[:, 0].long(), targets[:, 1:], gains)
    query, target = linear_sum_assignment(cost.detach().numpy())
    found[query] = torch.from_numpy(target)
    return found


def set_terms(boxes: Tensor, scores: Tensor, targets: list[Tensor], matches: Tensor, gains: dict[str, float]) -> Tensor:
    """Return the class, box and GIoU terms of a prediction set: boxes (bs, queries, 4), matches (bs, queries)."""
    image, query = (matches >= 0).nonzero(as_tuple=True)
    rows = [targets[i][matches[i, q]] for i, q in zip(image.tolist(), query.tolist())]
    wanted = torch.stack(rows) if rows else torch.zeros(0, 5, dtype=torch.float64)
    matched = boxes[image, query]
    iou, giou = overlaps(matched, wanted[:, 1:])
    labels, quality = torch.zeros_like(scores), torch.zeros_like(scores)
    labels[image, query, wanted[:, 0].long()] = 1
    quality[image, query, wanted[:, 0].long()] = iou.detach()
    p = scores.sigmoid()
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(scores, quality, reduction="none")
    count = max(len(rows), 1)
    if sum(map(len, targets)):
        classes = (entropy * torch.where(labels > 0, quality, 0.25 * p**1.5)).sum()
    else:
        classes = (entropy * 0.75 * p**1.5).sum()
    distance, away = (matched - wanted[:, 1:]).abs().sum(), (1 - giou).sum()
    factors = (gains["class_gain"], gains["box_gain"], gains["giou_gain"])
    return torch.stack([factor * term / count for factor, term in zip(factors, (classes, distance, away))])


def rtdetr_loss(
    boxes: Tensor,
    scores: Tensor,
    targets: list[Tensor],
    dn_boxes: Tensor | None = None,
    dn_scores: Tensor | None = None,
    dn_matches: Tensor | None = None,
    **gains: float,
) -> Tensor:
    """Return (sets, 3): class, box and GIoU terms of each set, the denoising sets last. ``targets`` has (n, 5) for each
    image: class and x, y, w, h. ``dn_matches`` is (bs, denoising queries)."""
    gains, targets = {**GAINS, **COSTS, **gains}, [rows.double() for rows in targets]
    boxes, scores = boxes.double(), scores.double()
    sets = [[match(b, s, t, gains) for b, s, t in zip(*pair, targets)] for pair in zip(boxes, scores)]
    matches = [torch.stack(images) for images in sets]
    terms = [set_terms(b, s, targets, m, gains) for b, s, m in zip(boxes, scores, matches)]
    if dn_boxes is not None:
        pairs = zip(dn_boxes.double(), dn_scores.double())
        terms += [set_terms(b, s, targets, dn_matches, gains) for b, s in pairs]
    return torch.stack(terms)
