"""Define a convolution of stride 1 and its weight gradient in float64, tap by tap."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _taps(squares: Tensor, size: int):
    padded = F.pad(squares.double(), [int(size == 3)] * 4)
    height, width = padded.shape[2] - size + 1, padded.shape[3] - size + 1
    for i in range(size):
        for j in range(size):
            yield i, j, padded[:, :, i : i + height, j : j + width]


def stem_conv2d(squares: Tensor, weight: Tensor) -> Tensor:
    return sum(
        torch.einsum("nchw,kc->nkhw", part, weight[:, :, i, j].double())
        for i, j, part in _taps(squares, weight.shape[2])
    )


def stem_conv2d_backward(grad_output: Tensor, squares: Tensor, size: int) -> Tensor:
    out = grad_output.new_zeros(grad_output.shape[1], squares.shape[1], size, size, dtype=torch.float64)
    for i, j, part in _taps(squares, size):
        out[:, :, i, j] = torch.einsum("nchw,nkhw->kc", part, grad_output.double())
    return out
