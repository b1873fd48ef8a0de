"""Counts the products of torch_fastdet's operators, and registers the counts with ``torch.utils.flop_counter``.

As torch's own counts, these are of convolutions and products of matrices alone: two for a multiplication whose result is added up.
Other operators count as nothing, as the elementwise operators of torch do that they replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["FORMULAS", "register"]

Shape = Sequence[int]


def _stem_conv2d(squares: Shape, weight: Shape, *, out_shape: Shape) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def _stem_conv2d_backward(grad_output: Shape, squares: Shape, kernel_size: int, **_: object) -> int:
    return 2 * math.prod(grad_output) * squares[1] * kernel_size**2


def _instance_masks(protos: Shape, coefficients: Shape, *_: object, **__: object) -> int:
    """Count the products of coefficients and prototypes. The boxes are taken to cover the image."""
    return 2 * math.prod(coefficients) * math.prod(protos[-2:])


#: Operator -> formula of the shapes of its arguments, for the operators that multiply matrices.
FORMULAS: dict[str, Callable[..., int]] = {
    "stem_conv2d": _stem_conv2d,
    "stem_conv2d_backward": _stem_conv2d_backward,
    "instance_masks": _instance_masks,
}


def register() -> None:
    """Register the formulas with ``torch.utils.flop_counter``, as the import of this module does. A user's own formula stays."""
    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.torch_fastdet, name)
        if packet not in flop_registry:
            register_flop_formula(packet)(formula)


register()
