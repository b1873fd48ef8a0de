"""YOLOv5's post-processing in plain PyTorch, stage by stage: what a port is compared with. Clear, not fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of the stock function: candidates kept for an image, and the pixels between two classes.
MAX_NMS = 30000
MAX_WH = 7680


def yolov5_stages(
    heads: Sequence[torch.Tensor],
    anchors: torch.Tensor,
    strides: Sequence[float] | torch.Tensor,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    multi_label: bool = False,
    agnostic: bool = False,
    max_det: int = 300,
    nm: int = 0,
) -> dict[str, list[torch.Tensor] | torch.Tensor]:
    """Every stage from raw head maps to detections, for :func:`torch_fastdet.golden.save`.

    Args:
        heads: one raw map a level, (bs, na * no, ny, nx) or (bs, na, ny, nx, no), no = 5 + classes + nm.
        anchors: (levels, na, 2) widths and heights in grid cells, as YOLOv5's ``Detect.anchors``.
        strides: pixels a grid cell, for each level.
        conf_thres, iou_thres, multi_label, agnostic, max_det, nm: as of the stock non_max_suppression.

    Returns a dict of the stages, in order:
        raw: the heads as given.
        decoded: (bs, N, no): centre, size in pixels, objectness, class scores, and nm raw columns.
        candidates: (n, 7 + nm), rows [image, x1, y1, x2, y2, confidence, class, ...] of all images that pass conf_thres,
            in the order of the anchors.
        sorted: the same by falling confidence within each image (ties keep their order), at most 30,000 an image.
        kept: the rows that non-maximum suppression keeps, at most max_det an image.
    """
    heads = list(heads)
    anchors = torch.as_tensor(anchors)
    if not heads or len(anchors) != len(heads) or len(strides) != len(heads):
        raise ValueError(
            f"heads, anchors and strides must have one entry a level, but there are {len(heads)}, {len(anchors)} and "
            f"{len(strides)}"
        )
    decoded = torch.cat([_decode(h, a, float(s), nm) for h, a, s in zip(heads, anchors, strides, strict=True)], 1)
    candidates = [_candidates(image, conf_thres, multi_label, nm) for image in decoded]
    ordered = [rows[rows[:, 4].argsort(descending=True, stable=True)[:MAX_NMS]] for rows in candidates]
    kept = [rows[_greedy(rows, iou_thres, 0 if agnostic else MAX_WH, max_det)] for rows in ordered]
    none = decoded.new_empty(0, 7 + nm, dtype=torch.promote_types(decoded.dtype, torch.float32))
    return {
        "raw": heads,
        "decoded": decoded,
        "candidates": _with_image(candidates, none),
        "sorted": _with_image(ordered, none),
        "kept": _with_image(kept, none),
    }


def _decode(head: torch.Tensor, anchors: torch.Tensor, stride: float, nm: int) -> torch.Tensor:
    na = len(anchors)
    if head.dim() == 4:
        head = head.unflatten(1, (na, -1)).permute(0, 1, 3, 4, 2)
    if head.dim() != 5 or head.shape[1] != na:
        raise ValueError(f"a head must be (bs, {na} * no, ny, nx) or (bs, {na}, ny, nx, no), not {tuple(head.shape)}")
    _, _, ny, nx, no = head.shape
    rows = torch.arange(ny, device=head.device, dtype=head.dtype)[:, None].expand(ny, nx)
    columns = torch.arange(nx, device=head.device, dtype=head.dtype)[None].expand(ny, nx)
    corner = torch.stack((columns, rows), -1) - 0.5
    sides = (anchors.to(head) * stride)[:, None, None]
    centre, size, scores, extra = head.split((2, 2, no - 4 - nm, nm), -1)
    centre = (centre.sigmoid() * 2 + corner) * stride
    size = (size.sigmoid() * 2) ** 2 * sides
    return torch.cat((centre, size, scores.sigmoid(), extra), -1).flatten(1, 3)


def _candidates(prediction: torch.Tensor, conf_thres: float, multi_label: bool, nm: int) -> torch.Tensor:
    """Rows [x1, y1, x2, y2, confidence, class, extra...] in float32 (float64 stays) of one decoded image."""
    prediction = prediction[prediction[:, 4] > conf_thres]
    boxes, objectness, classes, extra = prediction.split((4, 1, prediction.shape[1] - 5 - nm, nm), 1)
    centre, half = boxes[:, :2], boxes[:, 2:] / 2
    boxes = torch.cat((centre - half, centre + half), 1)
    scores, extra = classes * objectness, extra * objectness
    if multi_label and scores.shape[1] > 1:
        row, column = (scores > conf_thres).nonzero(as_tuple=True)
    else:
        best, column = scores.max(1) if scores.numel() else (scores.new_empty(0), scores.new_empty(0, dtype=torch.long))
        row = (best > conf_thres).nonzero()[:, 0]
        column = column[row]
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    table = torch.cat((boxes[row], scores[row, column, None], column[:, None], extra[row]), 1).to(dtype)
    return table[table[:, :5].isfinite().all(1)]


def _greedy(rows: torch.Tensor, iou_thres: float, class_offset: int, max_det: int) -> torch.Tensor:
    """Indices of the rows that stay: each, in order, unless it overlaps one that stayed by more than iou_thres."""
    boxes = rows[:, :4] + rows[:, 5:6] * class_offset
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    kept: list[int] = []
    while len(kept) < max_det and bool(alive.any()):
        best = int(alive.nonzero()[0])
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[:, :2])
        high = torch.minimum(boxes[best, 2:], boxes[:, 2:])
        intersection = (high - low).clamp(min=0).prod(1)
        # Nothing meets where the intersection is empty; a union of such boxes can be zero or negative.
        overlap = (intersection > 0) & (intersection / (area[best] + area - intersection) > iou_thres)
        alive &= ~overlap
        alive[best] = False
    return torch.tensor(kept, dtype=torch.long, device=rows.device)


def _with_image(tables: Sequence[torch.Tensor], none: torch.Tensor) -> torch.Tensor:
    """The rows of all images in one table; ``none`` is the table of no images."""
    return torch.cat([none, *(torch.cat((rows.new_full((len(rows), 1), i), rows), 1) for i, rows in enumerate(tables))])
