"""Define post-processing in plain PyTorch, with suppression in the arithmetic that it promises.

Decisions of suppression depend on rounding, so its oracle works in the stated types (thresholds, products and corners
in the prediction's dtype, offsets and IoU in float32) on the CPU. Decoding is smooth, so its oracle is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _best_first(confidence: Tensor) -> Tensor:
    return torch.sort(confidence, descending=True, stable=True).indices


def greedy(boxes: Tensor, iou_thres: float, max_det: int, groups: Tensor | None = None) -> list[int]:
    """Return the rows kept of sorted boxes: each drops later ones whose IoU with it is above the threshold."""
    threshold = torch.tensor(iou_thres, dtype=torch.float64).to(boxes.dtype)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(boxes), dtype=torch.bool)
    kept: list[int] = []
    for i in range(len(boxes)):
        if not alive[i]:
            continue
        if len(kept) == max_det:
            break
        kept.append(i)
        low = torch.maximum(boxes[i, :2], boxes[:, :2])
        high = torch.minimum(boxes[i, 2:], boxes[:, 2:])
        side = (high - low).clamp(min=0)
        both = side[:, 0] * side[:, 1]
        ratio = both / (area[i] + area - both)
        drop = ratio > threshold
        if groups is not None:
            drop &= groups == groups[i]
        alive &= ~drop
    return kept


def _corners(box: Tensor) -> Tensor:
    half = box[:, 2:] / 2
    return torch.cat((box[:, :2] - half, box[:, :2] + half), 1)


def suppress(
    prediction: Tensor,
    conf_thres=0.25,
    iou_thres=0.45,
    classes=None,
    agnostic=False,
    multi_label=False,
    max_det=300,
    *,
    layout="yolov5",
    nm=0,
    nc=0,
    labels=None,
    per_class="offset",
    max_nms=30000,
    max_wh=7680.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each image's detections and their anchors. ``labels`` (n, 6) has [image, class, x, y, width, height]."""
    prediction = prediction.detach().cpu()
    yolov5 = layout == "yolov5"
    if not yolov5:
        prediction = prediction.transpose(1, 2)
    first = 5 if yolov5 else 4
    nc = prediction.shape[2] - first - nm if yolov5 else nc or prediction.shape[2] - 4
    extra = prediction.shape[2] - first - nc
    result_type = torch.float64 if prediction.dtype == torch.float64 else torch.float32
    rows, anchors = [], []
    for image, x in enumerate(prediction):
        empty = torch.zeros((0, 6 + extra), dtype=result_type)
        n = torch.arange(len(x))
        threshold = torch.tensor(float(conf_thres), dtype=torch.float64).float().to(x.dtype)
        if x.dtype == torch.float64:
            threshold = torch.tensor(float(conf_thres), dtype=torch.float64)
        if yolov5:
            passes = x[:, 4] > threshold
            x, n = x[passes], n[passes]
            mine = labels[labels[:, 0] == image].cpu() if labels is not None else torch.zeros((0, 6))
            if len(mine):
                added = torch.zeros((len(mine), x.shape[1]))
                added[:, :4] = mine[:, 2:]
                added[:, 4] = 1
                added[torch.arange(len(mine)), 5 + mine[:, 1].long()] = 1
                x = torch.cat((x, added))
                n = torch.cat((n, len(prediction[image]) + torch.arange(len(mine))))
                threshold = torch.tensor(float(conf_thres), dtype=x.dtype)
            objectness = x[:, 4:5]
            scores, tail = x[:, 5 : 5 + nc] * objectness, x[:, 5 + nc :] * objectness
        else:
            scores, tail = x[:, 4 : 4 + nc], x[:, 4 + nc :]
            sound = ~scores.isnan().any(1)
            x, n, scores, tail = x[sound], n[sound], scores[sound], tail[sound]
        if nc == 0 or len(x) == 0:
            rows.append(empty)
            anchors.append(torch.zeros(0, dtype=torch.long))
            continue
        box = _corners(x[:, :4])
        if multi_label and nc > 1:
            i, c = (scores > threshold).nonzero().T
        else:
            sound = ~scores.isnan().any(1)
            best = torch.where(sound, scores.max(1).values, torch.zeros((), dtype=x.dtype))
            i = (best > threshold).nonzero().view(-1)
            c = scores[i].max(1).indices
        confidence = scores[i, c]
        wanted = confidence.isfinite()
        if classes is not None:
            allowed = torch.tensor([int(v) in set(classes) for v in c], dtype=torch.bool).reshape(-1)
            wanted &= allowed
        i, c, confidence = i[wanted], c[wanted], confidence[wanted]
        order = _best_first(confidence)[:max_nms]
        i, c, confidence = i[order], c[order], confidence[order]
        finite = box[i].isfinite().all(1)
        i, c, confidence = i[finite], c[finite], confidence[finite]
        row = torch.cat(
            (
                box[i].to(result_type),
                confidence[:, None].to(result_type),
                c[:, None].to(result_type),
                tail[i].to(result_type),
            ),
            1,
        )
        offset = row[:, 5:6] * (0 if agnostic or per_class == "exact" else max_wh)
        groups = c if per_class == "exact" and not agnostic else None
        kept = greedy(row[:, :4] + offset, iou_thres, max_det, groups)
        rows.append(row[kept])
        anchors.append(n[i[kept]])
    return rows, anchors


