"""Define the loss of oriented boxes in float64, one target and one anchor at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.references.v8_loss import best, decode


def covariance(box: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """Return the covariance of the Gaussian of a box (x, y, w, h, angle)."""
    cosine, sine = torch.cos(box[4]), torch.sin(box[4])
    turn = torch.stack((torch.stack((cosine, -sine)), torch.stack((sine, cosine))))
    return turn @ torch.diag(box[2:4] ** 2 / 12 + floor) @ turn.T


def probiou(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """Return 1 minus the Hellinger distance of the boxes' Gaussians, with the epsilons of Ultralytics."""
    eps = 1e-7
    first, second = covariance(a, floor), covariance(b, floor)
    both, d = first + second, a[:2] - b[:2]
    determinant = both[0, 0] * both[1, 1] - both[0, 1] ** 2
    adjugate = torch.stack((torch.stack((both[1, 1], -both[0, 1])), torch.stack((-both[0, 1], both[0, 0]))))
    own = [(c[0, 0] * c[1, 1] - c[0, 1] ** 2).clamp(min=0) for c in (first, second)]
    distance = (d @ adjugate @ d) / (determinant + eps) / 4
    distance = distance + torch.log(determinant / (4 * (own[0] * own[1]).sqrt() + eps) + eps) / 2
    return 1 - (1 - torch.exp(-distance.clamp(eps, 100)) + eps).sqrt()


def place(distances: torch.Tensor, angle: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
    """Return the box with these distances (left, top, right, bottom along its own axes) from an anchor."""
    left, top, right, bottom = distances
    u, v = (right - left) / 2, (bottom - top) / 2
    cosine, sine = torch.cos(angle), torch.sin(angle)
    return torch.stack(
        (cell[0] + u * cosine - v * sine, cell[1] + u * sine + v * cosine, left + right, top + bottom, angle)
    )


def pixels(row: torch.Tensor, width: float, height: float) -> torch.Tensor | None:
    """Return a target (x, y, w, h, angle) in float32 pixels, or None if it is left out."""
    box = row[2:].float() * torch.tensor([width, height, width, height, 1], dtype=torch.float32)
    return box if box[2] >= 2 and box[3] >= 2 and box.sum() > 0 else None


def inside(points: torch.Tensor, box: torch.Tensor, least_side: float, short_side: float) -> list[int]:
    """Return the anchors inside a target whose short sides are enlarged, borders included."""
    side = torch.where(box[2:4] < short_side, torch.tensor(least_side), box[2:4]).double()
    d = points.double() - box[:2].double()
    cosine, sine = torch.cos(box[4].double()), torch.sin(box[4].double())
    u, v = d[:, 0] * cosine + d[:, 1] * sine, d[:, 1] * cosine - d[:, 0] * sine
    return ((u.abs() <= side[0] / 2) & (v.abs() <= side[1] / 2)).nonzero().flatten().tolist()


def v8_obb_loss(
    boxes, scores, angles, sizes, strides, targets, settings, *, reg_max=16, topk=10, topk2=10, class_weights=None
):
    """Return loss (4) and items (4): box, class, distance, angle. The last of settings is the angle's gain."""
    bs, nc, _ = scores.shape
    height, width = sizes[0][0] * strides[0], sizes[0][1] * strides[0]
    cells = torch.cat([torch.cartesian_prod(torch.arange(ny), torch.arange(nx)).flip(1) for ny, nx in sizes]) + 0.5
    stride = torch.cat([torch.full((ny * nx, 1), float(s)) for (ny, nx), s in zip(sizes, strides)])
    weights = torch.ones(nc, dtype=torch.float64) if class_weights is None else class_weights.double().flatten()
    box_gain, cls_gain, dfl_gain, weight, alpha, beta, eps, least_side, short_side, angle_gain = settings
    total = torch.zeros((), dtype=torch.float64)
    parts = [total] * 4
    for b in range(bs):
        logits = boxes[b].T.double()
        distances = torch.stack([decode(row, reg_max) for row in logits])
        decoded = torch.stack(
            [place(distances[a], angles[b, 0, a].double(), cells[a].double()) for a in range(len(cells))]
        )
        mine = [
            (int(row[1]), box)
            for row in targets
            if int(row[0]) == b and (box := pixels(row, width, height)) is not None
        ]
        overlaps, alignments, wanted = [], [], {}
        for index, (label, box) in enumerate(mine):
            overlap = {}
            for a in inside(cells * stride, box, least_side, short_side):
                scale = torch.tensor([float(stride[a])] * 4 + [1.0], dtype=torch.float64)
                overlap[a] = float(probiou(box.double(), (decoded[a] * scale).detach()).clamp(min=0))
            alignment = {
                a: float(scores[b, label, a].detach().double().sigmoid()) ** alpha * value**beta
                for a, value in overlap.items()
            }
            overlaps.append(overlap)
            alignments.append(alignment)
            named = best(alignment, topk)
            fits = set(best(alignment, len(cells)))
            misfits = [a for a in range(len(cells)) if a not in fits]
            for a in named + [a for a in misfits[: topk - len(named)] if a in alignment]:
                wanted.setdefault(a, []).append(index)
        got = [{} for _ in mine]
        for a, by in wanted.items():
            index = by[0]
            if len(by) > 1:
                most = best({i: overlap[a] for i, overlap in enumerate(overlaps) if a in overlap}, 1)
                index = most[0] if most else 0
            got[index][a] = alignments[index].get(a, 0.0)
        target_scores = torch.zeros(len(cells), nc, dtype=torch.float64)
        for index, anchors in enumerate(got):
            if topk2 != topk:
                anchors = {a: anchors[a] for a in best(anchors, topk2)}
            for a, alignment in anchors.items():
                label, box = mine[index]
                top = max(overlaps[index].get(other, 0.0) for other in anchors)
                score = alignment * top / (max(anchors.values()) + eps)
                target_scores[a, max(label, 0)] = score
                total = total + score
                target = box.double().clone()
                target[:4] /= stride[a].double()
                parts[0] = parts[0] + score * (1 - probiou(decoded[a], target, 0.01))
                d = cells[a].double() - target[:2]
                cosine, sine = torch.cos(target[4]), torch.sin(target[4])
                u, v = d[0] * cosine + d[1] * sine, d[1] * cosine - d[0] * sine
                ltrb = torch.stack((target[2] / 2 + u, target[3] / 2 + v, target[2] / 2 - u, target[3] / 2 - v))
                if reg_max == 1:
                    share = stride[a].double() / torch.tensor([width, height, width, height], dtype=torch.float64)
                    parts[2] = parts[2] + score * ((distances[a] - ltrb) * share).abs().mean()
                else:
                    ltrb = ltrb.clamp(0, reg_max - 1 - 0.01)
                    low = ltrb.long()
                    logp = logits[a].reshape(4, reg_max).log_softmax(1)
                    side, share = torch.arange(4), low + 1 - ltrb
                    parts[2] = parts[2] - score * (logp[side, low] * share + logp[side, low + 1] * (1 - share)).mean()
                stretch = torch.exp(-(torch.log(target[2] / target[3]) ** 2) / 9)
                parts[3] = parts[3] + score * stretch * torch.sin(2 * (decoded[a, 4] - target[4])) ** 2
        entropy = F.binary_cross_entropy_with_logits(scores[b].T.double(), target_scores, reduction="none")
        parts[1] = parts[1] + (entropy * weights).sum()
    gains = (box_gain, cls_gain, dfl_gain, angle_gain)
    items = torch.stack([part * gain / max(float(total), 1.0) for part, gain in zip(parts, gains)])
    return items * bs * weight, items.detach()
