"""Every private name and key of torch that the Python package uses, each with what happens where it is missing.

Private names change between versions of torch. One that is gone costs what it saves (memory, a few microseconds, a
check) and nothing else: training, captures and results stay the same. What cannot be done at all without a private name
raises an error that names it. ``tests/test_private.py`` removes them one by one.

Two kinds are used where they are needed: the dictionaries ``_parameters``, ``_buffers`` and ``_modules`` of ``nn.Module``, which
every pickled module holds under these names, and methods of torch that a class of ours overrides.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

try:
    from torch.utils import _pytree
except ImportError:
    _pytree = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., Any])

# CUDA's allocator ----------------------------------------------------------------------------------------------------

_OFF = " expandable_segments:False"  # the leading space, which PyTorch ignores, marks our own setting


@functools.cache
def _has_virtual_memory(device: int) -> bool:
    """Whether the driver maps memory piece by piece, which some virtual GPUs do not."""
    value, virtual_memory_management = ctypes.c_int(), 102  # of CUdevice_attribute
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuDeviceGetAttribute(ctypes.byref(value), virtual_memory_management, device) == 0 and value.value == 1


def _allocator_settings() -> str | None:
    """The text of PYTORCH_CUDA_ALLOC_CONF as it holds now; None where torch does not tell."""
    try:
        return torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    except (AttributeError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """While inside, the allocator's segments grow in place: in separate segments a tenth of a graph pool is gaps.

    These are PyTorch's expandable segments, on for one capture. A user's own ``expandable_segments`` setting is left
    alone. Where torch's private functions are missing, the segments do not grow.
    """
    set_allocator: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    able = (
        set_allocator is not None
        and torch.cuda.get_allocator_backend() == "native"
        and _has_virtual_memory(device.index)
    )
    found = _allocator_settings() if able else None
    before = None if found is None else found.removesuffix(_OFF).removesuffix(",")
    if before is None or "expandable_segments" in before:
        yield
        return
    others = f"{before}," if before else ""  # settings that are not named go back to their defaults
    set_allocator(others + "expandable_segments:True")
    try:
        yield
    finally:
        set_allocator(others + _OFF)


def release_failed_capture(device: torch.device, pool: Any) -> None:
    """Give back the pool of a capture that failed. Without the private functions its memory stays reserved."""
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        function: Any = getattr(torch._C, name, None)
        if function is not None:
            with contextlib.suppress(RuntimeError):
                function(device.index, pool)


def pool_bytes(pool: Any) -> int:
    """Device memory that the caching allocator holds for a graph pool; 0 where the snapshot does not name pools."""
    if pool is None:
        return 0
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == tuple(pool)
    )


def keep_busy(device: torch.device, seconds: float) -> None:
    """Let the current stream wait so long (by 2 GHz; shorter or longer on other GPUs). Without torch's function it does not wait."""
    sleep: Any = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        with torch.cuda.device(device):
            sleep(int(seconds * 2e9))


# Autograd and modules ------------------------------------------------------------------------------------------------


def make_backward_wait(event: torch.cuda.Event, device: torch.device) -> None:
    """Inside a backward pass: the stream that called ``backward()`` waits for ``event`` when the pass ends.

    Without autograd's queue of callbacks the host waits instead.
    """
    queue: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        event.synchronize()
    else:
        queue(lambda: torch.cuda.current_stream(device).wait_event(event))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Inside a backward pass: call ``callback()`` when it ends, on the stream that called ``backward()``.

    Without autograd's queue of callbacks this raises: nothing else knows when all gradients are there.
    """
    queue: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)
    if queue is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no Variable._execution_engine.queue_callback, which averaging gradients over "
            "processes needs; train without cuda_graph"
        )
    queue(callback)


# Attributes of DistributedDataParallel that are set where it does more than average gradients in float32 or as they are.
_DDP_MODES = {
    "_comm_hooks": "it has a communication hook",
    "buffer_hook": "it has a hook for its buffers",
    "mixed_precision": "it has mixed_precision",
    "_use_python_reducer": "torch.compile runs its reducer",
    "_delay_all_reduce_all_params": "it has delay_all_reduce_named_params",
    "parameters_to_ignore": "it ignores some parameters",
}


def ddp_mode(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    """What this DistributedDataParallel does beside averaging gradients. Modes under other names are not seen."""
    for name, mode in _DDP_MODES.items():
        if getattr(ddp, name, None):
            return mode
    return "Join is in use" if getattr(getattr(ddp, "_join_config", None), "enable", False) else None


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def module_has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on this module itself. Hooks under other names are not seen."""
    return any(getattr(module, name, None) for name in _MODULE_HOOKS)


