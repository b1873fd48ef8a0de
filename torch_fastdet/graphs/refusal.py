"""Finds what cannot be captured, and writes the messages."""

from __future__ import annotations

from torch import nn

from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.graphs import capture as _capture


class CaptureError(RuntimeError):
    """Raise for what cannot be captured in a CUDA graph; the text says what and why."""


def why_not(module: nn.Module, averaged: bool = False) -> str | None:
    """Return why ``module`` cannot be captured, judging by its structure; None if no obstacle is known.

    ``averaged``: somebody averages its gradients over the processes of a distributed run.
    """
    if isinstance(module, nn.DataParallel):
        return "DataParallel is not supported; start one process for each GPU with torchrun"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel averages gradients itself; give the module inside, which is averaged here"
    if not averaged and (size := group_size()) > 1:
        return f"{size} processes train it, and a replay would not exchange their gradients"
    for name, child in module.named_modules():
        label = _label(name, child)
        if isinstance(child, nn.SyncBatchNorm):
            return f"{label} exchanges statistics with other processes"
        if isinstance(child, nn.RNNBase):
            return f"{label} keeps its weights in a list of its own"
        if private.module_has_hooks(child):
            return f"{label} has hooks, which a replay would not call"
    for name, parameter in module.named_parameters():
        if not _capture.on_gpu(parameter):
            return f"parameter {name} is on {parameter.device}, not on a GPU"
        if private.parameter_has_hooks(parameter):
            return f"parameter {name} has hooks, which a replay would not call"
    return None


def _label(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def location_of(error: BaseException, module: nn.Module) -> str:
    """Return the innermost part of ``module`` whose forward raised ``error``, read from the traceback: with hooks modules run otherwise."""
    labels = {id(child): _label(name, child) for name, child in module.named_modules()}
    found, step = "the model", error.__traceback__
    while step is not None:
        found = labels.get(id(step.tb_frame.f_locals.get("self")), found)
        step = step.tb_next
    return found


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
