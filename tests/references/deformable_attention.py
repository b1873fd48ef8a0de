"""Define multi-scale deformable attention in float64, one pixel around each point after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def deformable_attention(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Map value (B, S, H, C), locations (B, Q, H, L, P, 2) and weights (B, Q, H, L, P) to (B, Q, H * C)."""
    value, locations, weights = value.double(), locations.double(), weights.double()
    batch, _, heads, channels = value.shape
    queries = locations.shape[1]
    out = value.new_zeros(batch, queries, heads, channels)
    image, head = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, 1, -1, 1)
    first = 0
    for level, (height, width) in enumerate(shapes):
        x = locations[:, :, :, level, :, 0] * width - 0.5
        y = locations[:, :, :, level, :, 1] * height - 0.5
        exists = x.isfinite() & y.isfinite()
        x, y = (torch.where(exists, place, torch.full_like(place, -9)).clamp(-9, 1e9) for place in (x, y))
        # As in grid_sample, a point on a pixel has the slope on its right, and below it.
        left, top = x.detach().floor(), y.detach().floor()
        for row, share_y in ((top, 1 - (y - top)), (top + 1, y - top)):
            for column, share_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                pixel = first + torch.where(inside, row * width + column, torch.zeros_like(row)).long()
                values = value[image.to(value.device), pixel, head.to(value.device)]  # (B, Q, H, P, C)
                parts = values * (share_x * share_y * weights[:, :, :, level])[..., None]
                out = out + torch.where(inside[..., None], parts, 0).sum(3)
        first += height * width
    return out.flatten(2)
