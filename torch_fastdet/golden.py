"""Saves what each stage of a detector's post-processing produced, and finds the first stage that differs.

Save the same named stages of a port, here and in C++ (``torch_fastdet/golden.h``), and compare::

    stages = golden.yolov5_stages(heads, anchors, strides)     # raw.0, raw.1, ..., decoded, candidates, sorted, kept
    golden.save("reference", stages)
    print(golden.compare("reference", "port"))                 # or: python -m torch_fastdet.golden compare reference port

A folder holds a ``STAGE.npy`` for each stage and ``stages.txt``, which lists the stages in the order of the pipeline. Elements are in
row-major order, little-endian: float16, float32, float64, int8, uint8, int16, int32, int64 or bool. bfloat16 is saved as float32.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torch_fastdet import ops

__all__ = ["Comparison", "Row", "compare", "load", "save", "yolov5_stages"]

INDEX = "stages.txt"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
DTYPES = ("<f2", "<f4", "<f8", "|i1", "|u1", "<i2", "<i4", "<i8", "|b1")
MAX_NMS = 30000  # candidates of an image in YOLOv5's non_max_suppression

Tensors = torch.Tensor | np.ndarray | Sequence[torch.Tensor | np.ndarray]


def save(folder: str | os.PathLike, stages: Mapping[str, Tensors]) -> Path:
    """Save ``stages`` in their order, replacing what ``folder`` held, and return the folder.

    Args:
        folder: Where to save. It is made if it is not there.
        stages: Names of letters, digits, ``_``, ``-`` and ``.`` with tensors or arrays, on any device and with any stride. A list or
            tuple of tensors becomes the stages ``name.0``, ``name.1``, ...

    Raises:
        TypeError: A dtype, or what is given as a tensor, cannot be saved.
        ValueError: A name has other characters, or is given twice. Nothing is written then.
    """
    arrays: dict[str, np.ndarray] = {}
    for stage, value in stages.items():
        lone = isinstance(value, (torch.Tensor, np.ndarray))
        for name, tensor in (
            {stage: value}.items() if lone else ((f"{stage}.{i}", each) for i, each in enumerate(value))
        ):
            if not NAME.fullmatch(name):
                raise ValueError(f"a stage's name must be letters, digits, '_', '-' and '.', not {name!r}")
            if name in arrays:
                raise ValueError(f"stage {name!r} is given twice, but each stage is saved once")
            if isinstance(tensor, torch.Tensor):
                tensor = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
            arrays[name] = np.asarray(tensor, order="C")
            if (dtype := arrays[name].dtype).str not in DTYPES:
                raise TypeError(f"stage {name!r} has dtype {dtype}, but one of {', '.join(DTYPES)} is expected")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # a folder without one is not whole
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / INDEX).write_text("".join(f"{name}\n" for name in arrays))
    return folder


def load(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return the stages of a folder by name, in the order in which they were saved.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A file is missing or damaged.
    """
    stages = {}
    for name in (Path(folder) / INDEX).read_text(errors="replace").splitlines():
        path = Path(folder) / f"{name}.npy"
        try:  # a mapped file is never longer than it says
            stages[name] = np.array(np.lib.format.open_memmap(path, mode="r"), order="C")
            if stages[name].dtype.str not in DTYPES:
                raise ValueError(f"it has dtype {stages[name].dtype}")
        except Exception as error:  # numpy reads the header as Python's text: a bad one can make that raise anything
            raise ValueError(f"{path} is not an .npy file of a stage: {' '.join(str(error).split())}") from None
    return stages


@dataclass(frozen=True)
class Row:
    """Hold how one stage compares.

    Attributes:
        stage: Its name.
        difference: What differs, in words; "" where the stages are equal.
        hint: An error that would explain the difference.
    """

    stage: str
    difference: str = ""
    hint: str = ""

    @property
    def equal(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        return f"{self.stage}: {self.difference or 'equal'}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Comparison:
    """Hold how the stages of two folders compare, in order. True if all are equal; ``str()`` has a line for each."""

    rows: list[Row]

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Row | None:
        """Return the first stage that differs. Later stages inherit its error."""
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self) -> str:
        first = self.first_difference
        head = f"First difference: {first}" if first else f"Equal: {len(self.rows)} stages"
        return "\n".join([head, *(f"  {number} {row}" for number, row in enumerate(self.rows, 1))])


def compare(a: str | os.PathLike, b: str | os.PathLike, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compare folder ``b`` with folder ``a``, the reference, stage by stage.

    Shapes and dtypes must be the same. Elements are equal where ``|a - b| <= atol + rtol * |a|``, by default only where they
    are the same number. NaN equals NaN.

    Args:
        a: The reference's folder.
        b: The folder to compare.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        FileNotFoundError, ValueError: as of :func:`load`; or there are no stages, or a tolerance is negative.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"rtol is {rtol} and atol is {atol}, but 0 or more is expected")
    in_a, in_b = load(a), load(b)
    names = dict.fromkeys([*in_a, *in_b])
    if not names:
        raise ValueError(f"there is nothing to compare: {a} and {b} hold no stages")
    return Comparison([_row(name, in_a.get(name), in_b.get(name), rtol, atol) for name in names])