def probiou(first: Tensor, second: Tensor) -> Tensor:
    """Return 1 - the Hellinger distance (N, M), in float64, of rotated boxes' (x, y, width, height, angle) Gaussians.

    The epsilons are those of Ultralytics, which decide for boxes without area.
    """
    eps = 1e-7

    def covariance(boxes: Tensor) -> Tensor:
        boxes = boxes.detach().double().cpu()
        c, s = boxes[:, 4].cos(), boxes[:, 4].sin()
        turn = torch.stack((torch.stack((c, -s), 1), torch.stack((s, c), 1)), 1)
        return turn @ torch.diag_embed(boxes[:, 2:4] ** 2 / 12) @ turn.transpose(1, 2)

    s1, s2 = covariance(first)[:, None], covariance(second)[None]
    both = s1 + s2
    d = (first[:, None, :2] - second[None, :, :2]).double().cpu()
    area = both[..., 0, 0] * both[..., 1, 1] - both[..., 0, 1] ** 2
    # This is d's quadratic form with the adjugate of `both`, which is its inverse times the area.
    x, y = d.unbind(-1)
    form = x**2 * both[..., 1, 1] - 2 * x * y * both[..., 0, 1] + y**2 * both[..., 0, 0]
    mahalanobis = form / (area + eps) / 4
    alone = [(m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] ** 2).clamp(min=0) for m in (s1, s2)]
    logarithm = (area / (4 * (alone[0] * alone[1]).sqrt() + eps) + eps).log() / 2
    distance = (mahalanobis + logarithm).clamp(eps, 100)
    return 1 - (1 - (-distance).exp() + eps).sqrt()


def suppress_rotated(
    prediction: Tensor,
    conf_thres=0.25,
    iou_thres=0.45,
    classes=None,
    agnostic=False,
    multi_label=False,
    max_det=300,
    *,
    nc,
    rotated="fast",
    per_class="offset",
    max_nms=30000,
    max_wh=7680.0,
) -> list[tuple[Tensor, Tensor]]:
    """Return rows and anchors of each image: candidates as for upright boxes, decided by :func:`probiou`."""
    extra = prediction.shape[1] - 4 - nc
    # Get all candidates in order of confidence, as center and size, with nothing suppressed.
    raw = prediction.detach().cpu()
    upright = raw.clone()
    upright[:, 2:4] = 0  # corners are centers then
    rows, anchors = suppress(
        torch.cat((upright, raw[:, :4]), 1), conf_thres, 1.0, classes, True, multi_label, 10**9, layout="ultralytics",
        nc=nc, max_nms=max_nms,
    )  # fmt: skip
    result = []
    for row, anchor in zip(rows, anchors):
        row = torch.cat((row[:, -4:], row[:, 4:-4]), 1)
        finite = row.isfinite().all(1)
        row, anchor = row[finite], anchor[finite]
        angle = row[:, -1:] if extra else row[:, 5:6]
        offset = row[:, 5:6] * (0 if agnostic or per_class == "exact" else max_wh)
        placed = torch.cat((row[:, :2] + offset, row[:, 2:4], angle), 1)
        above = probiou(placed, placed) > float(torch.tensor(iou_thres).to(row.dtype))
        if per_class == "exact" and not agnostic:
            above &= row[:, None, 5] == row[None, :, 5]
        kept: list[int] = []
        for i in range(len(row)):
            against = slice(i) if rotated == "fast" else kept
            if len(kept) < max_det and not above[against, i].any():
                kept.append(i)
        result.append((row[kept], anchor[kept]))
    return result


def decode(heads: list[Tensor], anchors: Tensor, strides: list[float], nm: int = 0) -> Tensor:
    """Compute YOLOv5's Detect in float64."""
    result = []
    for head, anchor, stride in zip(heads, anchors.double().cpu(), strides):
        x = head.detach().double().cpu()
        na = len(anchor)
        if x.dim() == 4:
            x = x.unflatten(1, (na, -1)).permute(0, 1, 3, 4, 2)
        ny, nx = x.shape[2:4]
        cell = torch.stack(torch.meshgrid(torch.arange(nx), torch.arange(ny), indexing="xy"), -1).double()
        end = x.shape[-1] - nm
        s = x[..., :end].sigmoid()
        xy = (2 * s[..., :2] - 0.5 + cell) * stride
        wh = (2 * s[..., 2:4]) ** 2 * (anchor * stride)[None, :, None, None]
        result.append(torch.cat((xy, wh, s[..., 4:], x[..., end:]), -1).flatten(1, 3))
    return torch.cat(result, 1)


def decode_anchor_free(boxes: list[Tensor], scores: list[Tensor], strides: list[float]) -> Tensor:
    """Compute Ultralytics' Detect in float64; return (images, 4 + nc, N)."""
    result = []
    for box, score, stride in zip(boxes, scores, strides):
        b, s = box.detach().double().cpu(), score.detach().double().cpu()
        bins = b.shape[1] // 4
        logits = b.unflatten(1, (4, bins))
        weight = torch.arange(bins).double()[:, None, None]
        distance = (logits.softmax(2) * weight).sum(2) if bins > 1 else logits[:, :, 0]
        ny, nx = b.shape[2:]
        center = torch.stack(torch.meshgrid(torch.arange(nx), torch.arange(ny), indexing="xy")).double() + 0.5
        low, high = center - distance[:, :2], center + distance[:, 2:]
        result.append(torch.cat(((low + high) / 2 * stride, (high - low) * stride, s.sigmoid()), 1).flatten(2))
    return torch.cat(result, 2)
