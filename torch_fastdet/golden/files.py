"""The folder of stage tensors: .npy files and stages.tsv. csrc/include/torch_fastdet/golden.h writes the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

MANIFEST = "stages.tsv"
COLUMNS = ("stage", "dtype", "shape", "stride", "file")
# What .npy cannot name: bfloat16 is widened to float32, which loses nothing.
DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<f4"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int8": np.dtype("|i1"),
    "uint8": np.dtype("|u1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "bool": np.dtype("|b1"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Tensors = torch.Tensor | np.ndarray | Sequence[torch.Tensor | np.ndarray]


@dataclass(frozen=True, eq=False)
class Stage:
    """One saved tensor. ``values`` has its shape and dtype (float32 for bfloat16) and is contiguous; ``stride`` counts
    elements and is that of the tensor that was saved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    values: np.ndarray

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved: dtype and stride too, except strides that overlap or leave gaps."""
        tensor = torch.from_numpy(np.array(self.values)).to(getattr(torch, self.dtype))
        order = sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], -self.shape[dim], dim))
        dense = torch.empty([self.shape[dim] for dim in order], dtype=tensor.dtype)
        return dense.permute([order.index(dim) for dim in range(len(order))]).copy_(tensor)


class Writer:
    """Saves stages one by one; the folder is complete after each, so a program that dies leaves what it had.

    ``Writer(folder)`` makes the folder, or empties it of the stages that an earlier writer left there.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"folder must be a folder for stage tensors, but {self.folder} is a file")
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / MANIFEST
        if manifest.exists():
            for *_, file in read_manifest(self.folder):
                (self.folder / file).unlink(missing_ok=True)
        manifest.write_text("\t".join(COLUMNS) + "\n")
        self._names: set[str] = set()

    def save(self, name: str, tensors: Tensors) -> None:
        """Appends stage ``name``. A list or tuple of tensors becomes the stages ``name.0``, ``name.1``, ..."""
        if isinstance(tensors, (list, tuple)):
            for index, tensor in enumerate(tensors):
                self.save(f"{name}.{index}", tensor)
            return
        if not NAME.fullmatch(name):
            raise ValueError(f"a stage's name must be letters, digits, '_', '-' and '.', not {name!r}")
        if name in self._names:
            raise ValueError(f"stage {name!r} is already saved in {self.folder}: each stage is saved once")
        dtype, stride, values = _values(name, tensors)
        file = f"{len(self._names):02d}_{name}.npy"
        np.save(self.folder / file, values)
        self._names.add(name)
        with open(self.folder / MANIFEST, "a") as manifest:
            manifest.write("\t".join((name, dtype, format_ints(values.shape), format_ints(stride), file)) + "\n")


def save(folder: str | os.PathLike, stages: Mapping[str, Tensors]) -> Path:
    """Saves ``stages`` (name to tensor, or to a list of tensors) in their order, in place of what ``folder`` held.

    Tensors may be on any device, have any stride, and be float16, bfloat16, float32, float64, int8, uint8, int16,
    int32, int64 or bool. Returns the folder. Raises ValueError or TypeError with one line for a name or dtype that
    cannot be saved.
    """
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages must map names to tensors, such as {{'decoded': tensor}}, not {type(stages).__name__}")
    writer = Writer(folder)
    for name, tensors in stages.items():
        writer.save(name, tensors)
    return writer.folder


def load(folder: str | os.PathLike) -> dict[str, Stage]:
    """The stages of a folder by name, in the order they were saved."""
    stages = {}
    for name, dtype, shape, stride, file in read_manifest(Path(folder)):
        path = Path(folder) / file
        if not path.exists():
            raise FileNotFoundError(f"{Path(folder) / MANIFEST} lists stage {name!r}, but {path} is missing")
        try:
            values = np.array(np.load(path), order="C", copy=None)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{path} is not an .npy file that can be read: {error}") from None
        if values.shape != shape or DTYPES.get(dtype) != values.dtype:
            raise ValueError(
                f"{path} holds {values.dtype} {values.shape}, but {MANIFEST} says {dtype} {shape} for stage {name!r}"
            )
        stages[name] = Stage(name, dtype, shape, stride, values)
    return stages


def read_manifest(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...], str]]:
    """Yields name, dtype, shape, stride and file of each stage."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: it is not a folder of stage tensors")
    header, *lines = manifest.read_text().splitlines() or [""]
    if tuple(header.split("\t")) != COLUMNS:
        raise ValueError(f"{manifest} must start with the columns {', '.join(COLUMNS)}, but starts with {header!r}")
    for number, line in enumerate(lines, 2):
        fields = line.split("\t")
        if len(fields) != len(COLUMNS) or Path(fields[4]).name != fields[4]:
            raise ValueError(f"{manifest} line {number} must have {len(COLUMNS)} columns, but is {line!r}")
        yield fields[0], fields[1], parse_ints(fields[2]), parse_ints(fields[3]), fields[4]


def format_ints(values: Sequence[int]) -> str:
    return "(" + ",".join(str(value) for value in values) + ")"


def parse_ints(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.strip("()").split(",") if value)


def _values(name: str, tensor: object) -> tuple[str, tuple[int, ...], np.ndarray]:
    """dtype, stride in elements, and the elements in row-major order."""
    values: Any
    if isinstance(tensor, np.ndarray):
        dtype, values = str(tensor.dtype), tensor
        stride = tuple(step // tensor.itemsize for step in tensor.strides)
    elif isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
        dtype, stride = str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride())
        values = tensor.detach().resolve_neg().cpu()
        values = (values.float() if dtype == "bfloat16" else values).numpy() if dtype in DTYPES else None
    else:
        raise TypeError(f"stage {name!r} must be a dense tensor or an array, not {_describe(tensor)}")
    if dtype not in DTYPES:
        raise TypeError(f"stage {name!r} has dtype {dtype}, but a stage must be one of {', '.join(DTYPES)}")
    # Not ascontiguousarray, which makes a scalar one-dimensional.
    return dtype, stride, np.array(values, dtype=DTYPES[dtype], order="C", copy=None)


def _describe(value: object) -> str:
    return f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
