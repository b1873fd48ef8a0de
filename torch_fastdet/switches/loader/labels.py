"""Scans a data set's images and labels if the label cache is missing or old: threads of ``_C`` read the files.

C++ (``csrc/core/labels``) proves files plain: a whole JPEG that is not turned, and labels in range, all boxes or all polygons, no box twice.
All others are left to the framework's own function, with its repairs, warnings and errors, in its order.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np

from torch_fastdet.images.ahead import in_order
from torch_fastdet.images.recorder import recording_module
from torch_fastdet.patching.evidence import fingerprint
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import around, defined_in, in_place_of, with_names
from torch_fastdet.patching.switch import Active

#: So many files are read by one call.
CHUNK = 4096
#: So many chunks are read at once, while the framework takes the results of an earlier one.
AHEAD = 2
#: Threads that read file sizes. On network disks they mostly wait.
HASH_THREADS = 8
#: So many collections of the middle generation are never reached.
NEVER = 1 << 30
MISSING, NOT_PLAIN = -1, -2
#: Float32 holds every integer up to this one.
MOST_CLASSES = 1 << 24
#: The arguments of ``verify_image_label``.
Arguments = tuple[Any, ...]
#: Returns what ``verify_image_label`` would, from its arguments, rows, polygons, (height, width), and True if there is a label file.
Result = Callable[[Arguments, np.ndarray, list[np.ndarray], tuple[int, int], bool], tuple[object, ...]]


def scan_by_threads(
    active: Active, module: Stock, name: str, dataset: Stock, result: Result, known: Mapping[str, Collection[str]]
) -> None:
    """Replace the pool, of this name, by which ``cache_labels`` of a framework's data set calls its module's ``verify_image_label``.

    ``known`` are fingerprints of the functions that say which files are plain.
    """
    verify = module.verify_image_label
    for function, fingerprints in known.items():
        if fingerprint(verify.__globals__[function]) not in fingerprints:
            return active.tell(f"{active.name}: the original code scans labels, because {function} is not known")
    try:
        from torch_fastdet._C import read_labels
    except ImportError:
        return active.tell(f"{active.name}: the original code scans labels, because torch_fastdet._C is not built")
    active.replace(module, name, _pool_class(getattr(module, name), verify, result, read_labels), quietly=True)
    active.replace(dataset, "cache_labels", cache_labels(active, dataset.cache_labels), quietly=True)


@around
def cache_labels(_: object, stock: Function, *args: object, **kwargs: object) -> object:
    """Run the original method without full garbage collections: each walks all labels so far and frees none."""
    thresholds = gc.get_threshold()
    if thresholds[2] == NEVER:  # another thread scans, and puts back what it found
        return stock(*args, **kwargs)
    try:
        gc.set_threshold(*thresholds[:2], NEVER)
        return stock(*args, **kwargs)
    finally:
        gc.set_threshold(*thresholds)


def hash_by_threads(active: Active, module: Stock) -> None:
    """Replace YOLOv5's ``get_hash`` of files' sizes and paths, which each start of a training calls."""
    try:
        from torch_fastdet._C import file_sizes
    except ImportError:
        return
    stock = defined_in(module.__name__, "get_hash")
    if type(stock) is not FunctionType:
        return

    @in_place_of(stock)
    def get_hash(paths: list[str]) -> object:
        """Run the original function on sizes that threads have read."""
        sizes = zip(paths, file_sizes([os.fsencode(path) for path in paths], HASH_THREADS).tolist())
        known = {path: size for path, size in sizes if size >= 0}
        changed = {
            "exists": lambda path: path in known or os.path.exists(path),
            "getsize": lambda path: known[path] if path in known else os.path.getsize(path),
        }
        return with_names(stock, os=recording_module(os, {"path": recording_module(os.path, changed)}))(paths)

    active.replace(module, "get_hash", get_hash, quietly=True)


def _pool_class(stock: Stock, verify: Function, result: Result, read_labels: Function) -> type:
    """Return a pool whose ``imap`` of ``verify``, the framework's function, asks that one for files alone that are not plain."""

    class Pool(stock):
        def imap(self, func: object, iterable: Iterable[Arguments], chunksize: int = 1) -> Iterator[object]:
            if func is not verify:
                return super().imap(func, iterable, chunksize)
            arguments = iter(iterable)
            first = list(itertools.islice(arguments, 1))
            arguments = itertools.chain(first, arguments)
            classes = _classes(first[0]) if first else None
            return super().imap(verify, arguments) if classes is None else self._scan(arguments, classes)

        def _scan(self, arguments: Iterator[Arguments], classes: float) -> Iterator[object]:
            def read(chunk: list[Arguments]) -> tuple[Any, ...]:
                images, labels = ([os.fsencode(each[column]) for each in chunk] for column in (0, 1))
                return chunk, *read_labels(images, labels, classes, len(self._pool))

            chunks = iter(lambda: list(itertools.islice(arguments, CHUNK)), [])
            for chunk, table, rows, lengths, points in in_order(read, chunks, AHEAD, AHEAD):
                found, ends = table.tolist(), np.cumsum(lengths).tolist()
                polygons = [points[end - length : end] for length, end in zip(lengths.tolist(), ends) if length]
                rest = super().imap(verify, [each for each, row in zip(chunk, found) if row[2] == NOT_PLAIN])
                begin = first = 0
                for each, (height, width, count) in zip(chunk, found):
                    if count == NOT_PLAIN:
                        yield next(rest)
                        continue
                    end = begin + max(count, 0)
                    last = first + (end - begin if begin < end and lengths[begin] else 0)
                    yield result(each, rows[begin:end], polygons[first:last], (height, width), count != MISSING)
                    begin, first = end, last

    return Pool


def _classes(arguments: Arguments) -> float | None:
    """Return how many classes a plain label file may have; None where rows may have keypoints."""
    if len(arguments) == 3:  # YOLOv5 checks them later
        return MOST_CLASSES
    *_, classes, keypoints, _, single = arguments
    return None if keypoints or classes < 1 else MOST_CLASSES if single else min(classes, MOST_CLASSES)


def yolov5_result(
    arguments: Arguments, rows: np.ndarray, polygons: list[np.ndarray], shape: tuple[int, int], found: bool
) -> tuple[object, ...]:
    return arguments[0], rows, shape[::-1], polygons, int(not found), int(found), int(found and not len(rows)), 0, ""


def ultralytics_result(
    arguments: Arguments, rows: np.ndarray, polygons: list[np.ndarray], shape: tuple[int, int], found: bool
) -> tuple[object, ...]:
    return arguments[0], rows, shape, polygons, None, int(not found), int(found), int(found and not len(rows)), 0, ""


#: Fingerprints of YOLOv5 7.0 and GitHub's head, and of Ultralytics 8.4.184 to 8.4.190.
YOLOV5 = {
    "verify_image_label": ("9953d107", "bb5db9ee"),
    "exif_size": ("d33d2f69",),
    "segments2boxes": ("585235b8", "9b31582b"),  # the head has Ultralytics'
}
ULTRALYTICS = {
    "verify_image_label": ("f38a2497",),
    "check_image": ("241deb30",),
    "exif_size": ("3cccd665",),
    "segments2boxes": ("9b31582b",),
}
