"""Compares two folders of stage tensors, stage by stage."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from torch_fastdet.golden.files import Stage, format_ints, load

# A hint tries every order of the dimensions: 120 at five.
MAX_HINT_DIMS = 5


@dataclass(frozen=True)
class Row:
    """How one stage compares.

    ``differences`` holds "shape", "stride", "dtype", "values", or "only in A" / "only in B"; it is empty where the two
    are equal. ``differing`` elements of ``elements`` differ, by at most ``max_difference`` (NaN against a number counts
    as infinite); the first, in row-major order, is at ``index`` and reads ``a`` and ``b``. ``hint`` names an error that
    would explain the difference.
    """

    number: int
    stage: str
    differences: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    strides: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    elements: int = 0
    differing: int = 0
    max_difference: float = 0.0
    index: tuple[int, ...] | None = None
    a: float | int | bool | None = None
    b: float | int | bool | None = None
    hint: str = ""

    @property
    def equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Comparison:
    """The stages of two folders, in the order of the pipeline. True where all are equal; str() is the table."""

    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The first stage of the pipeline that differs: what comes after it inherits its error."""
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self) -> str:
        return "\n".join([_headline(self), *_table(self.rows)])


def compare(
    a: str | os.PathLike, b: str | os.PathLike, rtol: float = 0.0, atol: float = 0.0, stride: bool = True
) -> Comparison:
    """Compares folder ``b`` with folder ``a``, the reference.

    Elements are equal where ``|a - b| <= atol + rtol * |a|``, by default only where they are the same number; NaN equals
    NaN. Shape and dtype must be the same, and stride too (of dimensions longer than 1) unless ``stride=False``.

    Returns a Comparison: ``bool()`` says whether all stages are equal, ``str()`` is a table with the stages that differ
    first, in the order of the pipeline. Raises FileNotFoundError or ValueError with one line for a bad folder.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise ValueError(f"{name} must be a number of at least 0, not {value}")
    stages_a, stages_b = load(a), load(b)
    names = list(dict.fromkeys([*stages_a, *stages_b]))
    if not names:
        raise ValueError(f"there is nothing to compare: {a} and {b} hold no stages")
    return Comparison(
        [_row(n, name, stages_a.get(name), stages_b.get(name), rtol, atol, stride) for n, name in enumerate(names, 1)]
    )


def _row(number: int, name: str, a: Stage | None, b: Stage | None, rtol: float, atol: float, stride: bool) -> Row:
    shapes = (a.shape if a else None, b.shape if b else None)
    strides = (a.stride if a else None, b.stride if b else None)
    dtypes = (a.dtype if a else None, b.dtype if b else None)
    if a is None or b is None:
        return Row(number, name, ("only in A" if a else "only in B",), shapes, strides, dtypes)
    differences = []
    if a.shape != b.shape:
        differences.append("shape")
    elif stride and _strides_that_matter(a) != _strides_that_matter(b):
        differences.append("stride")
    if a.dtype != b.dtype:
        differences.append("dtype")
    found = {}
    if a.shape == b.shape:
        found = _differing(a.values, b.values, rtol, atol)
        if found["differing"]:
            differences.append("values")
    hint = _hint(a.values, b.values) if found.get("differing") or a.shape != b.shape else ""
    return Row(number, name, tuple(differences), shapes, strides, dtypes, hint=hint, **found)


def _strides_that_matter(stage: Stage) -> tuple[int, ...]:
    if 0 in stage.shape:
        return ()
    return tuple(step for size, step in zip(stage.shape, stage.stride, strict=True) if size > 1)


def _differing(a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> dict:
    same = a == b
    # Integers of 64 bits do not fit a double; floats are subtracted as doubles, halves too.
    x, y = (v.astype(np.float64) for v in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        gap = np.where(np.isnan(gap), np.inf, gap)
        bound = atol + rtol * np.abs(x)
        differs = ~(same | (np.isnan(x) & np.isnan(y)))
        if rtol or atol:
            differs &= ~(gap <= np.where(np.isfinite(bound), bound, 0.0))
    count = int(np.count_nonzero(differs))
    found: dict[str, object] = {"elements": a.size, "differing": count}
    if count:
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
        found.update(index=index, a=a[index].item(), b=b[index].item(), max_difference=float(gap[differs].max()))
    return found


def _hint(a: np.ndarray, b: np.ndarray) -> str:
    """Names a permutation, an order of rows, or a cut-off that would explain the difference; "" if none does."""
    if a.size == b.size and a.size > 1 and a.ndim <= MAX_HINT_DIMS:
        flat = b.ravel()
        for order in itertools.permutations(range(a.ndim)):
            moved = a.transpose(order)
            if _same(moved[:1].ravel()[:64], flat[: min(64, moved[:1].size)]) and _same(moved.ravel(), flat):
                if order == tuple(range(a.ndim)):
                    return "the same elements in the same order, under another shape"
                return f"B's elements are in the order of A.permute{order}: a wrong stride or layout"
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1]:
        rows = min(len(a), len(b))
        if len(a) != len(b) and _same(a[:rows], b[:rows]):
            longer, shorter = ("A", "B") if len(a) > len(b) else ("B", "A")
            return f"{longer} starts with all {rows} rows of {shorter}, and goes on: another threshold or limit"
        if len(a) == len(b) and _same(_sorted_rows(a), _sorted_rows(b)):
            return "the same rows in another order"
    return ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    floats = a.dtype.kind == "f" and b.dtype.kind == "f"
    return np.array_equal(a, b, equal_nan=floats)


def _sorted_rows(a: np.ndarray) -> np.ndarray:
    return a[np.lexsort(a.T[::-1])]


def _headline(comparison: Comparison) -> str:
    row, count = comparison.first_difference, len(comparison.rows)
    if row is None:
        return f"Equal: all {count} stages." if count > 1 else "Equal: the only stage."
    text = f"First difference: stage {row.number} of {count}, {row.stage}: {', '.join(row.differences)}"
    if row.index is not None:
        text += (
            f"; at {format_ints(row.index)} A is {row.a!r}, B is {row.b!r} ({row.differing} of {row.elements} elements "
            f"differ, by at most {row.max_difference:.6g})"
        )
    return text + (f"; {row.hint}" if row.hint else "") + "."


def _table(rows: list[Row]) -> Iterator[str]:
    titles = (
        "#",
        "stage",
        "result",
        "shape",
        "stride",
        "dtype",
        "differing",
        "max |A-B|",
        "first at",
        "A",
        "B",
        "hint",
    )
    lines = [titles]
    for row in sorted(rows, key=lambda row: row.equal):
        lines.append(
            (
                str(row.number),
                row.stage,
                ", ".join(row.differences) or "equal",
                _pair(*(None if shape is None else format_ints(shape) for shape in row.shapes)),
                _pair(*(None if stride is None else format_ints(stride) for stride in row.strides)),
                _pair(*row.dtypes),
                f"{row.differing}/{row.elements}",
                f"{row.max_difference:.6g}",
                "" if row.index is None else format_ints(row.index),
                _number(row.a),
                _number(row.b),
                row.hint,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _number(value: float | int | bool | None) -> str:
    return "" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _pair(a: str | None, b: str | None) -> str:
    return (a or "") if a == b else f"{a or 'none'} | {b or 'none'}"
