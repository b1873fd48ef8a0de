"""Computes multi-scale deformable attention, as in Deformable DETR and the detectors after it."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def deformable_attention(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Sum points of several feature maps, sampled bilinearly and weighted, for each query and head.

    It takes one launch forward and two backward without a host sync, and can be captured in a CUDA graph. Sums are in
    float32 (float64 for float64) whatever the storage type. The gradients have the same bits in every run: those of
    value are added as integers, in units of a power of two that a bound of the sum gives (30 bits for half types, else
    61).

    Args:
        value: (batch, pixels, heads, channels), float16, bfloat16, float32 or float64. The pixels are those of all levels, one level
            after the other, row by row. Any number of channels; multiples of 8 up to 256 are the fastest.
        shapes: (height, width) of each level, at most 16 levels. Numbers of the host, not a tensor.
        locations: (batch, queries, heads, levels, points, 2): x and y of each point as shares of its level, from the top left
            corner of the image at 0 to its bottom right corner at 1. What lies outside counts as 0, and so does a location that is NaN or
            infinite. Read as float32 (float64 beside a float64 value).
        weights: (batch, queries, heads, levels, points), as they are: take the softmax before. Read as the locations are.

    Returns:
        (batch, queries, heads * channels) of value's dtype, under autocast too, contiguous.

    Gradients reach value, locations and weights; there is no second derivative. A value's gradient that is not finite makes the
    gradient of its image and head NaN on a GPU.

    These are copied first: tensors that are not contiguous or not aligned to 16 bytes, and locations and weights of another dtype.

    Raises:
        RuntimeError: shapes, dtypes, layouts or devices do not fit each other.
        ValueError: shapes has no level, more than 16, or a side below 1; or an image has 2**31 elements or more.
        TypeError: an argument is not a tensor where one is expected, or shapes is not a list of pairs.

    Source: Zhu et al., Deformable DETR (2021), with the sampling of ``torch.nn.functional.grid_sample(..., "bilinear", "zeros",
    align_corners=False)``.
    """
    if not torch.jit.is_scripting():
        for i, shape in enumerate(shapes):
            if len(shape) != 2:
                raise ValueError(f"deformable_attention: shapes[{i}] is {shape}, but (height, width) is expected")
    sides: list[int] = []
    for height, width in shapes:
        sides.append(height)
        sides.append(width)
    return torch.ops.torch_fastdet.deformable_attention(value, sides, locations, weights)