def forward_hooks(module: nn.Module) -> list[Any]:
    """The tables that hold this module's forward hooks, now and later. Hooks under other names are not seen."""
    return [table for name in _MODULE_HOOKS[:2] if (table := getattr(module, name, None)) is not None]


_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def every_module_has_hooks() -> bool:
    """Whether hooks are registered on all modules at once. Hooks under other names are not seen."""
    return any(getattr(nn.modules.module, name, None) for name in _GLOBAL_HOOKS)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. False where torch notes that elsewhere."""
    return getattr(module, "_compiled_call_impl", None) is not None


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` holds; None for others, and where torch keeps it under another name."""
    # Without an import of dynamo.
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def is_replica(module: nn.Module) -> bool:
    """Whether DataParallel made this module for one pass. False where torch does not mark them."""
    return getattr(module, "_is_replica", False)


def writes(tensor: Tensor) -> Any:
    """A value that changes when the tensor is written; None of inference tensors, whose writes are not counted.

    Without torch's counter it is another one at each call.
    """
    return None if tensor.is_inference() else getattr(tensor, "_version", object())


def runs_plainly(module: nn.Module, forward: Any) -> bool:
    """Whether a call of ``module`` is a call of ``forward`` and nothing else: no hook, nothing put on the instance."""
    return (
        type(module).forward is forward
        and "forward" not in module.__dict__
        and not module_has_hooks(module)
        and not is_compiled_in_place(module)
    )


def parameter_has_hooks(parameter: Tensor) -> bool:
    """Whether hooks are registered on this parameter. Hooks under other names are not seen."""
    return any(getattr(parameter, name, None) for name in _PARAMETER_HOOKS)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in a few launches; without torch's function in one launch each."""
    function: Any = getattr(torch, "_foreach_copy_", None)
    if function is not None:
        function(targets, sources)
        return
    for target, source in zip(targets, sources):
        target.copy_(source)


def foreach_add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """The sums of pairs, in a few launches; without torch's function in one launch each."""
    function: Any = getattr(torch, "_foreach_add", None)
    return list(function(left, right)) if function is not None else [a + b for a, b in zip(left, right)]


def foreach_add_(targets: list[Tensor], values: list[Tensor], alpha: float = 1) -> None:
    """Add each value, times ``alpha``, to its target, in a few launches; without torch's function in one launch each."""
    function: Any = getattr(torch, "_foreach_add_", None)
    if function is not None:
        function(targets, values, alpha=alpha)
        return
    for target, value in zip(targets, values):
        target.add_(value, alpha=alpha)


def foreach_mul(tensors: list[Tensor], factor: float) -> list[Tensor]:
    """The tensors times a number, in a few launches; without torch's function in one launch each."""
    function: Any = getattr(torch, "_foreach_mul", None)
    return list(function(tensors, factor)) if function is not None else [tensor * factor for tensor in tensors]


