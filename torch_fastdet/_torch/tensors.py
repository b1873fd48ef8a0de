"""Groups tensors by device, and tells cheaply whether objects are still the same, for optim, ema.py and graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import inside_compiled


def new_state(
    name: str,
    params: Sequence[Tensor] = (),
    groups: Sequence[int] = (),
    places: Sequence[int] = (),
    averages: Sequence[Tensor | None] = (),
    values: Sequence[Tensor] = (),
    value_averages: Sequence[Tensor] = (),
) -> Any:
    """Return a ``torch.classes.torch_fastdet.MultiTensorState``: the tensors of one device, held in C++."""
    return torch.classes.torch_fastdet.MultiTensorState(
        name, list(params), list(groups), list(places), list(averages), list(values), list(value_averages)
    )


class DeviceNumbers:
    """Keep numbers of the host in device memory, in float64, where captured graphs read them. Another count of them gets new memory."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.memory = torch.zeros(0, dtype=torch.float64, device=device)
        #: The numbers that were last uploaded.
        self.values: list[float] = []

    def upload(self, values: Sequence[float], device: torch.device | None = None) -> Tensor:
        """Bring the numbers to the device, if they changed; by default to the one on which they are."""
        device = self.memory.device if device is None else device
        if self.values == [*values] and self.memory.device == device:
            return self.memory
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a number that a CUDA graph reads changed inside of its capture; set it before")
        host = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
        if len(values) == self.memory.numel() and self.memory.device == device:
            self.memory.copy_(host, non_blocking=True)
        else:
            with torch.inference_mode(False):  # later calls write into it
                self.memory = host.to(device, non_blocking=True, copy=True)
        self.values = [*values]
        return self.memory


def same_objects(left: Sequence[object], right: Iterable[object], length: int) -> bool:
    """Return whether both hold the very same objects; runs without Python bytecode for each of them."""
    return len(left) == length and all(map(is_, left, right))


class ModuleWatch:
    """Notice that a module holds other parameter, buffer or submodule objects, by copies of its dictionaries: some 10 ns an entry.

    Replaced memory of the same tensor (``p.data = ...``) is noticed in C++, by its address.
    """

    def __init__(self, module: nn.Module):
        self.module = weakref.ref(module)
        everything = [entries for m in module.modules() for entries in (m._parameters, m._buffers, m._modules)]
        self.dicts = [entries for entries in everything if entries]
        self.copies = [dict(entries) for entries in self.dicts]
        self.bare = [entries for entries in everything if not entries]
        self.singles = [
            (entries, name, value)
            for entries in self.dicts
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def unchanged(self, module: nn.Module) -> bool:
        if module is not self.module():
            return False
        try:
            # Comparing two different tensors raises, so equal dictionaries hold the same objects. Tensors of one element do
            # not raise; they are compared by identity first.
            return (
                all(entries.get(name) is value for entries, name, value in self.singles)
                and self.dicts == self.copies
                and not any(self.bare)
            )
        except Exception:
            return False


class Walk:
    """List the submodules, parameters and buffers of a module. Listing them takes ten times as long as seeing that none changed."""

    def __init__(self, module: nn.Module) -> None:
        self.watch = ModuleWatch(module)
        self.submodules = list(module.modules())[1:]
        self.parameters = list(module.parameters())
        self.buffers = list(module.buffers())
        self.tensors = [*self.parameters, *self.buffers]

    @staticmethod
    def renewed(walk: Walk | None, module: nn.Module) -> Walk:
        """Return ``walk`` itself if the module still holds the same objects, else a new one."""
        return walk if walk is not None and walk.watch.unchanged(module) else Walk(module)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of ``module.state_dict()``, as the tensors that the module holds."""
    found = module.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[int]]:
    """Return indices of the tensors on each device, in order."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    return places


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Return the model and what is inside it, where it is DataParallel, DistributedDataParallel or torch.compile's; innermost last."""
    found = [model]
    while True:
        model = found[-1]
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            found.append(model.module)
        elif (inside := inside_compiled(model)) is not None:
            found.append(inside)
        else:
            return found


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile."""
    return wrappers(model)[-1]


def as_float(tensor: Tensor) -> Tensor:
    """Return integers and bools in float32, as the frameworks' divisions do, and anything else as it is."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.float()
