"""Define the v8 detection loss, one target and one anchor at a time: slow and plain.

Targets and anchor places are float32 with each step rounded, as eager code decides who is inside; all else is float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def ciou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return CIoU of two (x1, y1, x2, y2) boxes; like Ultralytics, use heights + 1e-7 in area and aspect ratio."""
    eps = 1e-7
    wa, ha = a[2] - a[0], a[3] - a[1] + eps
    wb, hb = b[2] - b[0], b[3] - b[1] + eps
    overlap_w = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp(min=0)
    overlap_h = (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp(min=0)
    inter = overlap_w * overlap_h
    iou = inter / (wa * ha + wb * hb - inter + eps)
    hull_w = torch.maximum(a[2], b[2]) - torch.minimum(a[0], b[0])
    hull_h = torch.maximum(a[3], b[3]) - torch.minimum(a[1], b[1])
    distance = ((b[0] + b[2] - a[0] - a[2]) ** 2 + (b[1] + b[3] - a[1] - a[3]) ** 2) / 4
    v = 4 / torch.pi**2 * (torch.atan(wb / hb) - torch.atan(wa / ha)) ** 2
    alpha = (v / (1 - iou + v + eps)).detach()
    return iou - distance / (hull_w**2 + hull_h**2 + eps) - v * alpha


def corners(target: torch.Tensor, width: float, height: float) -> torch.Tensor:
    """Return a target's corners in float32 pixels."""
    x, y, w, h = target.float() * torch.tensor([width, height, width, height], dtype=torch.float32)
    return torch.stack((x - w / 2, y - h / 2, x + w / 2, y + h / 2))


def reach(box: torch.Tensor, least_side: float, short_side: float) -> torch.Tensor:
    """Return the area where a target's anchors may lie: the box, with each short side enlarged."""
    center, side = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
    side = torch.where(side < short_side, torch.tensor(least_side, dtype=torch.float32), side)
    return torch.cat((center - side / 2, center + side / 2))


def decode(logits: torch.Tensor, reg_max: int) -> torch.Tensor:
    """Return four distances from (4 * reg_max) logits: the expectations over bins, or the logits themselves."""
    if reg_max == 1:
        return logits
    return logits.reshape(4, reg_max).softmax(1) @ torch.arange(reg_max, dtype=torch.float64)


def best(values: dict[int, float], count: int) -> list[int]:
    """Return the keys of the greatest values above 0, compared in float32, with the lower key first."""
    rounded = {key: float(torch.tensor(value, dtype=torch.float32)) for key, value in values.items()}
    return sorted((key for key in rounded if rounded[key] > 0), key=lambda key: (-rounded[key], key))[:count]


def assign(scores, boxes, points, targets, settings, topk, topk2, mask_iou=None, keypoints=None):
    """Return an image's {anchor: (target index, target score)}. mask_iou(target index, anchor) is for YOLO26's masks.

    keypoints, for YOLO26's poses, is similarity(target index, anchor), None if none is visible, and anchors' strides.
    """
    _, _, _, _, alpha, beta, eps, least_side, short_side = settings
    overlaps, alignments = [], []
    for index, (label, box) in enumerate(targets):
        area = reach(box, least_side, short_side)
        inside = ((points - area[:2] > 1e-9) & (area[2:] - points > 1e-9)).all(1).nonzero().flatten().tolist()
        overlap = {a: float(ciou(box.double(), boxes[a]).clamp(min=0)) for a in inside}
        if keypoints is not None:
            similarity, stride = keypoints
            sides = box[2:] - box[:2]
            size = torch.sqrt(sides[0] * sides[1])
            allowed = [
                a
                for a in inside
                if (stride[a] == stride.min() or size >= 2 * stride[a])
                and (stride[a] == stride.max() or size <= 12 * stride[a])
            ]
            inside = allowed or inside
            overlap = {a: overlap[a] if similarity(index, a) is None else similarity(index, a) for a in inside}
        if mask_iou is not None:
            by_box = {a: float(scores[a, label]) ** alpha * overlap[a] ** beta + 1e-9 for a in inside}
            near = best(by_box, 3 * topk)
            overlap = {a: (overlap[a] + (mask_iou(index, a) if a in near else 0.0)) / 2 for a in inside}
        overlaps.append(overlap)
        alignments.append({a: float(scores[a, label]) ** alpha * overlap[a] ** beta for a in inside})
    wanted: dict[int, list[int]] = {}
    for index, alignment in enumerate(alignments):
        named = best(alignment, topk)
        # Ties of the top-k over all anchors go by index: misfits fill the list in order, and only those inside count.
        fits = set(best(alignment, len(points)))
        misfits = [a for a in range(len(points)) if a not in fits]
        for a in named + [a for a in misfits[: topk - len(named)] if a in alignment]:
            wanted.setdefault(a, []).append(index)
    got: list[dict[int, float]] = [{} for _ in targets]
    for a, by in wanted.items():
        index = by[0]
        if len(by) > 1:
            most = best({i: overlap[a] for i, overlap in enumerate(overlaps) if a in overlap}, 1)
            if not most:  # it fits none of them: the first target of all gets it, without weight
                got[0][a] = 0.0
                continue
            index = most[0]
        got[index][a] = alignments[index][a]
    result = {}
    for index, anchors in enumerate(got):
        if topk2 != topk:
            fits = best(anchors, len(points))
            filling = [a for a in range(len(points)) if a not in fits][: max(0, topk2 - len(fits))]
            anchors = {a: anchors[a] for a in fits[:topk2] + [a for a in filling if a in anchors]}
        for a, alignment in anchors.items():
            top = max(overlaps[index].get(other, 0.0) for other in anchors)
            result[a] = (index, alignment * top / (max(anchors.values()) + eps))
    return result


def v8_loss(
    boxes,
    scores,
    sizes,
    strides,
    targets,
    settings,
    *,
    reg_max=16,
    topk=10,
    topk2=10,
    class_weights=None,
    mask_iou=None,
    similarity=None,
    found=None,
):
    """Return loss (3), items (3) and assignments, of boxes (bs, 4 * reg_max, anchors), scores (bs, nc, anchors).

    Gradients flow to boxes and scores; assignments are constants. found gives each image's {anchor: (row of targets,
    target score)} if known.
    """
    bs, nc, _ = scores.shape
    height, width = sizes[0][0] * strides[0], sizes[0][1] * strides[0]
    cells = torch.cat([torch.cartesian_prod(torch.arange(ny), torch.arange(nx)).flip(1) for ny, nx in sizes]) + 0.5
    stride = torch.cat([torch.full((ny * nx, 1), float(s)) for (ny, nx), s in zip(sizes, strides)])
    weights = torch.ones(nc, dtype=torch.float64) if class_weights is None else class_weights.double().flatten()
    total = torch.zeros((), dtype=torch.float64)
    parts = [total, total, total]
    assignments = []
    for b in range(bs):
        logits = boxes[b].T.double()
        distances = torch.stack([decode(row, reg_max) for row in logits])
        decoded = torch.cat((cells - distances[:, :2], cells + distances[:, 2:]), 1)
        mine, rows = [], []
        for i, row in enumerate(targets):
            box = corners(row[2:], width, height)
            if int(row[0]) == b and box.sum() > 0:
                mine.append((int(row[1]), box))
                rows.append(i)
        pixels = (decoded * stride).detach()
        lookup = [(label, box) for label, box in mine]  # a negative label indexes from the end
        if found is None:
            assigned = assign(
                scores[b].T.detach().double().sigmoid(),
                pixels,
                cells * stride,
                lookup,
                settings,
                topk,
                topk2,
                None
                if mask_iou is None
                else lambda i, a, b=b, rows=rows, pixels=pixels: mask_iou(b, rows[i], a, pixels[a]),
                None
                if similarity is None
                else (lambda i, a, b=b, rows=rows: similarity(b, rows[i], a), stride.flatten()),
            )
        else:
            assigned = {anchor: (rows.index(row), score) for anchor, (row, score) in found[b].items()}
        assignments.append(assigned)
        wanted = torch.zeros(scores.shape[2], nc, dtype=torch.float64)
        for a, (index, score) in assigned.items():
            label, box = mine[index]
            target = box.double() / stride[a].double()
            wanted[a, max(label, 0)] = score
            total = total + score
            parts[0] = parts[0] + score * (1 - ciou(decoded[a], target))
            ltrb = torch.cat((cells[a].double() - target[:2], target[2:] - cells[a].double()))
            if reg_max == 1:
                share = stride[a].double() / torch.tensor([width, height, width, height], dtype=torch.float64)
                parts[2] = parts[2] + score * ((distances[a] - ltrb) * share).abs().mean()
            else:
                ltrb = ltrb.clamp(0, reg_max - 1 - 0.01)
                left = ltrb.long()
                share = left + 1 - ltrb
                logp = logits[a].reshape(4, reg_max).log_softmax(1)
                side = torch.arange(4)
                parts[2] = parts[2] - score * (logp[side, left] * share + logp[side, left + 1] * (1 - share)).mean()
        entropy = F.binary_cross_entropy_with_logits(scores[b].T.double(), wanted, reduction="none")
        parts[1] = parts[1] + (entropy * weights).sum()
    items = torch.stack([part * gain / max(float(total), 1.0) for part, gain in zip(parts, settings[:3])])
    return items * bs * settings[3], items.detach(), assignments


def positives(assignments, targets, height, width):
    """Return (image, anchor, row of targets) for each anchor that got a target."""
    found = []
    for b, assigned in enumerate(assignments):
        rows = [i for i, row in enumerate(targets) if int(row[0]) == b and corners(row[2:], width, height).sum() > 0]
        found += [(b, anchor, rows[index]) for anchor, (index, _) in sorted(assigned.items())]
    return found


def mask_overlap(coefficients, protos, masks, targets, height, *, overlap=True):
    """Return v8_loss's mask_iou, a function of (image, row of targets, anchor, the anchor's box in pixels)."""
    rows, columns = protos.shape[2:]
    masks = F.interpolate(masks[:, None].double(), (rows, columns), mode="nearest")[:, 0]

    def iou(b, row, anchor, box):
        number = 1 + sum(int(other[0]) == b for other in targets[:row])
        wanted = (masks[b] == number if overlap else masks[row] > 0.5).double()
        logits = torch.einsum("c,chw->hw", coefficients[b, :, anchor].double(), protos[b].double())
        low_x, low_y, high_x, high_y = box.float() * (rows / height)
        x, y = torch.arange(columns), torch.arange(rows).view(-1, 1)
        inside = (x >= low_x) & (x < high_x) & (y >= low_y) & (y < high_y)
        predicted = ((logits > 0) & inside).double()
        both = (predicted * wanted).sum()
        return float(both / (predicted.sum() + wanted.sum() - both).clamp(min=1))

    return iou


def mask_loss(coefficients, protos, masks, targets, assignments, height, width, gain, *, overlap=True, found=None):
    """Return the masks' item: the positives' mean of the cropped entropy's pixel mean, divided by the box's share."""
    found = positives(assignments, targets, height, width) if found is None else found
    rows, columns = protos.shape[2:]
    total = (coefficients.double() * 0).sum() + (protos.double() * 0).sum()
    for b, anchor, row in found:
        box = corners(targets[row, 2:], width, height)
        x1, x2, y1, y2 = box[0] / width, box[2] / width, box[1] / height, box[3] / height
        number = 1 + sum(int(other[0]) == b for other in targets[:row])
        wanted = (masks[b].float() == number).double() if overlap else masks[row].float().double()
        logits = torch.einsum("c,chw->hw", coefficients[b, :, anchor].double(), protos[b].double())
        entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        x, y = torch.arange(columns), torch.arange(rows).view(-1, 1)
        inside = (x >= x1 * columns) & (x < x2 * columns) & (y >= y1 * rows) & (y < y2 * rows)
        total = total + (entropy * inside).mean() / ((x2 - x1) * (y2 - y1)).double()
    return total * gain / max(len(found), 1)


def keypoint_similarity(predictions, keypoints, sigmas, targets, sizes, strides):
    """Return v8_loss's similarity: OKS of (image, row of targets, anchor), or None without a visible keypoint."""
    height, width = sizes[0][0] * strides[0], sizes[0][1] * strides[0]
    cells = torch.cat([torch.cartesian_prod(torch.arange(ny), torch.arange(nx)).flip(1) for ny, nx in sizes]) + 0.5
    stride = torch.cat([torch.full((ny * nx,), float(s)) for (ny, nx), s in zip(sizes, strides)]).double()

    def oks(b, row, anchor):
        visible = keypoints[row, :, 2] > 0 if keypoints.shape[2] == 3 else torch.ones(len(keypoints[row])).bool()
        if not visible.any():
            return None
        predicted = predictions[b, :, anchor].double().view(len(visible), -1)[:, :2]
        wanted = keypoints[row, :, :2].double() * torch.tensor([width, height], dtype=torch.float64)
        distance = ((predicted + cells[anchor]) * stride[anchor] - wanted).square().sum(1)
        box = corners(targets[row, 2:], width, height).double()
        area = (box[2] - box[0]) * (box[3] - box[1]) * 0.53
        near = torch.exp(-distance / ((2 * sigmas.double()) ** 2 * (area + 1e-7) * 2))
        return float((near * visible).sum() / (visible.sum() + 1e-7))

    return oks


def keypoint_loss(
    predictions, keypoints, sigmas, targets, assignments, sizes, strides, gains, centered=False, found=None
):
    """Return the items pose and kobj, means over positives x keypoints."""
    height, width = sizes[0][0] * strides[0], sizes[0][1] * strides[0]
    cells = torch.cat([torch.cartesian_prod(torch.arange(ny), torch.arange(nx)).flip(1) for ny, nx in sizes])
    stride = torch.cat([torch.full((ny * nx,), float(s)) for (ny, nx), s in zip(sizes, strides)])
    found = positives(assignments, targets, height, width) if found is None else found
    count = keypoints.shape[1]
    pose = kobj = (predictions.double() * 0).sum()
    for b, anchor, row in found:
        predicted = predictions[b, :, anchor].double().view(count, -1)
        size = torch.tensor([width, height], dtype=torch.float64) / stride[anchor].double()
        box = corners(targets[row, 2:], width, height).double() / stride[anchor].double()
        area = (box[2] - box[0]) * (box[3] - box[1])
        visible = (keypoints[row, :, 2] != 0).double() if keypoints.shape[2] == 3 else torch.ones(count).double()
        place = predicted[:, :2] + cells[anchor] + 0.5 if centered else 2 * predicted[:, :2] + cells[anchor]
        distance = place - keypoints[row, :, :2].double() * size
        e = distance.square().sum(1) / ((2 * sigmas.double()) ** 2 * (area + 1e-9) * 2)
        pose = pose + (count / (visible.sum() + 1e-9) * (1 - torch.exp(-e)) * visible).mean()
        if predicted.shape[1] == 3:
            kobj = kobj + F.binary_cross_entropy_with_logits(predicted[:, 2], visible)
    return torch.stack((pose * gains[0], kobj * gains[1])) / max(len(found), 1)
