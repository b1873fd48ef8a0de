"""Define max poolings of stride 1 and their gradient in float64, window by window."""

import math

import torch
from torch import Tensor


def max_pool(x: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    """Return the pooled map and the (flat) index of each value in the map: the first of equals, or the last NaN."""
    x = x.double()
    height, width, radius = x.shape[2], x.shape[3], kernel_size // 2
    out, source = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64, device=x.device)
    for h in range(height):
        for w in range(width):
            rows = range(max(0, h - radius), min(height, h + radius + 1))
            columns = range(max(0, w - radius), min(width, w + radius + 1))
            best = torch.full(x.shape[:2], -math.inf, dtype=torch.float64, device=x.device)
            index = torch.full(x.shape[:2], rows[0] * width + columns[0], device=x.device)
            for y in rows:
                for z in columns:
                    value = x[:, :, y, z]
                    taken = (value > best) | value.isnan()
                    best, index = torch.where(taken, value, best), torch.where(taken, y * width + z, index)
            out[:, :, h, w], source[:, :, h, w] = best, index
    return out, source


def max_pools_cat(x: Tensor, kernel_size: int, pools: int) -> tuple[Tensor, list[Tensor]]:
    parts, sources = [x.double()], []
    for _ in range(pools):
        pooled, source = max_pool(parts[-1], kernel_size)
        parts.append(pooled)
        sources.append(source)
    return torch.cat(parts, 1), sources


def passed_back(grad: Tensor, source: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return the gradient of a map of this size, where ``source`` has the (flat) places of the values of ``grad``."""
    passed = grad.new_zeros(*grad.shape[:2], math.prod(size))
    return passed.scatter_add_(2, source.flatten(2), grad.flatten(2)).unflatten(2, size)


def max_pools_cat_backward(grad_y: Tensor, sources: list[Tensor]) -> Tensor:
    parts = list(grad_y.double().chunk(len(sources) + 1, 1))
    for i in reversed(range(len(sources))):
        parts[i] = parts[i] + passed_back(parts[i + 1], sources[i], parts[i].shape[2:])
    return parts[0]
