"""Exports models that call torch_fastdet's operators to ONNX, as standard operators where these give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

import torch_fastdet.ops  # noqa: F401  (registers the operators)

__all__ = ["export", "translations"]

OPSET = 18  # the oldest that torch writes without saying otherwise


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Return the ``custom_translation_table`` by which ``torch.onnx.export(..., dynamo=True)`` writes torch_fastdet's operators.

    The table has operators whose ONNX form gives the same bits: ``upsample_nearest2x``, ``upsample_nearest2x_cat``, ``max_pools_cat``
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


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[object] | torch.Tensor = (),
    file: str | PathLike[str] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a model as ``torch.onnx.export(..., dynamo=True)`` does, with torch_fastdet's operators as standard ONNX operators.

    The file needs no torch_fastdet. See :func:`translations` for the operators.

    Args:
        model: A module or an exported program.
        args: Example inputs in a tuple, or the only one; not used for an exported program.
        file: Where to write the model; None writes no file.
        options: ``dynamic_shapes``, ``kwargs`` and ``strict`` are ``torch.export.export``'s, the others ``torch.onnx.export``'s.

    Returns:
        The ONNX program.

    Raises:
        ValueError: The model calls an operator of torch_fastdet that has no exact ONNX form, or ``dynamo=False``. Nothing is written.
        ImportError: onnxscript is not installed.
    """
    if not options.pop("dynamo", True):
        raise ValueError(
            "torch_fastdet.onnx.export: dynamo is False, but the exporter without dynamo cannot write our operators"
        )
    table = translations()
    own = {name: options.pop(name) for name in ("dynamic_shapes", "kwargs", "strict") if name in options}
    if isinstance(model, torch.export.ExportedProgram):
        program = model
    else:
        with torch.no_grad():
            program = torch.export.export(model, (args,) if isinstance(args, torch.Tensor) else tuple(args), **own)
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {str(node.target) for module in modules for node in module.graph.nodes}
    unknown = {name for name in called if name.startswith("torch_fastdet.")} - set(map(str, table))
    if unknown:
        names = ", ".join(sorted(name.split(".")[1] for name in unknown))
        raise ValueError(
            f"torch_fastdet.onnx.export: the model calls {names}, for which ONNX has no operators that give the same bits; export the "
            "network that gives raw heads, and run the post-processing on these"
        )
    table |= options.pop("custom_translation_table", None) or {}
    given = {"opset_version": OPSET, "verbose": False, **options}
    written = torch.onnx.export(program, (), file, dynamo=True, custom_translation_table=table, **given)
    assert written is not None  # only the exporter without dynamo gives None
    return written
