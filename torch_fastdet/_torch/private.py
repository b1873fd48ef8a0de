"""Names every private name and key of torch that the Python package uses, and asks its process groups.

``tests/test_private.py`` asserts that the installed torch has them all. Two kinds are used where they are needed: the dictionaries
``_parameters``, ``_buffers`` and ``_modules`` of ``nn.Module``, and methods of torch that a class of torch_fastdet overrides.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

Context: TypeAlias = Any  # of an autograd.Function: its methods give it attributes
foreach_copy_, foreach_add, foreach_add_ = torch._foreach_copy_, torch._foreach_add, torch._foreach_add_
foreach_zero_ = torch._foreach_zero_
disable_dynamo = torch._disable_dynamo  # torch.compiler.disable without its import of the compiler
as_plain_tensors = torch._C.DisableTorchFunctionSubclass  # inside, subclasses are plain tensors to functions
without_dispatch_modes = torch.utils._python_dispatch._disable_current_modes  # FakeTensorMode and the like
operator_names = torch._C._dispatch_get_all_op_names  # of all registered operators, with their namespace
# Returns how many GPUs this process may use, without starting CUDA; -1 if that is unknown.
gpu_count = torch.cuda._device_count_nvml
# Returns True in a process that cannot use CUDA because its parent did before the fork.
lost_cuda_in_fork = torch.cuda._is_in_bad_fork
# The weights of these layers are scales, which do not decay.
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

# CUDA's allocator ----------------------------------------------------------------------------------------------------

_OFF = " expandable_segments:False"  # the leading space, which PyTorch ignores, marks our own setting


@functools.cache
def _has_virtual_memory(device: int) -> bool:
    """Return whether the driver maps memory piece by piece, which some virtual GPUs do not."""
    value, virtual_memory_management = ctypes.c_int(), 102  # of CUdevice_attribute
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuDeviceGetAttribute(ctypes.byref(value), virtual_memory_management, device) == 0 and value.value == 1


@contextlib.contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """Let the allocator's segments grow in place while inside, unless a user has set that: separate ones leave gaps in a graph's pool."""
    if torch.cuda.get_allocator_backend() != "native" or not _has_virtual_memory(device.index):
        yield
        return
    found = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    before = found.removesuffix(_OFF).removesuffix(",")
    if "expandable_segments" in before:
        yield
        return
    set_allocator = torch._C._accelerator_setAllocatorSettings
    others = f"{before}," if before else ""  # settings that are not named go back to their defaults
    set_allocator(others + "expandable_segments:True")
    try:
        yield
    finally:
        set_allocator(others + _OFF)


def enter_pool(device: torch.device, pool: Any) -> None:
    """Allocate what this thread asks for from ``pool``."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)


def leave_pool(device: torch.device, pool: Any) -> None:
    """Allocate from ``pool`` no more, also after a capture that failed."""
    for release in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):
            release(device.index, pool)


def pool_bytes(pool: Any, which: str = "total_size") -> int:
    segments = torch.cuda.memory_snapshot() if pool is not None else ()
    return sum(segment[which] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


# Autograd and modules ------------------------------------------------------------------------------------------------


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when this backward pass ends, on the stream that called ``backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# DistributedDataParallel sets these attributes if it does more than average gradients in float32 or as they are.
_DDP_MODES = {
    "_comm_hooks": "it has a communication hook",
    "buffer_hook": "it has a hook for its buffers",
    "mixed_precision": "it has mixed_precision",
    "_use_python_reducer": "torch.compile runs its reducer",
    "_delay_all_reduce_all_params": "it has delay_all_reduce_named_params",
    "parameters_to_ignore": "it ignores some parameters",
}


def ddp_mode(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    """Return what this DistributedDataParallel does beside averaging gradients."""
    for name, mode in _DDP_MODES.items():
        if getattr(ddp, name, None):  # buffer_hook is set with the hook
            return mode
    return "Join is in use" if ddp._join_config.enable else None


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def module_has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _MODULE_HOOKS)


def forward_hooks(module: nn.Module) -> list[object]:
    """Return the tables that hold this module's forward hooks, now and later."""
    return [module._forward_hooks, module._forward_pre_hooks]


_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)


