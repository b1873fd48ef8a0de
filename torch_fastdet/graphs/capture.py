"""Makes one capture: prepares what surrounds it, and holds the memory that it reads and writes.

The rest of the package reaches CUDA through the functions at the top and those of ``_torch/graph.py``, which tests replace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torch_fastdet._library import LIBRARY
from torch_fastdet._torch import private
from torch_fastdet._torch.captures import captures_here, one_capture
from torch_fastdet._torch.captures import no_capture as no_capture
from torch_fastdet._torch.modules import is_channels_last


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def is_capturing() -> bool:
    # Without a driver this query raises.
    return captures_here() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def new_pool() -> object:
    return torch.cuda.graph_pool_handle()


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of the autocast that is on now; None where none is."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def uncached_autocast(dtype: torch.dtype | None) -> torch.autocast:
    """Run autocast to ``dtype``, or none, without its cache: the next replay would miss a cast that another graph made."""
    return torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False)


# Holds the addresses of streams whose owners are gone.
_idle: defaultdict[torch.device, list[int]] = defaultdict(list)


def new_stream(device: torch.device, owner: object) -> torch.cuda.Stream:
    """Return a stream for captures, which serves the next owner when this one is gone.

    ``torch.cuda.Stream`` hands out the same 32 streams in turn: another thread's launches would become part of the graph.
    """
    try:
        address = _idle[device].pop()
    except IndexError:
        address = _make_stream(device)
    # A finalizer of the stream would never run, because torch's streams do not notify their weak references.
    weakref.finalize(owner, _idle[device].append, address).atexit = False
    return torch.cuda.ExternalStream(address, device)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.torch_fastdet_take_workspaces.restype = ctypes.c_void_p
    return library


def _make_stream(device: torch.device) -> int:
    made, non_blocking = ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        error = _library().cudaStreamCreateWithFlags(ctypes.byref(made), non_blocking)
    if made.value is None:
        raise RuntimeError(f"CUDA gave no stream to capture on {device}: cudaStreamCreateWithFlags returned {error}")
    return made.value


class _Workspaces:
    """Keep cuBLAS' workspaces of one stream out of torch's maps, where anybody may clear them, but while a capture uses them."""

    def __init__(self) -> None:
        self._library = _library()  # not looked up in __del__
        self._taken: int | None = None
        self._process = os.getpid()

    @contextlib.contextmanager
    def in_use(self, stream: torch.cuda.Stream) -> Iterator[None]:
        if self._taken is not None:
            self._library.torch_fastdet_give_workspaces_back(ctypes.c_void_p(self._taken))
            self._taken = None
        try:
            yield
        finally:
            self._taken = self._library.torch_fastdet_take_workspaces(ctypes.c_void_p(stream.cuda_stream))

    def __del__(self) -> None:
        # A forked process has no CUDA, and at the interpreter's exit the driver may be gone.
        if self._taken is not None and self._process == os.getpid() and not sys.is_finalizing():
            self._library.torch_fastdet_free_workspaces(ctypes.c_void_p(self._taken))


_workspaces: weakref.WeakValueDictionary[tuple[object, int], _Workspaces] = weakref.WeakValueDictionary()
_workspaces_of: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, _Workspaces] = weakref.WeakKeyDictionary()


def read_on(tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Tell the allocator that these tensors are read on ``stream``: whoever has them may drop them before that ends."""
    for tensor in tensors:
        if tensor.is_cuda and tensor.layout is torch.strided:  # constants may be on the CPU, or sparse
            tensor.record_stream(stream)


def make_backward_wait(device: torch.device) -> None:
    """Let the stream that called ``backward()`` wait for what runs on the current one, within that backward pass."""
    event = torch.cuda.current_stream(device).record_event()
    private.at_end_of_backward(lambda: torch.cuda.current_stream(device).wait_event(event))


def behind(last: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream:
    """Return the current stream, which waits for ``last`` if that is another one."""
    stream = torch.cuda.current_stream(device)
    if last is not None and last != stream:
        stream.wait_stream(last)
    return stream


@contextlib.contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    stream: torch.cuda.Stream,
    random_numbers: bool = True,
    collect: bool = True,
) -> Iterator[None]:
    """Capture what the block launches into ``graph``, with its memory from ``pool``.

    Only this thread's calls are restricted meanwhile: a loader's pin-memory thread makes CUDA calls at any time. Captures of other
    threads wait. A failed capture leaves the current stream and the allocator as they were.

    Args:
        graph: a new one.
        pool: of memory, from :func:`new_pool`.
        stream: to capture on.
        random_numbers: False leaves the device's generator to other threads, except in the moment in which the capture begins; what draws
            from it in the capture fails it.
        collect: first free what only cycles of references hold; it takes 0.3 s in a process with a framework's modules.
    """
    with one_capture():
        device = stream.device
        generator = torch.cuda.default_generators[device.index]
        state = generator.clone_state()
        deterministic: Any = torch.utils.deterministic
        collecting, filling = gc.isenabled(), deterministic.fill_uninitialized_memory
        try:
            if collect:
                gc.collect()
            gc.disable()  # freeing another graph's memory is not allowed during a capture
            # Under use_deterministic_algorithms, which train.py sets, new tensors are filled with NaN. No operator reads that, but each replay
            # would write it over all activations and over new input of the graph.
            deterministic.fill_uninitialized_memory = False
            torch.cuda.synchronize(device)  # before memory is unmapped, on which another stream may be working
            torch.cuda.empty_cache()  # what eager steps have cached cannot serve a graph's pool
            stream.wait_stream(torch.cuda.current_stream(device))
            workspaces = _workspaces.setdefault((pool, stream.cuda_stream), _Workspaces())
            with torch.cuda.stream(stream), private.growing_segments(device), workspaces.in_use(stream):
                try:
                    if random_numbers:
                        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    else:
                        _begin_without_generator(graph, pool, generator)
                    yield
                    graph.capture_end()
                    _workspaces_of[graph] = workspaces
                except BaseException:
                    _abandon(graph, pool, device)
                    if random_numbers:
                        generator.graphsafe_set_state(state)
                    raise
        finally:
            deterministic.fill_uninitialized_memory = filling
            if collecting:
                gc.enable()
        torch.cuda.current_stream(device).wait_stream(stream)


