"""Training as CUDA graphs: the host launches one graph where it launched thousands of kernels.

:class:`GraphedModule` replays a module's forward and backward pass and leaves the loop around it as it is;
:class:`TrainStep` replays a whole step, for people who own their loop. docs/graphs.md tells how they work.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import logging
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sized
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torch_fastdet._multi_tensor import Walk
from torch_fastdet._say import say as print_line
from torch_fastdet.optim import FusedStep

__all__ = ["CaptureError", "GraphedModule", "ModuleGraphs", "TrainStep"]

logger = logging.getLogger("torch_fastdet")
T = TypeVar("T")


class CaptureError(RuntimeError):
    """Something cannot be captured in a CUDA graph; the text says what and why."""


# Capture -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capture_into(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what the block launches into ``graph``, with its memory from ``pool``.

    Only this thread's calls are restricted meanwhile: a loader's pin-memory thread makes CUDA calls at any time. A failed
    capture leaves the current stream and the allocator as they were.
    """
    device = stream.device
    generator = torch.cuda.default_generators[device.index]
    state = generator.clone_state()
    deterministic: Any = torch.utils.deterministic
    collecting, filling = gc.isenabled(), deterministic.fill_uninitialized_memory
    try:
        gc.collect()
        gc.disable()  # freeing another graph's memory is not allowed during a capture
        # Under use_deterministic_algorithms, which train.py sets, new tensors are filled with NaN. No operator reads that, but
        # each replay would write it: over all activations, and over what came into the graph's input.
        deterministic.fill_uninitialized_memory = False
        torch.cuda.empty_cache()  # what eager steps have cached cannot serve a graph's pool
        torch.cuda.synchronize(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), _growing_segments(device):
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                yield
                graph.capture_end()
            except BaseException:
                _abandon(graph, pool, device)
                generator.graphsafe_set_state(state)
                raise
    finally:
        deterministic.fill_uninitialized_memory = filling
        if collecting:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)


_OFF = " expandable_segments:False"  # the blank, which PyTorch skips, tells it from what a user has set


@functools.cache
def _has_virtual_memory(device: int) -> bool:
    """Whether the driver maps memory piece by piece, which some virtual GPUs do not."""
    value, virtual_memory_management = ctypes.c_int(), 102  # of CUdevice_attribute
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuDeviceGetAttribute(ctypes.byref(value), virtual_memory_management, device) == 0 and value.value == 1


