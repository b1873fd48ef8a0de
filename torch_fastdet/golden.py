"""Saves what each stage of a detector's post-processing produced, and finds the first stage that differs.

Save the same named stages of a port, here and in C++ (``torch_fastdet/golden.h``), and compare::

    stages = golden.yolov5_stages(heads, anchors, strides)     # raw.0, raw.1, ..., decoded, candidates, sorted, kept
    golden.save("reference", stages)
    print(golden.compare("reference", "port"))                 # or: python -m torch_fastdet.golden compare reference port

A folder holds an ``NN_stage.npy`` for each stage and ``stages.txt``, which lists these files in the order of the pipeline. Elements are in
row-major order, little-endian: float16, float32, float64, int8, uint8, int16, int32, int64 or bool. bfloat16 is saved as float32.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from torch_fastdet import ops

__all__ = ["Comparison", "Row", "Writer", "compare", "load", "save", "yolov5_stages"]

INDEX = "stages.txt"
FILE = re.compile(r"\d{2,}_([A-Za-z0-9][A-Za-z0-9_.-]*)\.npy", re.ASCII)
DTYPES = ("<f2", "<f4", "<f8", "|i1", "|u1", "<i2", "<i4", "<i8", "|b1")
MAX_NMS = 30000  # candidates of an image in YOLOv5's non_max_suppression

Tensors = torch.Tensor | np.ndarray | Sequence[torch.Tensor | np.ndarray]


class Writer:
    """Save stages one by one. The folder is complete after each, so a program that dies leaves what it had.

    Args:
        folder: Where to save. It is made, or emptied of the stages that an earlier writer left there.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, str] = {}
        for file in _files(self.folder).values() if (self.folder / INDEX).exists() else ():
            (self.folder / file).unlink(missing_ok=True)
        self._write_index()

    def save(self, name: str, tensors: Tensors) -> None:
        """Append stage ``name``. A list or tuple of tensors becomes the stages ``name.0``, ``name.1``, ...

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``; each name once.
            tensors: A tensor or array of any device, or a list of these.

        Raises:
            TypeError: The dtype, or what is given as a tensor, cannot be saved.
            ValueError: The name has other characters than letters, digits, ``_``, ``-`` and ``.``, or is saved already.
        """
        if isinstance(tensors, (list, tuple)):
            for index, tensor in enumerate(tensors):
                self.save(f"{name}.{index}", tensor)
            return
        file = f"{len(self._files):02d}_{name}.npy"
        if not FILE.fullmatch(file):
            raise ValueError(f"a stage's name must be letters, digits, '_', '-' and '.', not {name!r}")
        if name in self._files:
            raise ValueError(f"stage {name!r} is already saved in {self.folder}: each stage is saved once")
        np.save(self.folder / file, _array(name, tensors))
        self._files[name] = file
        self._write_index()

    def _write_index(self) -> None:
        new = self.folder / f"{INDEX}.new"
        new.write_text("".join(f"{file}\n" for file in self._files.values()))
        new.replace(self.folder / INDEX)


def save(folder: str | os.PathLike, stages: Mapping[str, Tensors]) -> Path:
    """Save ``stages`` in their order, replacing what ``folder`` held, and return the folder.

    Args:
        folder: Where to save. It is made if it is not there.
        stages: Names with tensors or arrays, or with lists of them, on any device and with any stride.

    Raises:
        TypeError, ValueError: as of :meth:`Writer.save`.
    """
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages must map names to tensors, such as {{'decoded': tensor}}, not {type(stages).__name__}")
    writer = Writer(folder)
    for name, tensors in stages.items():
        writer.save(name, tensors)
    return writer.folder


