"""Which part of each source image a batch shows: a mosaic shows 37% of the pixels of its four images, on average."""

from __future__ import annotations

import numpy as np

from torch_fastdet.images.plan import NO_WARP, Plan

#: Pixels around what the corners of an image say: bilinear interpolation's neighbours, and rounding.
MARGIN = 2


def shown_of_canvases(plan: Plan) -> np.ndarray:
    """What is seen of each layer's canvas: (layers, 4) x0, y0, x1, y1. What a paste or an odd map shows is taken whole."""
    canvas = np.zeros((len(plan.layers), 4))
    canvas[:, 2:] = plan.layers[:, [3, 2]]
    mapped = np.flatnonzero((plan.layers[:, 4] != NO_WARP) & (plan.layers[:, 5] < 0))
    if not len(mapped):
        return canvas
    height, width = plan.size
    corners = np.array([[0, width, 0, width], [0, 0, height, height], [1, 1, 1, 1]], dtype=np.float64)
    matrices = plan.matrices[mapped].reshape(-1, 3, 3)
    regular = np.abs(np.linalg.det(matrices)) > 1e-12
    points = np.linalg.inv(np.where(regular[:, None, None], matrices, np.eye(3))) @ corners
    regular &= (points[:, 2] > 1e-6).all(1)  # else the horizon of a perspective map is in sight
    points = points[regular, :2] / points[regular, 2:]
    seen = mapped[regular]
    canvas[seen, :2] = np.maximum(canvas[seen, :2], np.floor(points.min(2)) - MARGIN)
    canvas[seen, 2:] = np.minimum(canvas[seen, 2:], np.ceil(points.max(2)) + MARGIN)
    return canvas


def shown(plan: Plan) -> np.ndarray:
    """What is seen of each placement's source, in the source's pixels: (placements, 4) int64 x0, y0, x1, y1; empty where x1 <= x0."""
    counts = plan.layers[:, 1]
    layer = np.repeat(np.arange(len(counts)), counts)
    placement = np.repeat(plan.layers[:, 0] - np.cumsum(counts) + counts, counts) + np.arange(len(layer))
    canvas = shown_of_canvases(plan)[layer]
    src_h, src_w, src_x, src_y, x, y, w, h = plan.placements[placement, 2:].T
    shift = np.stack((src_x - x, src_y - y), 1)
    low = np.maximum(canvas[:, :2], np.stack((x, y), 1)) + shift
    high = np.minimum(canvas[:, 2:], np.stack((x + w, y + h), 1)) + shift
    out = np.zeros((len(plan.placements), 4), dtype=np.int64)
    out[placement, :2] = np.maximum(low, 0)
    out[placement, 2:] = np.minimum(high, np.stack((src_w, src_h), 1))
    return out


def around(rectangles: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """The smallest rectangle around those of each group; zeros where all of them are empty."""
    some = (rectangles[:, 2:] > rectangles[:, :2]).all(1)
    low = np.full((groups, 2), np.iinfo(np.int64).max)
    high = np.zeros((groups, 2), dtype=np.int64)
    np.minimum.at(low, group[some], rectangles[some, :2])
    np.maximum.at(high, group[some], rectangles[some, 2:])
    return np.concatenate((np.minimum(low, high), high), 1)


def shown_of(plan: Plan, indices: np.ndarray) -> np.ndarray:
    """What a plan shows of each of these images, which ascend, in its pixels: (n, 4) int64."""
    wanted = np.flatnonzero(np.isin(plan.sources, indices))
    return around(shown(plan)[wanted], np.searchsorted(indices, plan.sources[wanted]), len(indices))
