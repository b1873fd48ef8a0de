"""Counts the products of torch_fastdet's operators, and registers the counts with ``torch.utils.flop_counter``.

Like PyTorch's, they count only convolutions and products of matrices: two for a multiplication whose result is added up. Other
operators count as nothing, like the elementwise operators of PyTorch that they replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["FORMULAS", "register"]

#: Operator -> formula of the shapes of its arguments, for the operators that multiply matrices.
FORMULAS: dict[str, Callable[..., int]] = {
    "stem_conv2d": lambda squares, weight, *, out_shape: 2 * math.prod(out_shape) * math.prod(weight[1:]),
    "stem_conv2d_backward": lambda grad_output, squares, kernel_size, **_: (
        2 * math.prod(grad_output) * squares[1] * kernel_size**2
    ),
    # This multiplies coefficients and prototypes, and assumes that the boxes cover the image.
    "instance_masks": lambda protos, coefficients, *_, **__: 2 * math.prod(coefficients) * math.prod(protos[-2:]),
}


def register() -> None:
    """Register the formulas with ``torch.utils.flop_counter``, as the import of this module does. A user's own formula stays."""
    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.torch_fastdet, name)
        if packet not in flop_registry:
            register_flop_formula(packet)(formula)


register()