def load(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Return the stages of a folder by name, in the order in which they were saved.

    Raises:
        FileNotFoundError: There is no such folder, or a file of it is missing.
        ValueError: A file is damaged.
    """
    stages = {}
    for name, file in _files(Path(folder)).items():
        path = Path(folder) / file
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError(f"{Path(folder) / INDEX} lists stage {name!r}, but {path} is missing")
        try:  # a mapped file is never longer than it says
            stages[name] = np.array(np.lib.format.open_memmap(path, mode="r"), order="C")
            if stages[name].dtype.str not in DTYPES:
                raise ValueError(f"it has dtype {stages[name].dtype}")
        except Exception as error:  # numpy reads the header as Python's text: a bad one can make that raise anything
            why = " ".join(str(error).split())
            raise ValueError(f"{path} is not an .npy file of a stage that can be read: {why}") from None
    return stages


def _files(folder: Path) -> dict[str, str]:
    """Return the file of each stage. No list names a file that a writer does not write."""
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} has no {INDEX}: it is not a folder of stage tensors")
    found: dict[str, str] = {}
    for number, line in enumerate(index.read_text(errors="replace").splitlines(), 1):
        name = FILE.fullmatch(line)
        if name is None or name[1] in found:
            raise ValueError(f"{index} line {number} must be the NN_stage.npy of another stage, but is {line!r}")
        found[name[1]] = line
    return found


def _array(name: str, tensor: object) -> np.ndarray:
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
        tensor = tensor.detach().cpu().resolve_neg()
        tensor = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if not isinstance(tensor, np.ndarray):
        what = f"a {tensor.layout} tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"stage {name!r} must be a dense tensor or an array, not {what}")
    dtype = tensor.dtype.newbyteorder("<")
    if dtype.str not in DTYPES:
        raise TypeError(f"stage {name!r} has dtype {dtype}, but one of {', '.join(DTYPES)} is expected")
    return np.array(tensor, dtype=dtype, order="C")


@dataclass(frozen=True)
class Row:
    """Hold how one stage compares.

    Attributes:
        stage: Its name.
        difference: What differs, in words; "" where the stages are equal.
        differing: Number of elements that differ.
        max_difference: The largest difference; infinite where a number meets NaN.
        index: Of the first element that differs, in row-major order.
        a, b: Its values.
        hint: An error that would explain the difference.
    """

    stage: str
    difference: str = ""
    differing: int = 0
    max_difference: float = 0.0
    index: tuple[int, ...] | None = None
    a: float | int | bool | None = None
    b: float | int | bool | None = None
    hint: str = ""

    @property
    def equal(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        return f"{self.stage}: {self.difference or 'equal'}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Comparison:
    """Hold how the stages of two folders compare, in order. True if all are equal; ``str()`` has a line for each."""

    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return all(row.equal for row in self.rows)

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
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise ValueError(f"{name} must be a number of at least 0, not {value}")
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
        return Row(name, f"A is {kinds[0]}, B is {kinds[1]}", hint=_hint(a, b))
    same = a == b  # integers of 64 bits do not fit a double
    x, y = a.astype(np.float64), b.astype(np.float64)
    same |= np.isnan(x) & np.isnan(y)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf)
        bound = atol + rtol * np.abs(x)
        same |= (gap <= bound) & np.isfinite(bound) & bool(rtol or atol)
    differing = int(np.count_nonzero(~same))
    if not differing:
        return Row(name)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmin(same)), same.shape))
    largest = float(gap[~same].max())
    words = f"{differing} of {a.size} elements differ, by at most {largest:.6g}; at ({','.join(map(str, index))}) "
    words += f"A is {a[index]:.9g}, B is {b[index]:.9g}"
    return Row(name, words, differing, largest, index, a[index].item(), b[index].item(), _hint(a, b))


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
        conf_thres, iou_thres, max_det: As of YOLOv5's non_max_suppression.

    Returns:
        A dict of the stages, in order:

        - raw: The heads as given.
        - decoded: (bs, N, no): centre, size in pixels, objectness, class scores.
        - candidates: (n, 7), rows [image, x1, y1, x2, y2, confidence, class] that pass conf_thres, in the order of the anchors.
        - sorted: The same by falling confidence within each image (ties keep their order), at most 30,000 an image.
        - kept: The rows that non-maximum suppression keeps, at most max_det an image.
    """
    heads, anchors = list(heads), torch.as_tensor(anchors)
    strides = [float(stride) for stride in strides]
    if not heads or len(anchors) != len(heads) or len(strides) != len(heads):
        counts = f"{len(heads)}, {len(anchors)} and {len(strides)}"
        raise ValueError(f"heads, anchors and strides must have one entry a level, but there are {counts}")
    decoded = ops.yolov5_decode(heads, anchors.to(heads[0]), strides)
    candidates = [_candidates(image, conf_thres) for image in decoded]
    ordered = [rows[rows[:, 4].argsort(descending=True, stable=True)[:MAX_NMS]] for rows in candidates]
    detections, lengths = ops.non_max_suppression_padded(decoded, conf_thres, iou_thres, max_det=max_det)
    kept = [rows[:count] for rows, count in zip(detections, lengths.tolist())]
    tables: dict[str, list[torch.Tensor] | torch.Tensor] = {"raw": heads, "decoded": decoded}
    for name, images in (("candidates", candidates), ("sorted", ordered), ("kept", kept)):
        none = decoded.new_empty(0, 7, dtype=torch.promote_types(decoded.dtype, torch.float32))
        numbered = [torch.cat((rows.new_full((len(rows), 1), i), rows), 1) for i, rows in enumerate(images)]
        tables[name] = torch.cat([none, *numbered])
    return tables


def _candidates(prediction: torch.Tensor, conf_thres: float) -> torch.Tensor:
    """Return rows [x1, y1, x2, y2, confidence, class] in float32 (float64 stays) of one decoded image."""
    prediction = prediction[prediction[:, 4] > conf_thres]
    centre, half = prediction[:, :2], prediction[:, 2:4] / 2
    confidence, best = (prediction[:, 5:] * prediction[:, 4:5]).max(1, keepdim=True)
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    table = torch.cat((centre - half, centre + half, confidence, best), 1).to(dtype)
    return table[(confidence[:, 0] > conf_thres) & table[:, :5].isfinite().all(1)]


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