def every_module_has_hooks() -> bool:
    return any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS)


def is_compiled_in_place(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` holds; None for others."""
    # The class is recognized by its name, because importing dynamo is slow.
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def is_replica(module: nn.Module) -> bool:
    return getattr(module, "_is_replica", False)


def writes(tensor: Tensor) -> int | None:
    """Return a number that changes when the tensor is written; None of inference tensors, whose writes are not counted."""
    return None if tensor.is_inference() else tensor._version


def runs_plainly(module: nn.Module, forward: object) -> bool:
    """Return whether a call of ``module`` is a call of ``forward`` and nothing else: no hook, nothing put on the instance."""
    return (
        type(module).forward is forward
        and "forward" not in module.__dict__
        and not module_has_hooks(module)
        and not is_compiled_in_place(module)
    )


def parameter_has_hooks(parameter: Tensor) -> bool:
    return any(getattr(parameter, name) for name in _PARAMETER_HOOKS)


# What runs now -------------------------------------------------------------------------------------------------------


def is_recorded() -> bool:
    """Return whether calls become a program that has to run without torch_fastdet, which may be a part of torch.compile's programs."""
    # The public name of the last one is True under torch.compile as well.
    return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export() or torch.compiler._is_exporting_flag


def is_transforming() -> bool:
    """Return whether torch.func or forward-mode AD may be active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def after_each_fetch(callback: Callable[[], None]) -> None:
    """Call ``callback()`` in a loader process after each batch; ask before its first one."""
    fetcher: Any = torch.utils.data._utils.fetch._MapDatasetFetcher
    fetch = fetcher.fetch

    def fetch_then_call(self: object, indices: object) -> object:
        data = fetch(self, indices)
        callback()
        return data

    fetcher.fetch = fetch_then_call


def in_group() -> bool:
    """Return whether this process is in a process group, perhaps alone."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def group_size() -> int:
    """Return how many processes train together; 1 without a process group."""
    return torch.distributed.get_world_size() if in_group() else 1


def default_store() -> torch.distributed.Store:
    """Return the key-value store by which the ranks of the default process group found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


# GradScaler and optimizers -------------------------------------------------------------------------------------------


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[Tensor | None, Tensor | None, list[float]]:
    """Return what it keeps on the device, None before its first use, and growth factor, backoff factor and growth interval."""
    settings = [scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval]
    return scaler._scale, scaler._growth_tracker, settings


def was_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether unscale_ or step were called for this optimizer since the last update."""
    # get() and not []: that would make an entry, with which a scaler cannot be copied or pickled.
    entry = scaler._per_optimizer_states.get(id(optimizer))
    return entry is not None and entry["stage"] is not OptState.READY


def take_unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    unscale: Callable[[Tensor], dict[torch.device, Tensor] | None],
) -> bool:
    """Let ``unscale(scale)`` do what ``scaler.unscale_(optimizer)`` does. Returns False, with nothing done, where that is torch's business."""
    if scaler._scale is None:
        return False
    entry = scaler._per_optimizer_states[id(optimizer)]
    if entry["stage"] is not OptState.READY:
        return False
    found = unscale(scaler._scale)
    if found is None:
        return False
    entry["found_inf_per_device"] = found
    entry["stage"] = OptState.UNSCALED
    return True


def steps_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a call of ``optimizer.step`` is its class's step and nothing else: no hook, nothing put on the instance."""
    step = vars(optimizer).get("step")  # a scheduler puts one there that counts
    plain = step is None or (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step)
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return plain and not any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Set the mark without which schedulers warn that they run before the first step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