@contextlib.contextmanager
def _growing_segments(device: torch.device) -> Iterator[None]:
    """While inside, the allocator's segments grow in place: of a pool in many separate ones, a tenth would be gaps.

    These are PyTorch's expandable segments, for a capture alone. Who has set ``expandable_segments``, either way, keeps that.
    """
    if torch.cuda.get_allocator_backend() != "native" or not _has_virtual_memory(device.index):
        yield
        return
    found = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    before = found.removesuffix(_OFF).removesuffix(",")
    if "expandable_segments" in before:
        yield
        return
    others = f"{before}," if before else ""  # which would go back to their defaults if they were not named
    torch._C._accelerator_setAllocatorSettings(others + "expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(others + _OFF)


class _Bytes:
    """Device memory in the form that torch.as_tensor takes without a copy and without owning it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of which the allocator does not know: once ``tensor`` is gone, a later part of a graph may use it too."""
    memory = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the two tensors' storages have memory in common."""
    (a_start, a_size), (b_start, b_size) = (
        (storage.data_ptr(), storage.nbytes()) for storage in (a.untyped_storage(), b.untyped_storage())
    )
    return a_start < b_start + b_size and b_start < a_start + a_size


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """End a capture that failed. Ending it fails too, and then leaves to us what it would have done after that."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            graph.pool()  # where the capture itself had ended, and making the graph of it failed, the graph lets go of its pool
            return
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_releasePool(device.index, pool)


@contextlib.contextmanager
def aliased_parameters(module: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """While inside, the module has other parameters with the same memory; yields parameter -> the one in its place.

    A parameter's node in autograd remembers the stream of its first use, and lives as long as any graph that has it: a loss
    of the last step, say. A backward pass that is captured must not meet it, or it waits for a stream outside the capture.
    """
    aliases: dict[nn.Parameter, nn.Parameter] = {}
    places = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if parameter not in aliases:
                    aliases[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                places.append((child._parameters, name, parameter))
    try:
        for entries, name, parameter in places:
            entries[name] = aliases[parameter]
        yield aliases
    finally:
        for entries, name, parameter in places:
            entries[name] = parameter


class _Location:
    """The module whose forward runs, so that a failed capture can name it."""

    def __init__(self, module: nn.Module) -> None:
        self._stack: list[str] = []
        self._handles = []
        for name, child in module.named_modules():
            label = f"{name or 'the model'} ({type(child).__name__})"
            self._handles.append(child.register_forward_pre_hook(lambda *_, label=label: self._stack.append(label)))
            self._handles.append(child.register_forward_hook(lambda *_: self._leave()))

    def _leave(self) -> None:
        self._stack.pop()

    def __str__(self) -> str:
        return self._stack[-1] if self._stack else "the model"

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def why_not(module: nn.Module) -> str | None:
    """Why ``module`` cannot be captured, as far as looking at it tells; None if nothing speaks against it."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{type(module).__name__} is not supported yet; capture the module inside on one GPU"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        return (
            f"{torch.distributed.get_world_size()} processes train it, and a replay would not exchange their gradients"
        )
    for name, child in module.named_modules():
        label = f"{name or 'the model'} ({type(child).__name__})"
        if isinstance(child, nn.SyncBatchNorm):
            return f"{label} exchanges statistics with other processes"
        if isinstance(child, nn.RNNBase):
            return f"{label} keeps its weights in a list of its own"
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return f"{label} has hooks, which a replay would not call"
    for name, parameter in module.named_parameters():
        if not parameter.is_cuda:
            return f"parameter {name} is on {parameter.device}, not on a GPU"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"parameter {name} has hooks, which a replay would not call"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """By the allocator, or by CUDA, which makes a graph executable in memory of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def with_room(run: Callable[[], T], graphs: Sized, drop: Callable[[], None]) -> T:
    """Run eagerly; where that is out of memory beside graphs, drop them and run again.

    Eager activations beside those of the graphs' pool are the most memory that is ever wanted.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        if not graphs:
            raise
    drop()  # not in the except block: its traceback holds the activations
    return run()


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# A module's forward and backward -------------------------------------------------------------------------------------


class _Captured:
    """One input shape's graphs, and the static tensors that they read and write.

    The input and the outputs' gradients are places in the pool that are written before a replay and that the graph uses
    for something else after their last use.
    """

    def __init__(self) -> None:
        self.forward_graph = torch.cuda.CUDAGraph()
        self.backward_graph = torch.cuda.CUDAGraph()
        self.input: torch.Tensor
        self.outputs: list[torch.Tensor]
        self.structure: pytree.TreeSpec
        self.output_gradients: list[torch.Tensor | None]
        self.gradients: list[tuple[nn.Parameter, torch.Tensor]]

    def replay_backward(
        self, gradients: tuple[torch.Tensor | None, ...], saved: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        """Run the backward graph and add its result to the parameters' gradients, as autograd does."""
        for static, gradient in zip(self.output_gradients, gradients):
            if static is None:
                continue
            if gradient is None:
                static.zero_()
            elif gradient.data_ptr() != static.data_ptr():
                static.copy_(gradient)
        # A first micro-batch leaves the graphs' own tensors in p.grad. Before the replay of a later one overwrites them,
        # what has been accumulated there is put aside.
        later = [(p.grad, mine) for p, mine in self.gradients if p.grad is not None]
        overwritten = [mine for grad, mine in later if grad.data_ptr() == mine.data_ptr()]
        aside = []
        if overwritten:
            for mine in overwritten:
                if mine not in saved:
                    saved[mine] = torch.empty_like(mine)
                aside.append(saved[mine])
            torch._foreach_copy_(aside, overwritten)
        self.backward_graph.replay()
        if overwritten:
            torch._foreach_add_(overwritten, aside)
        others = [(grad, mine) for grad, mine in later if grad.data_ptr() != mine.data_ptr()]
        if others:
            torch._foreach_add_([grad for grad, _ in others], [mine for _, mine in others])
        if len(later) < len(self.gradients):
            for parameter, mine in self.gradients:
                if parameter.grad is None:
                    parameter.grad = mine


class _Replay(torch.autograd.Function):
    """The graphs as one node of autograd: its backward pass leaves the parameters' gradients in ``p.grad``."""

    @staticmethod
    def forward(
        ctx: Any, graphs: ModuleGraphs, captured: _Captured, x: torch.Tensor, leaf: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        captured.input.copy_(x.clone() if overlap(x, captured.input) else x)  # x may be an output of before
        captured.forward_graph.replay()
        graphs.generation += 1
        ctx.graphs, ctx.captured, ctx.generation = graphs, captured, graphs.generation
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in captured.outputs)
        without = [o for o, g in zip(outputs, captured.output_gradients) if g is None]
        ctx.mark_non_differentiable(*without)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        if ctx.generation != ctx.graphs.generation:
            raise RuntimeError(
                "GraphedModule: the module ran again before this backward pass (or this one ran already), so its activations "
                "are gone; call backward() once after each forward pass, or use the module without graphs"
            )
        ctx.graphs.generation += 1
        ctx.captured.replay_backward(gradients, ctx.graphs.saved)
        # This runs on the forward pass's stream. Autograd makes the stream of backward() wait for the gradients that it
        # brings to p.grad itself; for those that the replay wrote there, it is done here.
        device = ctx.captured.input.device
        done = torch.cuda.current_stream(device).record_event()
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: torch.cuda.current_stream(device).wait_event(done)
        )
        return None, None, None, None


class ModuleGraphs:
    """CUDA graphs of one module's training passes, by input shape; :class:`GraphedModule` without the module around it.

    A shape's first ``warmup`` calls run eagerly, as they would without graphs, which is all the warm-up there is: nothing
    runs that the caller did not ask for, so batch norm's running statistics are those of eager training. The next call
    captures. All graphs share one memory pool; at most ``max_graphs`` are kept, the least recently used goes first.

    Args:
        module: what to run.
        forward: how to run it, ``forward(x)``; default ``module.forward``.
        capturing: a context to be in while forward is captured.
        required: raise :class:`CaptureError` where the module cannot be captured, instead of running it eagerly (with a
            warning in the log).
        say: takes one line for each capture; by default they are printed.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[torch.Tensor], Any] | None = None,
        *,
        max_graphs: int = 48,
        warmup: int = 1,
        required: bool = False,
        capturing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        say: Callable[[str], None] = print_line,
    ) -> None:
        if max_graphs < 1 or warmup < 1:
            raise ValueError(
                f"GraphedModule: max_graphs is {max_graphs} and warmup {warmup}, but 1 or more is wanted of both"
            )
        self._module = weakref.ref(module)
        self._forward = forward
        self.max_graphs, self.warmup, self.required = max_graphs, warmup, required
        self.capturing, self.say = capturing, say
        self.reason: str | None = None
        self.generation = 0
        self._told: set[str] = set()
        self.reset()

    def forward(self, x: torch.Tensor) -> Any:
        return self.module.forward(x) if self._forward is None else self._forward(x)

    @property
    def module(self) -> nn.Module:
        """The module, which is not kept alive from here."""
        module = self._module()
        if module is None:
            raise ReferenceError("ModuleGraphs: the module is gone")
        return module

    def reset(self) -> None:
        """Forget all graphs; the next calls capture anew."""
        self._graphs: OrderedDict[tuple, _Captured] = OrderedDict()
        self._calls: dict[tuple, int] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._leaf: torch.Tensor | None = None
        self._walk: Walk | None = None
        self._storage: tuple = ()
        # Gradients of all graphs, outside their pool: there the next forward pass would write over them.
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.saved: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Input shapes that are captured, the most recently used last."""
        return [key[0] for key in self._graphs]

    def memory(self) -> int:
        """Bytes of device memory that the graphs hold: their pool, and the parameters' gradients beside it."""
        tensors = [*self._gradients.values(), *self.saved.values()]
        return pool_bytes(self._pool) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __call__(self, x: torch.Tensor) -> Any:
        module = self.module
        if not (module.training and torch.is_grad_enabled()):
            return self.forward(x)
        if self.reason is not None:
            if self.required:
                self._refuse(self.reason)
            return self.forward(x)
        if not isinstance(x, torch.Tensor):
            self._stay_eager(f"its input is a {type(x).__name__}, not a tensor")
            return self.forward(x)
        if not x.is_cuda:
            self._stay_eager(why_not(module) or f"its input is on {x.device}, not on a GPU")
            return self.forward(x)
        if x.requires_grad:
            self._stay_eager("its input requires a gradient, which a replay does not give")
            return self.forward(x)
        if torch.cuda.is_current_stream_capturing():
            return self.forward(x)
        # What the graphs have baked in: addresses, and what decides the kernels.
        walk = Walk.renewed(self._walk, module)
        storage = tuple([t.data_ptr() for t in walk.tensors])
        # The objects too: gradients go to the parameters of the capture.
        if walk is not self._walk or storage != self._storage:
            self.reset()
            self._walk, self._storage = walk, storage
        autocast = (torch.get_autocast_dtype("cuda"),) if torch.is_autocast_enabled("cuda") else ()
        key = (
            tuple(x.shape),
            x.dtype,
            x.stride(),
            autocast,
            tuple([p.requires_grad for p in walk.parameters]),
            tuple([m.training for m in walk.submodules]),
        )
        captured = self._graphs.get(key)
        if captured is None:
            calls = self._calls.get(key, 0)
            if calls < self.warmup:
                result = with_room(lambda: self.forward(x), self._graphs, self._make_room)
                self._calls[key] = calls + 1  # one that failed was none
                return result
            captured = self._capture(x)
            if captured is None:
                return self.forward(x)
            while len(self._graphs) >= self.max_graphs:
                self._graphs.popitem(last=False)
            self._graphs[key] = captured
        else:
            self._graphs.move_to_end(key)
        outputs = _Replay.apply(self, captured, x, self._leaf)
        return pytree.tree_unflatten(list(outputs), captured.structure)

    def _make_room(self) -> None:
        self.say(f"out of memory beside {len(self._graphs)} captured shapes, which are dropped; capturing again")
        walk, storage = self._walk, self._storage
        self.reset()
        self._walk, self._storage = walk, storage  # nothing moved: the call that made the room counts
        torch.cuda.empty_cache()

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """For good: no more graphs."""
        self.reset()
        self.reason = reason
        self._refuse(reason, cause)

    def _stay_eager(self, reason: str) -> None:
        """For this input: said once, and not for good, for the next may be another."""
        if self.required or reason not in self._told:
            self._told.add(reason)
            self._refuse(reason)

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        line = f"{type(self.module).__name__} cannot be captured in a CUDA graph: {reason}"
        if self.required:
            raise CaptureError(line) from cause
        logger.warning("torch_fastdet: %s; it runs eagerly", line)

    def _capture(self, x: torch.Tensor) -> _Captured | None:
        reason = why_not(self.module)
        if reason is not None:
            self._give_up(reason)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
            self._leaf = torch.zeros((), device=x.device, requires_grad=True)
        if not self._graphs:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        location = _Location(self.module)
        try:
            return self._captured(x, self._stream)
        except Exception as error:
            if not (is_out_of_memory(error) and self._graphs):
                self._give_up(f"{location} failed during the capture, {first_line(error)}", error)
                return None
        finally:
            location.remove()
        self._make_room()
        return None

    def _captured(self, x: torch.Tensor, stream: torch.cuda.Stream) -> _Captured:
        captured = _Captured()
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # A cached cast would be made by the first graph and be missing in the next replay.
        autocast = torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False)
        with (
            aliased_parameters(self.module) as aliases,
            capture_into(captured.forward_graph, self._pool, stream),
            autocast,
            self.capturing(),
        ):
            static = torch.empty_like(x, memory_format=input_format(self.module, x))
            result = self.forward(static)
        captured.input = unowned(static)
        del static
        outputs, captured.structure = pytree.tree_flatten(result)
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"its output holds a {type(output).__name__}, which a replay would not renew")
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter not in self._gradients:
                self._gradients[parameter] = torch.empty_like(parameter, requires_grad=False)
        with capture_into(captured.backward_graph, self._pool, stream):
            incoming = [torch.empty_like(o) if o.requires_grad else None for o in outputs]
            gradients = torch.autograd.grad(
                [o for o in outputs if o.requires_grad],
                [aliases[p] for p in parameters],
                [g for g in incoming if g is not None],
                allow_unused=True,
            )
            used = [(p, g) for p, g in zip(parameters, gradients) if g is not None]
            captured.gradients = [(p, self._gradients[p]) for p, _ in used]
            torch._foreach_copy_([mine for _, mine in captured.gradients], [g for _, g in used])
        captured.output_gradients = [None if g is None else unowned(g) for g in incoming]
        captured.outputs = [output.detach() for output in outputs]
        shape = tuple(x.shape)
        self.say(
            f"captured forward and backward of {type(self.module).__name__} for input {shape}; "
            f"{len(self._graphs) + 1} shapes hold {self.memory() / 2**20:.0f} MiB"
        )
        return captured


