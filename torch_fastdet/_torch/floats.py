"""Integer tensors for operators of floating point."""

from __future__ import annotations

import torch
from torch import Tensor


def as_float(tensor: Tensor) -> Tensor:
    """Integers and bools in float32, which is what they become in stock's divisions; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.float()
