"""What cannot be captured, and the words for it."""

from __future__ import annotations

import torch
from torch import nn

from torch_fastdet import _private
from torch_fastdet.graphs import _capture


class CaptureError(RuntimeError):
    """Something cannot be captured in a CUDA graph; the text says what and why."""


def why_not(module: nn.Module) -> str | None:
    """Why ``module`` cannot be captured, as far as its looks tell; None if nothing speaks against it."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return f"{type(module).__name__} is not supported yet; capture the module inside on one GPU"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        return (
            f"{torch.distributed.get_world_size()} processes train it, and a replay would not exchange their gradients"
        )
    for name, child in module.named_modules():
        label = _label(name, child)
        if isinstance(child, nn.SyncBatchNorm):
            return f"{label} exchanges statistics with other processes"
        if isinstance(child, nn.RNNBase):
            return f"{label} keeps its weights in a list of its own"
        if _private.module_has_hooks(child):
            return f"{label} has hooks, which a replay would not call"
    for name, parameter in module.named_parameters():
        if not _capture.on_gpu(parameter):
            return f"parameter {name} is on {parameter.device}, not on a GPU"
        if _private.parameter_has_hooks(parameter):
            return f"parameter {name} has hooks, which a replay would not call"
    return None


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


class Location:
    """The module whose forward runs, so that a failed capture can name it. Use it as a context around the capture."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack: list[str] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Location:
        self._stack.clear()  # an earlier capture that failed left its place here
        for name, child in self._module.named_modules():
            label = _label(name, child)
            self._handles.append(child.register_forward_pre_hook(lambda *_, label=label: self._stack.append(label)))
            self._handles.append(child.register_forward_hook(lambda *_: self._leave()))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _leave(self) -> None:
        self._stack.pop()

    def __str__(self) -> str:
        return self._stack[-1] if self._stack else "the model"


def is_out_of_memory(error: BaseException) -> bool:
    """By the allocator, or by CUDA, which makes a graph executable in memory of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
