"""Define the masks of detections in float64, one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def crop(values: Tensor, boxes: Tensor, outside: float) -> Tensor:
    height, width = values.shape[1:]
    x, y = torch.arange(width)[None, None], torch.arange(height)[None, :, None]
    x1, y1, x2, y2 = boxes[:, :, None, None].unbind(1)
    return torch.where((x >= x1) & (x < x2) & (y >= y1) & (y < y2), values, torch.full_like(values, outside))


def instance_margins(
    protos: Tensor,
    coefficients: Tensor,
    boxes: Tensor,
    size: list[int],
    window: list[int] | None = None,
    factor: int = 1,
    box_scale: list[float] | None = None,
    sigmoid: bool = False,
    crop_first: bool = False,
) -> Tensor:
    """Return how far each pixel of an image is above the threshold; cropped pixels are infinitely far below."""
    # The operator and the original functions scale boxes in float32.
    boxes = (boxes.float() * torch.tensor((box_scale or [1.0, 1.0]) * 2)).double()
    values = (coefficients.double() @ protos.double().flatten(1)).view(-1, *protos.shape[1:])
    values = values.sigmoid() if sigmoid else values
    if crop_first:
        values = crop(values, boxes, 0.0)
    if factor > 1:
        values = F.interpolate(values[None], scale_factor=factor, mode="bilinear")[0]
    if window:
        values = values[:, window[0] : window[2], window[1] : window[3]]
    values = F.interpolate(values[None], size, mode="bilinear")[0] if len(values) else values.new_empty(0, *size)
    values = values - (0.5 if sigmoid else 0.0)
    return values if crop_first else crop(values, boxes, -float("inf"))
