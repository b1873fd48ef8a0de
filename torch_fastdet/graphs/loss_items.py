"""Holds the items of a loss, which loops read after each iteration for their progress bar.

Reading a tensor waits for all that was launched on its stream. These items are read when they are known: the GPU still works on the
backward pass while the host goes on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_fastdet._torch.private import as_plain_tensors, tree_map, writes
from torch_fastdet.graphs import capture as _capture

# These methods read values on the host, view a part, and compute a running mean.
_READS = {"item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__format__"}
_VIEWS = {"unbind", "detach"}
_MEANS = {"mul", "add", "div"}
# These methods expose the memory, which may then be written unseen.
_HANDS_OUT = {"data_ptr", "untyped_storage", "__dlpack__"}
_GET_DATA = inspect.getattr_static(Tensor, "data").__get__


class LossItems(Tensor):
    """Hold loss items as a CUDA tensor. Reading it, or a mean of it, does not wait for work launched later on its stream.

    In all else it is a plain tensor: other functions give plain tensors, in order on the current stream, and so do copies and files.
    """

    _known: torch.cuda.Event
    _written: int | None  # how often, then
    _beside: bool

    # Libraries that read the type's name, as Weights & Biases does, find torch.Tensor.
    __class__ = property(lambda self: Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        name = getattr(func, "__name__", "")
        with as_plain_tensors():
            if name in _READS and not kwargs and (len(args) == 1 or name == "__format__"):
                return func(_on_host(args[0]), *args[1:])
            if name in _VIEWS or (name == "__getitem__" and type(args[1]) is int):
                items, *others = args
                known = _event(items), items._beside
                return tree_map(lambda view: _known_at(view, *known), func(_plain(items), *others, **kwargs or {}))
            if name in _MEANS and not kwargs:
                return _mean(func, args, tree_map(_plain, args))
            if name in _HANDS_OUT or func == _GET_DATA:
                args[0]._written = None
            if name == "__set__" or (name[-1:] == "_" and name[-2:] != "__"):  # in place
                return func(*args, **kwargs or {})
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.clone()


def read_early(items: Tensor, beside: bool) -> Tensor:
    """Return the items of one call of a loss, just computed on the current stream: reading them waits for nothing that is launched later.

    They are plain where they are not on a GPU, or are part of a graph. With ``beside``, means of them are computed on a
    stream of their own.
    """
    if not _can_be_early(items):
        return items
    return _known_at(items.detach(), torch.cuda.current_stream(items.device).record_event(), beside)


def copy_early(items: Tensor, known: torch.cuda.Event) -> Tensor:
    """Return a copy of a graph's items: reading it waits for ``known`` alone, which the replay just launched records behind the items."""
    if not _can_be_early(items):
        return items.clone()
    return _computed_beside(Tensor.clone, (items,), [known], torch.cuda.current_stream(items.device))


def _can_be_early(items: Tensor) -> bool:
    return (
        type(items) is Tensor
        and items.is_cuda
        and torch.is_grad_enabled()
        and not _capture.is_capturing()
        and not torch.compiler.is_compiling()
    )


def _plain(value: object) -> object:
    return value.as_subclass(Tensor) if type(value) is LossItems else value


def _known_at(items: Tensor, event: torch.cuda.Event, beside: bool) -> LossItems:
    made = items.as_subclass(LossItems)
    made._known, made._written, made._beside = event, writes(items), beside
    return made


def _event(items: LossItems) -> torch.cuda.Event:
    if writes(items) != items._written:  # it was written to since
        return torch.cuda.current_stream(items.device).record_event()
    return items._known


@functools.cache
def _stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Make a stream beside this one; threads with streams of their own do not wait for one another."""
    return torch.cuda.Stream(current.device, priority=-1)


def _on_host(items: LossItems) -> Tensor:
    event, stream = _event(items), _stream(torch.cuda.current_stream(items.device))
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        return items.as_subclass(Tensor).cpu()


def _mean(func: Callable[..., Tensor], args: tuple, plain: tuple) -> LossItems:
    """Return a sum, product or quotient. One of items and numbers alone is known when those items are."""
    items = [arg for arg in args if type(arg) is LossItems]
    current, beside = torch.cuda.current_stream(items[0].device), items[0]._beside
    if beside and sum(isinstance(arg, Tensor) for arg in args) == len(items):
        return _computed_beside(func, plain, [_event(item) for item in items], current)
    result = func(*plain)
    return _known_at(result, current.record_event(), beside)


def _computed_beside(
    func: Callable[..., Tensor], args: tuple, events: list[torch.cuda.Event], current: torch.cuda.Stream
) -> LossItems:
    """Return ``func(*args)`` behind these events, on another stream than the current one, which waits for it."""
    stream = _stream(current)
    with torch.cuda.stream(stream):
        for event in events:
            stream.wait_event(event)
        result = func(*args)
        known = stream.record_event()
    current.wait_event(known)  # whoever goes on with it there finds it
    result.record_stream(current)
    return _known_at(result, known, True)
