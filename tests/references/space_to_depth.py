"""Turn squares of 2x2 pixels into channels, in float64, pixel by pixel of a square."""

import torch
from torch import Tensor


def space_to_depth(x: Tensor, channels: int, border: bool = False) -> Tensor:
    n, c, height, width = x.shape
    out = x.new_zeros(n, channels, height // 2 + border, width // 2 + border, dtype=torch.float64)
    for i in (0, 1):
        for j in (0, 1):
            out[:, 2 * i + j : 4 * c : 4, int(border) :, int(border) :] = x[:, :, i::2, j::2].double()
    return out


def space_to_depth_backward(grad_output: Tensor, channels: int, border: bool = False) -> Tensor:
    grad = grad_output.double()[:, :, int(border) :, int(border) :]
    out = grad.new_zeros(grad.shape[0], channels, 2 * grad.shape[2], 2 * grad.shape[3])
    for i in (0, 1):
        for j in (0, 1):
            out[:, :, i::2, j::2] = grad[:, 2 * i + j : 4 * channels : 4]
    return out
