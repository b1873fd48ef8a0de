"""Define the YOLOv5 loss in float64, one target at a time: slow and plain."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.references.bbox_iou import at_least_zero

OFFSETS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (-0.5, 0.0), (0.0, -0.5))


def ciou(box1: torch.Tensor, box2: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """Return CIoU of two (x, y, w, h) boxes; the aspect term's weight is a constant."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = box1, box2
    overlap_w = at_least_zero(torch.minimum(x1 + w1 / 2, x2 + w2 / 2) - torch.maximum(x1 - w1 / 2, x2 - w2 / 2))
    overlap_h = at_least_zero(torch.minimum(y1 + h1 / 2, y2 + h2 / 2) - torch.maximum(y1 - h1 / 2, y2 - h2 / 2))
    inter = overlap_w * overlap_h
    iou = inter / (w1 * h1 + w2 * h2 - inter + eps)
    hull_w = torch.maximum(x1 + w1 / 2, x2 + w2 / 2) - torch.minimum(x1 - w1 / 2, x2 - w2 / 2)
    hull_h = torch.maximum(y1 + h1 / 2, y2 + h2 / 2) - torch.minimum(y1 - h1 / 2, y2 - h2 / 2)
    distance = ((x2 - x1) ** 2 + (y2 - y1) ** 2) / (hull_w**2 + hull_h**2 + eps)
    v = 4 / math.pi**2 * (torch.atan(w2 / h2) - torch.atan(w1 / h1)) ** 2
    alpha = (v / (1 - iou + v + eps)).detach()
    return iou - distance - alpha * v


def entropy(logits: torch.Tensor, targets: torch.Tensor, positive_weight: float, gamma: float) -> torch.Tensor:
    """Return the binary cross entropy, focal for gamma > 0 (alpha 0.25), of each logit."""
    value = -positive_weight * targets * F.logsigmoid(logits) - (1 - targets) * F.logsigmoid(-logits)
    if gamma > 0:
        p = logits.sigmoid()
        p_t = targets * p + (1 - targets) * (1 - p)
        value = value * (targets * 0.25 + (1 - targets) * 0.75) * (1 - p_t) ** gamma
    return value


def matches(targets: torch.Tensor, anchors: torch.Tensor, ny: int, nx: int, anchor_t: float) -> list[tuple]:
    """Return (image, class, anchor, y, x, box) of each match in one level, in the order that decides ties.

    Decisions are made in float32, the type of the targets, as eager code makes them.
    """
    found = []
    size = torch.tensor([nx, ny], dtype=torch.float32)
    for shift in OFFSETS:
        for a, anchor in enumerate(anchors):
            for image, label, *box in targets.float():
                centre, sides = torch.stack(box[:2]) * size, torch.stack(box[2:]) * size
                ratio = sides / anchor
                if not torch.maximum(ratio, 1 / ratio).max() < anchor_t:
                    continue
                # The neighbor is taken if it exists and the center lies in the half of its cell that is nearer to it.
                if shift[0] or shift[1]:
                    axis = 0 if shift[0] else 1
                    position = centre[axis] if shift[axis] > 0 else size[axis] - centre[axis]
                    if not (position % 1 < 0.5 and position > 1):
                        continue
                cell = (centre - torch.tensor(shift)).trunc().clamp(min=0).minimum(size - 1)
                found.append(
                    (int(image), int(label), a, int(cell[1]), int(cell[0]), torch.cat((centre - cell, sides)).double())
                )
    return found


def mask_loss(heads, protos, masks, targets, anchors, *, box=0.05, anchor_t=4.0, overlap=False, found=None):
    """Return the masks' item for masks of the prototypes' size; heads are (bs, na, ny, nx, 5 + classes + channels).

    found maps a level and a row of targets to the matches (image, anchor, y, x), if they are known.
    """
    bs, channels, rows, columns = protos.shape
    total = protos.double().sum() * 0
    for level, head in enumerate(heads):
        ny, nx = head.shape[2:4]
        size = torch.tensor([nx, ny, nx, ny], dtype=torch.float32)
        of_image = [[] for _ in range(bs)]
        for row, target in enumerate(targets.float()):
            mine = [] if found else matches(target[None], anchors[level].float(), ny, nx, anchor_t)
            for image, a, y, x in found(level, row) if found else [(m[0], *m[2:5]) for m in mine]:
                share = target[2:] * size / size  # float32, as eager code gets there
                middle, half = share * torch.tensor([columns, rows] * 2), share[2:] * torch.tensor([columns, rows]) / 2
                low, high = middle[:2] - half, middle[:2] + half
                logits = torch.einsum("c,chw->hw", head[image, a, y, x, -channels:].double(), protos[image].double())
                number = 1 + int((targets[:row, 0] == target[0]).sum())
                wanted = (masks[image] == number).double() if overlap else masks[row].double()
                px, py = torch.arange(columns), torch.arange(rows).view(-1, 1)
                inside = (px >= low[0]) & (px < high[0]) & (py >= low[1]) & (py < high[1])
                value = (F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * inside).mean()
                of_image[image].append(value / (share[2] * share[3]).double())
        for values in of_image:
            total = total + (torch.stack(values).mean() if values else 0)
    return total * box / bs


def yolov5_loss(
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    anchors: torch.Tensor,
    balance: torch.Tensor,
    *,
    box: float = 0.05,
    obj: float = 1.0,
    cls: float = 0.5,
    cls_pw: float = 1.0,
    obj_pw: float = 1.0,
    label_smoothing: float = 0.0,
    fl_gamma: float = 0.0,
    anchor_t: float = 4.0,
    gr: float = 1.0,
    sort_obj_iou: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss (1), items (3) and objectness of levels (nl); gradients flow to heads (bs, na, ny, nx, no)."""
    heads = [head.double() for head in heads]
    lbox = lobj = lcls = torch.zeros((), dtype=torch.float64)
    levels = []
    for level, head in enumerate(heads):
        _, _, ny, nx, no = head.shape
        found = matches(targets, anchors[level].float(), ny, nx, anchor_t)
        wanted = torch.zeros(head.shape[:4], dtype=torch.float64)
        best = {}
        box_terms, class_terms = [], []
        for image, label, a, y, x, target in found:
            logits = head[image, a, y, x]
            p = logits[:4].sigmoid()
            predicted = torch.cat((2 * p[:2] - 0.5, (2 * p[2:]) ** 2 * anchors[level, a].double()))
            iou = ciou(predicted, target)
            box_terms.append(1 - iou)
            cell = (image, a, y, x)
            if not sort_obj_iou or cell not in best or iou.detach() >= best[cell]:
                best[cell] = iou.detach()
                wanted[cell] = (1 - gr) + gr * iou.detach().clamp(min=0) if gr < 1 else iou.detach().clamp(min=0)
            if no > 6:
                aim = torch.full((no - 5,), 0.5 * label_smoothing, dtype=torch.float64)
                aim[label] = 1 - 0.5 * label_smoothing
                class_terms.append(entropy(logits[5:], aim, cls_pw, fl_gamma))
        if box_terms:
            lbox = lbox + torch.stack(box_terms).mean()
        if class_terms:
            lcls = lcls + torch.stack(class_terms).mean()
        levels.append(entropy(head[..., 4], wanted, obj_pw, fl_gamma).mean())
        lobj = lobj + levels[-1] * balance[level].double()
    items = torch.stack((box * lbox, obj * lobj, cls * lcls))
    return (items.sum() * heads[0].shape[0]).reshape(1), items.detach(), torch.stack(levels).detach()
