"""Writes torch_fastdet's operators to ONNX, as standard operators where these give the same bits.

    torch.onnx.export(model, (image,), "network.onnx", dynamo=True, custom_translation_table=translations())

The file needs no torch_fastdet. A model that calls other operators of torch_fastdet raises an error in ``torch.onnx.export``: export
the network that gives raw heads, and run the post-processing on these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import torch_fastdet.ops  # noqa: F401  (registers the operators)

__all__ = ["translations"]


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Return the ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``.

    It has the operators whose ONNX form gives the same bits: ``upsample_nearest2x``, ``upsample_nearest2x_cat``, ``max_pools_cat``
    (without indices; the runtime decides on NaNs) and ``space_to_depth``.

    Raises:
        ImportError: onnxscript is not installed.
    """
    try:
        from onnxscript import opset18 as op
    except ImportError as error:
        raise ImportError(f"torch_fastdet.onnx needs the packages onnx and onnxscript: {error}") from None

    def upsample(x):  # type: ignore[no-untyped-def]
        scales = op.Constant(value_floats=[1.0, 1.0, 2.0, 2.0])
        return op.Resize(
            x, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )

    def upsample_cat(x, skip):  # type: ignore[no-untyped-def]
        return op.Concat(upsample(x), skip, axis=1)

    def max_pools_cat(x, kernel_size: int = 5, pools: int = 3):  # type: ignore[no-untyped-def]
        parts = [x]
        for _ in range(pools):
            pads = [kernel_size // 2] * 4
            parts.append(op.MaxPool(parts[-1], kernel_shape=[kernel_size] * 2, pads=pads, strides=[1, 1])[0])
        return op.Concat(*parts, axis=1), op.Constant(value_ints=[0])

    def space_to_depth(x, channels: int, border: bool = False, dtype: int | None = None):  # type: ignore[no-untyped-def]
        own = x.shape[1]
        order = [(2 * i + j) * own + c for c in range(own) for i in range(2) for j in range(2)]
        squares = op.Gather(op.SpaceToDepth(x, blocksize=2), op.Constant(value_ints=order), axis=1)
        pads = op.Constant(value_ints=[0, 0, int(border), int(border), 0, channels - 4 * own, 0, 0])
        padded = op.Pad(squares, pads)
        return padded if dtype is None else op.Cast(padded, to=dtype)

    ours = torch.ops.torch_fastdet
    return {
        ours.upsample_nearest2x.default: upsample,
        ours.upsample_nearest2x_cat.default: upsample_cat,
        ours.max_pools_cat.default: max_pools_cat,
        ours.space_to_depth.default: space_to_depth,
    }