def foreach_mul_(tensors: list[Tensor], factor: float) -> None:
    """The same in place."""
    function: Any = getattr(torch, "_foreach_mul_", None)
    if function is not None:
        function(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def norm_layers() -> tuple[type[nn.Module], ...]:
    """Layers whose weight is a scale of what they normalise."""
    batch: Any = getattr(nn.modules.batchnorm, "_NormBase", None)
    named: list[type[nn.Module]] = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
    named += [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
    return (*(named if batch is None else [batch]), nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


# Nested results ------------------------------------------------------------------------------------------------------


def _rebuilt(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    kind: Any = type(tree)
    if kind in (tuple, list):
        return kind(_rebuilt(part, leaf) for part in tree)
    return {key: _rebuilt(part, leaf) for key, part in tree.items()} if kind is dict else leaf(tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists and dictionaries, and their structure, which compares equal to the same one.

    Without torch's pytree, types that are registered there, such as named tuples, are leaves.
    """
    if _pytree is not None:
        return _pytree.tree_flatten(tree)
    leaves: list[Any] = []

    def number(leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves) - 1

    structure = _rebuilt(tree, number)
    return leaves, structure


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """What :func:`tree_flatten` took apart, with these leaves."""
    return _rebuilt(structure, leaves.__getitem__) if _pytree is None else _pytree.tree_unflatten(leaves, structure)


# What runs now -------------------------------------------------------------------------------------------------------


def is_exporting() -> bool:
    """Whether torch.export runs. The public function says True under torch.compile as well, where ours would do."""
    flag: Any = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def is_transforming() -> bool:
    """Whether torch.func or forward-mode AD may be active. True where torch does not tell: stock's operator then runs."""
    active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
    level: Any = getattr(torch.autograd.forward_ad, "_current_level", None)
    return active is None or level is None or active() or level >= 0


def lost_cuda_in_fork() -> bool:
    """Whether this process was forked from one that had begun to use CUDA, so that it cannot. False where torch does not tell."""
    asked: Any = getattr(torch.cuda, "_is_in_bad_fork", None)
    return asked is not None and asked()


def gpu_count() -> int:
    """GPUs that this process may use, without starting CUDA; -1 where that is unknown."""
    count: Any = getattr(torch.cuda, "_device_count_nvml", None)
    return -1 if count is None else count()


def operator_names() -> list[str]:
    """Names of all registered operators, with their namespace; none where torch has no list."""
    names: Any = getattr(torch._C, "_dispatch_get_all_op_names", None)
    return [] if names is None else list(names())


def operator_arguments(operator: Any) -> Any:
    """The arguments of an operator's schema. Without it this raises: nothing else knows their names and defaults."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        raise RuntimeError(f"torch {torch.__version__} has no OpOverload._schema, which counting operations needs")
    return schema.arguments


def disable_dynamo(function: F) -> F:
    """``torch.compiler.disable`` without its import of the compiler, where torch has that."""
    disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return disable(function)


# GradScaler and optimizers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalerState:
    """What a GradScaler keeps on the device, and its settings."""

    scale: Tensor | None
    growth_tracker: Tensor | None
    growth_factor: float
    backoff_factor: float
    growth_interval: int


def scaler_state(scaler: torch.amp.GradScaler) -> ScalerState | None:
    """The scaler's tensors, None in it before its first use. None where this torch's GradScaler has none of that name."""
    private: Any = scaler
    try:
        return ScalerState(
            private._scale,
            private._growth_tracker,
            private._growth_factor,
            private._backoff_factor,
            private._growth_interval,
        )
    except AttributeError:
        return None


def _optimizer_entry(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, make: bool) -> dict | None:
    entries: Any = getattr(scaler, "_per_optimizer_states", None)
    if entries is None:
        return None
    # An entry that is looked up is made, and a scaler that has one cannot be copied or pickled.
    return entries[id(optimizer)] if make else entries.get(id(optimizer))


def _stages() -> Any:
    from torch.amp import grad_scaler

    return getattr(grad_scaler, "OptState", None)


def was_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether unscale_ or step were called for this optimizer since the last update. False where torch does not tell."""
    entry, stages = _optimizer_entry(scaler, optimizer, make=False), _stages()
    return entry is not None and stages is not None and entry["stage"] is not stages.READY


def take_unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    unscale: Callable[[Tensor], dict[torch.device, Tensor] | None],
) -> bool:
    """Let ``unscale(scale)`` do what ``scaler.unscale_(optimizer)`` does, and note in the scaler what it found.

    Returns False, and nothing is done, where that is torch's own business: the gradients are unscaled already, ``unscale``
    returns None, or this GradScaler keeps its state in another way.
    """
    state, stages = scaler_state(scaler), _stages()
    if state is None or state.scale is None or stages is None:
        return False
    entry = _optimizer_entry(scaler, optimizer, make=True)
    if entry is None or entry.get("stage") is not stages.READY:
        return False
    found = unscale(state.scale)
    if found is None:
        return False
    entry["found_inf_per_device"] = found
    entry["stage"] = stages.UNSCALED
    return True


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the step hooks that torch puts around it when an optimizer of that class is made."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", None) else step


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers warn where they run before the first step; they look for this mark."""
    private: Any = optimizer
    private._opt_called = True