def input_format(module: nn.Module, x: torch.Tensor) -> torch.memory_format:
    """NHWC for a model on NHWC weights: the copy into the graph's input then changes the layout as well."""
    first = next((p for p in module.parameters() if p.dim() == 4), None)
    if x.dim() == 4 and first is not None and not first.is_contiguous():
        return torch.channels_last
    return torch.preserve_format


def as_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's layout, which autograd gives ``p.grad`` too and a fused optimizer counts on."""
    if gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def pool_bytes(pool: Any) -> int:
    """Device memory that the caching allocator holds for a graph pool."""
    if pool is None:
        return 0
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == tuple(pool)
    )


class GraphedModule(nn.Module):
    """A module whose forward and backward pass in training are replayed as CUDA graphs.

    ::

        model = GraphedModule(model)
        with torch.autocast("cuda"):
            loss = compute_loss(model(images), targets)
        scaler.scale(loss).backward()          # gradients in p.grad, added up over several backward passes

    Each input shape is captured at its second call (:class:`ModuleGraphs`). Calls in eval mode, under no_grad or with further
    arguments go to the module itself; so do inputs that no graph takes (on the CPU, a list), which ``required`` makes an error.
    Everything else is the module's: ``state_dict``, parameters, attributes. A copy and a pickle of it *are* the plain module, so
    that EMA models and checkpoints are what they were without graphs.

    Outputs and gradients live in the graphs' memory: the next forward pass overwrites the outputs, the next backward pass
    after ``zero_grad()`` the gradients. Gradients reach ``p.grad`` from ``backward()`` alone; ``torch.autograd.grad`` by a
    parameter and a second backward pass find nothing.

    Args:
        module: the module, on a GPU.
        max_graphs: how many input shapes to keep; the least recently used goes first.
        warmup: eager calls of a shape before it is captured.
        required: raise :class:`CaptureError` where the module cannot be captured (no GPU, host synchronisation,
            SyncBatchNorm, hooks, several processes); else a warning in the log says so once, and the module runs eagerly.
        say: takes one line for each capture; by default they are printed.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_graphs: int = 48,
        warmup: int = 1,
        required: bool = False,
        say: Callable[[str], None] = print_line,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"GraphedModule: module is {type(module).__name__}, but a torch.nn.Module is wanted")
        if isinstance(module, GraphedModule):
            raise TypeError("GraphedModule: the module is graphed already")
        reason = why_not(module) if required else None
        if reason is not None:
            raise CaptureError(f"{type(module).__name__} cannot be captured in a CUDA graph: {reason}")
        # nn.Module's own registers are left out: its methods find the module's, so that nothing gets a prefix.
        object.__setattr__(self, "module", module)
        graphs = ModuleGraphs(module, max_graphs=max_graphs, warmup=warmup, required=required, say=say)
        object.__setattr__(self, "graphs", graphs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self.module.forward(x, *args, **kwargs)
        return self.graphs(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.module.add_module(*args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def train(self, mode: bool = True) -> GraphedModule:
        self.module.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> GraphedModule:
        self.module._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __copy__(self) -> nn.Module:
        return copy.copy(self.module)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return operator.getitem, ((self.module,), 0)  # the module itself, and nothing of this package to load it

    def __repr__(self) -> str:
        return f"GraphedModule({self.module!r})"


# A whole step --------------------------------------------------------------------------------------------------------


class _Phase:
    """One graph of a step: an image shape, and where in an accumulation it stands."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.items: torch.Tensor
        self.used: frozenset[int]  # parameters that have a gradient, by their place


