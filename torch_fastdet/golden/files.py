"""The folder of stage tensors: .npy files and stages.tsv. csrc/include/torch_fastdet/golden.h writes the same."""

from __future__ import annotations

import math
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
DIMS = r"(\((?:-?\d{1,19}(?:,-?\d{1,19})*)?\))"
LINE = re.compile(rf"({NAME.pattern})\t([a-z]+\d*)\t{DIMS}\t{DIMS}\t(\d{{2,}}_\1\.npy)", re.ASCII)

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
        line = "\t".join((name, dtype, format_ints(values.shape), format_ints(stride), file)) + "\n"
        manifest = self.folder / MANIFEST
        length = manifest.stat().st_size
        try:
            np.save(self.folder / file, values)
            with open(manifest, "a") as lines:
                lines.write(line)
        except OSError:  # the disk is full
            (self.folder / file).unlink(missing_ok=True)
            os.truncate(manifest, length)
            raise
        self._names.add(name)


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
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError(f"{Path(folder) / MANIFEST} lists stage {name!r}, but {path} is missing")
        try:
            found = _header(path)
        # numpy reads the header as Python's text, and a bad one can make that raise anything.
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{path} is not an .npy file that can be read: {why}") from None
        if found != (shape, DTYPES.get(dtype)):
            raise ValueError(
                f"{path} holds {found[1]} {found[0]}, but {MANIFEST} says {dtype} {shape} for stage {name!r}"
            )
        stages[name] = Stage(name, dtype, shape, stride, np.array(np.load(path), order="C", copy=None))
    return stages


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an .npy file, which has as many bytes as they say: nothing else is read, and no memory taken."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        expected, left = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if min(shape, default=0) < 0 or left != expected:
        raise ValueError(f"it has {left} bytes of elements, but {dtype} {shape} has {expected}")
    return shape, dtype


def read_manifest(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...], tuple[int, ...], str]]:
    """Yields name, dtype, shape, stride and file of each stage. The file is one that a writer gives this name."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: it is not a folder of stage tensors")
    header, *lines = manifest.read_text(errors="replace").splitlines() or [""]
    if tuple(header.split("\t")) != COLUMNS:
        raise ValueError(f"{manifest} must start with the columns {', '.join(COLUMNS)}, but starts with {header!r}")
    names = set()
    for number, line in enumerate(lines, 2):
        fields = LINE.fullmatch(line)
        shape, stride = (parse_ints(fields[dims]) for dims in (3, 4)) if fields else ((), ())
        if fields is None or len(shape) != len(stride):
            raise ValueError(
                f"{manifest} line {number} must have the {len(COLUMNS)} columns of a saved stage, but is {line!r}"
            )
        if fields[1] in names:
            raise ValueError(f"{manifest} line {number} has stage {fields[1]!r} again: each stage is saved once")
        names.add(fields[1])
        yield fields[1], fields[2], shape, stride, fields[5]


def format_ints(values: Sequence[int]) -> str:
    return "(" + ",".join(str(value) for value in values) + ")"


def parse_ints(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.strip("()").split(",") if value)


def _values(name: str, tensor: object) -> tuple[str, tuple[int, ...], np.ndarray]:
    """dtype, stride in elements, and the elements in row-major order."""
    values: object
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