def _begin_without_generator(graph: torch.cuda.CUDAGraph, pool: Any, generator: torch.Generator) -> None:
    """Begin a capture with a copy of the generator's state: during a capture its state gives nobody else random numbers."""
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    finally:
        generator.graphsafe_set_state(state)


@contextlib.contextmanager
def running_in(pool: object, stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block as a capture would: on ``stream``, and with its memory from ``pool``."""
    device = stream.device
    with one_capture(), torch.cuda.stream(stream), private.growing_segments(device), _Workspaces().in_use(stream):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        private.enter_pool(device, pool)
        try:
            yield
        finally:
            private.leave_pool(device, pool)
            stream.synchronize()


# These are kept, because torch's pinned memory allocator asks them at each allocation whether they are capturing.
_abandoned: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, pool: object, device: torch.device) -> None:
    """End a capture that failed. capture_end() fails too, and skips what it does after that; no capture can have ``pool`` again."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            graph.pool()  # the capture itself had ended, so the graph gives its pool back
            return
        private.leave_pool(device, pool)
        _abandoned.append(graph)


class _Bytes:
    """Show device memory in the form that torch.as_tensor takes without a copy and without owning it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, unknown to the allocator: once ``tensor`` is gone, a later part of a graph may use it too."""
    memory = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the two tensors' storages have memory in common."""
    (a_start, a_size), (b_start, b_size) = (
        (storage.data_ptr(), storage.nbytes()) for storage in (a.untyped_storage(), b.untyped_storage())
    )
    return a_start < b_start + b_size and b_start < a_start + a_size


@contextlib.contextmanager
def aliased_parameters(module: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Give the module other parameters with the same memory while inside; yield parameter -> the one that replaces it.

    A parameter's node in autograd remembers the stream of its first use, for which a captured backward pass would wait.
    """
    named = [(child._parameters, name) for child in module.modules() for name in child._parameters]
    places = [(entries, name, parameter) for entries, name in named if (parameter := entries[name]) is not None]
    aliases = {p: nn.Parameter(p.detach(), p.requires_grad) for _, _, p in places}
    try:
        for entries, name, parameter in places:
            entries[name] = aliases[parameter]
        yield aliases
    finally:
        for entries, name, parameter in places:
            entries[name] = parameter


def attribute_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return tensors that only attributes of modules hold, such as what heads keep for the shape of their last input."""
    values = [value for child in module.modules() for value in vars(child).values()]
    inside = [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return [value for value in (*values, *inside) if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Put attributes of modules that are set inside back: what a capture makes lies in the pool, and has no values yet."""
    before = [(vars(child), dict(vars(child))) for child in module.modules()]
    lists = [(value, list(value)) for _, then in before for value in then.values() if type(value) is list]
    try:
        yield
    finally:
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
        for value, items in lists:
            value[:] = items


@contextlib.contextmanager
def attributes_copied(module: nn.Module) -> Iterator[None]:
    """Put copies in the place of tensors that are made inside, and that attributes of modules, or lists in them, hold."""
    held = (*attribute_tensors(module), *module.parameters(), *module.buffers())
    known = {tensor.data_ptr() for tensor in held if tensor.layout is torch.strided}

    def copied(value: object) -> object:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.data_ptr() not in known:
            return value.clone()
        return value

    try:
        yield
    finally:
        for attributes in map(vars, module.modules()):
            for name, value in attributes.items():
                if type(value) is list:
                    value[:] = map(copied, value)
                else:
                    attributes[name] = copied(value)


def input_format(module: nn.Module, x: torch.Tensor) -> torch.memory_format:
    """Return NHWC for a model on NHWC weights: the copy into the graph's input then changes the layout as well."""
    first = next((p for p in module.parameters() if p.dim() == 4), None)
    if x.dim() == 4 and first is not None and is_channels_last(first):
        return torch.channels_last
    return torch.preserve_format


def as_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the parameter's layout, as autograd gives it to ``p.grad`` and a fused optimizer expects it."""
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