class TrainStep:
    """A training step as one CUDA graph: images and targets in, loss items out.

    ::

        step = TrainStep(model, ComputeLoss(model), optimizer, scaler, ema)
        for images, targets in loader:                 # uint8 images are divided by 255 inside of the graph
            items = step(images, targets)              # forward, loss, backward, unscale, clip, SGD, EMA, scale update
            scheduler.step()                           # param_groups are read at each call: warm-up, schedules

    What runs is what the separate calls would run (``scaler.scale(loss).backward()`` and
    :class:`torch_fastdet.optim.FusedStep`), with the same bits. The first call of each kind is such a step without a
    graph; the next one captures. There is a graph for each image shape (multi-scale) and each place in an accumulation:
    ``step(images, targets, update=False)`` adds up gradients, ``update=True`` uses them.

    Args:
        model: the model in training mode, on a GPU.
        loss: ``loss(outputs, targets, num_targets) -> (loss, items)``, without host synchronisation, where the first
            ``num_targets`` (an int64 on the device) rows of targets are in use: :class:`torch_fastdet.yolov5.ComputeLoss`,
            whose bad rows are counted (``loss.ignored_targets``) in every step, captured or not.
        optimizer: torch_fastdet.optim.SGD or torch.optim.SGD.
        scaler: a torch.amp.GradScaler, driven in the graph (overflow skips the update, growth, backoff).
        ema: a torch_fastdet.ema.ModelEMA of the model.
        max_norm: clip the gradients' norm to it; None does not clip.
        max_targets: rows of targets that a graph has room for. More make it grow, which captures again; None starts at
            twice those of the first call.
        amp: dtype of autocast; None for float32. By default float16 with an enabled scaler, else float32.
        max_graphs: how many graphs to keep; the least recently used goes first.
        say: takes one line for each capture; by default they are printed.

    What a graph has baked in is looked at in each call, and captured again where it changed: memory, ``requires_grad``,
    training flags, the optimizer's groups and flags, ``fused.max_norm``, the scaler's and the EMA's settings, and what
    ``loss.graph_key()`` returns, where the loss has it (ComputeLoss: gains, ``gr``, ``sort_obj_iou``, ``balance``). Call
    :meth:`reset` after changing anything else that decides what runs: attributes of layers, hooks, a loss of your own,
    global flags of torch. Images and targets in pinned memory are copied while the call returns: leave them as they are until
    the items were read.

    Raises:
        CaptureError: at the second call, where something in the step cannot be captured; at once for a model that is on
            the CPU or trained by several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        optimizer: torch.optim.SGD,
        scaler: torch.amp.GradScaler | None = None,
        ema: Any = None,
        max_norm: float | None = 10.0,
        max_targets: int | None = None,
        *,
        amp: torch.dtype | Literal["auto"] | None = "auto",
        max_graphs: int = 144,
        say: Callable[[str], None] = print_line,
    ) -> None:
        from torch_fastdet.yolov5.heads import head_views  # here, for the package's switches import this module

        if not isinstance(model, nn.Module):
            raise TypeError(f"TrainStep: model is a {type(model).__name__}, but a torch.nn.Module is wanted")
        if isinstance(model, GraphedModule):
            model = model.module
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"TrainStep: {type(model).__name__} has no parameter that requires a gradient")
        reason = why_not(model)
        if reason is not None:
            raise CaptureError(f"TrainStep: {type(model).__name__} cannot be captured in a CUDA graph: {reason}")
        if max_targets is not None and max_targets < 1:
            raise ValueError(f"TrainStep: max_targets is {max_targets}, but 1 or more is wanted")
        if max_graphs < 1:
            raise ValueError(f"TrainStep: max_graphs is {max_graphs}, but 1 or more is wanted")
        self.model, self.loss, self.optimizer, self.scaler, self.ema = model, loss, optimizer, scaler, ema
        self._head_views = head_views
        self.fused = FusedStep(optimizer, scaler, ema, max_norm)
        self._check_optimizer()
        if amp == "auto":
            amp = torch.float16 if scaler is not None and scaler.is_enabled() else None
        self.amp: torch.dtype | None = amp
        self.max_graphs, self.max_targets, self.say = max_graphs, max_targets, say
        self.device = next(model.parameters()).device
        self._count = torch.zeros((), dtype=torch.int64, device=self.device)
        self._targets: torch.Tensor | None = None
        self._columns: int | None = getattr(loss, "target_columns", None)  # of targets; else those of the first step
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._pending = 0  # micro-batches since the last update, whose gradients are summed up there
        self._summed: frozenset[int] = frozenset()  # parameters that had one, by their place in self._gradients
        self._trained: tuple = ()
        self._others: tuple = ()
        self._settings: tuple = ()
        self._walk: Walk | None = None
        self._ema_walk: Walk | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all graphs; the next calls capture anew. Gradients that are being added up stay."""
        self._phases: OrderedDict[tuple, _Phase] = OrderedDict()
        self._warm: set[tuple] = set()
        self._images: dict[tuple, torch.Tensor] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(self.device)

    def _drop_graphs(self) -> None:
        self._phases.clear()
        self._images.clear()

    def memory(self) -> dict[str, Any]:
        """What is captured: number of graphs, image shapes, room for targets, bytes of the graphs' pool and of all else."""
        tensors = [*self._images.values(), *[g for _, g in self._gradients]]
        if self._targets is not None:
            tensors.append(self._targets)
        return {
            "graphs": len(self._phases),
            "shapes": sorted({key[0] for key in self._phases}),
            "max_targets": 0 if self._targets is None else self._targets.shape[0],
            "pool_bytes": pool_bytes(self._pool),
            "static_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        }

    def __call__(self, images: torch.Tensor, targets: torch.Tensor, update: bool = True) -> torch.Tensor:
        """Train on one batch; returns the loss items.

        Args:
            images: (batch, channels, height, width), uint8 or floating, on any device.
            targets: (nt, 6) float32 rows of the loss, on any device.
            update: whether to take the optimizer's step, or only to add up gradients for a later one.
        """
        for name, value in (("images", images), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"TrainStep: {name} is a {type(value).__name__}, but a tensor is wanted")
        if images.dim() != 4:
            raise ValueError(
                f"TrainStep: images has shape {tuple(images.shape)}, but (batch, channels, height, width) is wanted"
            )
        if targets.dim() != 2 or targets.shape[1] != (self._columns or targets.shape[1]):
            raise ValueError(
                f"TrainStep: targets has shape {tuple(targets.shape)}, but (nt, {self._columns or 'columns'}) is wanted"
            )
        if not self.model.training:
            raise RuntimeError("TrainStep: the model is in eval mode; call model.train() first")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("TrainStep: it is a graph of its own and cannot be called while another one is captured")
        self._watch()
        self._take_targets(targets)
        first, last = self._pending == 0, update
        key = (tuple(images.shape), images.dtype, first, last, self._summed)
        phase = self._phases.get(key)
        graphed = phase is not None or key in self._warm
        static = self._take_images(images, keep=graphed)
        if phase is not None:
            self._phases.move_to_end(key)
        elif not graphed:
            items, used = with_room(lambda: self._run(static, first, last), self._phases, self._make_room)
            self._warm.add(key)
            self._columns = targets.shape[1]
            self._count_micro_batch(used, last)
            self._trained, self._others = self._addresses()  # the first step makes momentum buffers
            return items
        else:
            phase = self._capture(key, static)
        self.fused.refresh()
        phase.graph.replay()
        if last:
            self.fused.after_replay()
        self._count_micro_batch(phase.used, last)
        return phase.items.clone()

    def _count_micro_batch(self, used: frozenset[int], last: bool) -> None:
        self._pending = 0 if last else self._pending + 1
        self._summed = frozenset() if last else self._summed | used

    def _check_optimizer(self) -> None:
        trained = set(map(id, self.model.parameters()))
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in trained:
                    raise ValueError(
                        f"TrainStep: parameter {j} of the optimizer's group {i}, of shape {tuple(parameter.shape)}, is none of the "
                        f"model's, and would never be trained; make it one of {type(self.model).__name__}'s"
                    )

    def _walked(self) -> Walk:
        self._walk = Walk.renewed(self._walk, self.model)
        return self._walk

    def _addresses(self) -> tuple[tuple, tuple]:
        """What is trained, and where it lies; where all else lies that graphs read and write."""
        walk = self._walked()
        averages = []
        if self.ema is not None:
            self._ema_walk = Walk.renewed(self._ema_walk, self.ema.ema)
            averages = self._ema_walk.tensors
        buffers = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        trained = (
            tuple([p.data_ptr() for p in walk.parameters]),
            tuple(map(id, walk.parameters)),  # gradients go to the parameters of the capture
            tuple([p.requires_grad for p in walk.parameters]),
        )
        others = (
            tuple([b.data_ptr() for b in walk.buffers]),
            tuple([t.data_ptr() for t in averages]),
            tuple([b.data_ptr() for b in buffers if b is not None]),
        )
        return trained, others

    def _decisions(self) -> tuple:
        """What else is baked into a graph: decisions of the host."""
        loss_key = getattr(self.loss, "graph_key", None)
        return (
            tuple([m.training for m in self._walked().submodules]),
            self.fused.graph_key(),
            self.amp,
            id(self.loss),
            None if loss_key is None else loss_key(),
        )

    def _watch(self) -> None:
        """What moved (``ema.half().float()``, ``p.data = ...``, a loaded optimizer), was frozen or set needs new graphs."""
        (trained, others), settings = self._addresses(), self._decisions()
        retrained = trained != self._trained
        moved = retrained or others != self._others
        if not moved and settings == self._settings:
            return
        self._check_optimizer()
        if self._phases:
            what = (
                "tensors of the model, its EMA or its optimizer moved or were frozen"
                if moved
                else "settings of the model, the loss, the optimizer, the scaler or the EMA changed"
            )
            self.say(f"TrainStep: {what}; capturing again")
        self.reset()
        lost = self._pending if retrained else 0
        if retrained:
            self._gradients = [(p, torch.zeros_like(p)) for p in self.model.parameters() if p.requires_grad]
            self._pending, self._summed = 0, frozenset()
        self._trained, self._others, self._settings = trained, others, settings
        if lost:
            raise RuntimeError(
                "TrainStep: parameters of the model moved, were replaced or frozen in the middle of an accumulation; the gradients of "
                f"{lost} micro-batch(es) are dropped, and the next call begins a new one"
            )

    def _take_targets(self, targets: torch.Tensor) -> None:
        count, held = targets.shape[0], self._targets
        if held is not None and held.shape[1] != targets.shape[1]:
            held = None  # of a first call that failed
        if held is None or count > held.shape[0]:
            room = max(64, 2 * count)
            if held is None and self.max_targets is not None:
                room = max(self.max_targets, count)
            if self._phases and held is not None:
                self.say(f"TrainStep: {count} targets need more room than {held.shape[0]}; capturing again for {room}")
            self._drop_graphs()
            self._targets = held = torch.zeros(room, targets.shape[1], device=self.device)
        held[:count].copy_(targets.detach(), non_blocking=True)
        self._count.fill_(count)

    def _take_images(self, images: torch.Tensor, keep: bool) -> torch.Tensor:
        key = (tuple(images.shape), images.dtype)
        static = self._images.get(key)
        if static is None:
            like = images.new_empty(images.shape, device=self.device)
            static = torch.empty_like(like, memory_format=input_format(self.model, like))
            if keep:
                self._images[key] = static
        static.copy_(images.detach(), non_blocking=True)
        return static

    def _forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = images if images.is_floating_point() else images.float() / 255
        # A cached cast would be made by one graph and be missing in the next replay.
        autocast = torch.autocast("cuda", self.amp or torch.float16, enabled=self.amp is not None, cache_enabled=False)
        counting = getattr(self.loss, "counting", contextlib.nullcontext)
        with autocast, self._head_views(self.model), counting():
            return self.loss(self.model.forward(x), self._targets, self._count)

    def _run(self, images: torch.Tensor, first: bool, last: bool) -> tuple[torch.Tensor, frozenset[int]]:
        """The step, launched or captured: the items, and which parameters have a gradient."""
        with aliased_parameters(self.model) as aliases:
            loss, items = self._forward(images)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        new = torch.autograd.grad(loss.sum(), [aliases[p] for p, _ in self._gradients], allow_unused=True)
        totals = {i: as_parameter(g, p) for i, ((p, _), g) in enumerate(zip(self._gradients, new)) if g is not None}
        used = list(totals)
        held = [sums for _, sums in self._gradients]
        if not first:  # not in place: where the step raises, the call can be made again
            both = [i for i in used if i in self._summed]  # a parameter may be used in some micro-batches only
            if both:
                totals.update(zip(both, torch._foreach_add([held[i] for i in both], [totals[i] for i in both])))
            totals.update({i: held[i] for i in self._summed.difference(used)})
        if not last:
            if used:
                torch._foreach_copy_([held[i] for i in used], [totals[i] for i in used])
            totals = {i: held[i] for i in totals}
        # Of frozen parameters too: the optimizer steps what has a gradient.
        for parameter in (*self.model.parameters(), *(p for g in self.optimizer.param_groups for p in g["params"])):
            parameter.grad = None
        for i, total in totals.items():
            self._gradients[i][0].grad = total
        if last:
            self.fused.step(self.model)
        return items.detach(), frozenset(used)

    def _make_room(self) -> None:
        self.say(f"TrainStep: out of memory beside {len(self._phases)} graphs, which are dropped; capturing again")
        self.reset()
        torch.cuda.empty_cache()

    def _capture(self, key: tuple, static: torch.Tensor) -> _Phase:
        reason = why_not(self.model)
        if reason is not None:
            raise CaptureError(f"TrainStep: {type(self.model).__name__} cannot be captured in a CUDA graph: {reason}")
        while len(self._phases) >= self.max_graphs:
            oldest, _ = self._phases.popitem(last=False)
            if not any(other[:2] == oldest[:2] for other in (key, *self._phases)):
                del self._images[oldest[:2]]
        if not self._phases:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        try:
            phase = self._captured(key, static)
        except RuntimeError as error:
            if not (is_out_of_memory(error) and self._phases):
                raise
            phase = None  # and out of this block, whose traceback holds what the failed capture made
        if phase is None:
            self._make_room()
            self._images[key[:2]] = static
            return self._capture(key, static)
        self._phases[key] = phase
        kind = {(True, True): "one step", (True, False): "first", (False, False): "middle", (False, True): "last"}
        memory = self.memory()
        self.say(
            f"TrainStep: captured {kind[key[2:4]]} of {type(self.model).__name__} for images {key[0]} ({key[1]}) and up to "
            f"{memory['max_targets']} targets; {memory['graphs']} graphs hold {memory['pool_bytes'] / 2**20:.0f} MiB"
        )
        return phase

    def _captured(self, key: tuple, static: torch.Tensor) -> _Phase:
        phase = _Phase()
        self.fused.refresh()
        location = _Location(self.model)
        try:
            with capture_into(phase.graph, self._pool, self._stream):
                phase.items, phase.used = self._run(static, key[2], key[3])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CaptureError(
                f"TrainStep: {location} or what follows it failed during the capture, {first_line(error)}"
            ) from error
        finally:
            location.remove()
        return phase