def _row(name: str, a: np.ndarray | None, b: np.ndarray | None, rtol: float, atol: float) -> Row:
    if a is None or b is None:
        return Row(name, "only in B" if a is None else "only in A")
    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = [f"{x.dtype.str}({','.join(map(str, x.shape))})" for x in (a, b)]
        return Row(name, f"A is {kinds[0]}, B is {kinds[1]}", _hint(a, b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    exact = a.dtype.kind != "f" and not rtol and not atol  # integers of 64 bits do not fit a double
    with np.errstate(invalid="ignore", over="ignore"):
        differs = a != b if exact else ~np.isclose(y, x, rtol, atol, equal_nan=True)
        gap = np.nan_to_num(np.abs(x - y)[differs], nan=np.inf, posinf=np.inf)
    if not len(gap):
        return Row(name)
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    words = f"{len(gap)} of {a.size} elements differ, by at most {gap.max():.6g}; at ({','.join(map(str, index))}) "
    return Row(name, words + f"A is {a[index]:.9g}, B is {b[index]:.9g}", _hint(a, b))


def _hint(a: np.ndarray, b: np.ndarray) -> str:
    """Return an order of the dimensions or of the rows, or a cut-off, that would explain the difference; "" if none does."""
    if a.size == b.size > 1 and a.ndim <= 5:
        for order in itertools.permutations(range(a.ndim)):
            moved = a.transpose(order)
            if _same(moved.flat[:64], b.flat[:64]) and _same(moved.ravel(), b.ravel()):
                if a.shape != b.shape and order == tuple(range(a.ndim)):
                    return "the same elements in the same order, under another shape"
                return f"B's elements are in the order of A.permute{order}: a wrong stride or layout"
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1]:
        rows = min(len(a), len(b))
        if len(a) != len(b) and _same(a[:rows], b[:rows]):
            longer, shorter = ("A", "B") if len(a) > len(b) else ("B", "A")
            return f"{longer} starts with all {rows} rows of {shorter}, and goes on: another threshold or limit"
        if len(a) == len(b) and _same(*(rows[np.lexsort(rows.T[::-1])] for rows in (a, b))):
            return "the same rows in another order"
    return ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f")


def yolov5_stages(
    heads: Sequence[torch.Tensor],
    anchors: torch.Tensor,
    strides: Sequence[float] | torch.Tensor,
    conf_thres: float = 0.25,
    iou_thres: float = 0.45,
    max_det: int = 300,
) -> dict[str, list[torch.Tensor] | torch.Tensor]:
    """Compute the stages of YOLOv5's post-processing, for :func:`save`, with which a port is compared.

    Args:
        heads: One raw map a level, (bs, na * no, ny, nx) or (bs, na, ny, nx, no), no = 5 + classes.
        anchors: (levels, na, 2) widths and heights in grid cells, as YOLOv5's ``Detect.anchors``.
        strides: Pixels a grid cell, for each level.
        conf_thres: As of YOLOv5's non_max_suppression.
        iou_thres: The same.
        max_det: The same.

    Returns:
        A dict of the stages, in order:

        - raw: The heads as given.
        - decoded: (bs, N, no): center, size in pixels, objectness, class scores.
        - candidates: (n, 7), rows [image, x1, y1, x2, y2, confidence, class] that pass conf_thres, in the order of the anchors.
        - sorted: The same by falling confidence within each image (ties keep their order), at most 30,000 an image.
        - kept: The rows that non-maximum suppression keeps, at most max_det an image.
    """
    heads, anchors = list(heads), torch.as_tensor(anchors).to(heads[0])
    decoded = ops.yolov5_decode(heads, anchors, [float(stride) for stride in strides])
    image, anchor = (decoded[..., 4] > conf_thres).nonzero(as_tuple=True)
    rows = decoded[image, anchor]
    centre, half = rows[:, :2], rows[:, 2:4] / 2
    confidence, best = (rows[:, 5:] * rows[:, 4:5]).max(1, keepdim=True)
    dtype = torch.promote_types(decoded.dtype, torch.float32)
    candidates = torch.cat((image[:, None].to(dtype), centre - half, centre + half, confidence, best), 1)
    candidates = candidates[(confidence[:, 0] > conf_thres) & candidates[:, :6].isfinite().all(1)]
    ordered = [candidates[:0]]
    for number in range(len(decoded)):
        rows = candidates[candidates[:, 0] == number]
        ordered.append(rows[rows[:, 5].argsort(descending=True, stable=True)[:MAX_NMS]])
    detections, counts = ops.non_max_suppression_padded(decoded, conf_thres, iou_thres, max_det=max_det)
    image, place = (torch.arange(detections.shape[1], device=counts.device) < counts[:, None]).nonzero(as_tuple=True)
    kept = torch.cat((image[:, None].to(dtype), detections[image, place]), 1)
    return {"raw": heads, "decoded": decoded, "candidates": candidates, "sorted": torch.cat(ordered), "kept": kept}


def main(arguments: list[str] | None = None) -> int:
    """Return 0 where all stages are equal, 1 where one differs, 2 where a folder cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m torch_fastdet.golden", description="Compare stage tensors.")
    command = parser.add_subparsers(dest="command", required=True).add_parser("compare", description=main.__doc__)
    command.add_argument("a", metavar="A", help="folder of the reference")
    command.add_argument("b", metavar="B", help="folder to check")
    command.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: the same number)")
    command.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: the same number)")
    options = parser.parse_args(arguments)
    try:
        comparison = compare(options.a, options.b, options.rtol, options.atol)
    except (OSError, ValueError) as error:
        print(f"torch_fastdet.golden: {error}", file=sys.stderr)
        return 2
    print(comparison)
    return 0 if comparison else 1


if __name__ == "__main__":
    sys.exit(main())
