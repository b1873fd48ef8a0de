"""What optim.py and ema.py share: tensors sorted by device, and cheap answers to "are these still the same objects?"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


def new_state(
    name: str,
    params: Sequence[Tensor] = (),
    groups: Sequence[int] = (),
    averages: Sequence[Tensor | None] = (),
    values: Sequence[Tensor] = (),
    value_averages: Sequence[Tensor] = (),
) -> Any:
    """A ``torch.classes.torch_fastdet.MultiTensorState``: the tensors of one device, held in C++."""
    return torch.classes.torch_fastdet.MultiTensorState(
        name, list(params), list(groups), list(averages), list(values), list(value_averages)
    )


def same_objects(left: Sequence[Any], right: Iterable[Any], length: int) -> bool:
    """Whether both hold the very same objects; runs without Python bytecode for each of them."""
    return len(left) == length and all(map(is_, left, right))


class ModuleWatch:
    """Notices that a module holds other parameter, buffer or submodule objects than it did.

    Replaced memory of the same tensor (``p.data = ...``, ``module.half()``) is noticed in C++, by its address. Replaced
    *objects* (buffers under ``module.half()``, ``module.weight = nn.Parameter(...)``) can be noticed only here: the modules' own
    dictionaries are compared with copies, which takes no Python bytecode and some 10 ns an entry.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        everything = [entries for m in module.modules() for entries in (m._parameters, m._buffers, m._modules)]
        self.dicts = [entries for entries in everything if entries]
        self.copies = [dict(entries) for entries in self.dicts]
        self.bare = [entries for entries in everything if not entries]
        self.singles = [
            (entries, name, value)
            for entries in self.dicts
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        ]

    def unchanged(self, module: nn.Module) -> bool:
        if module is not self.module:
            return False
        try:
            # Equal objects are identical ones: comparing two different tensors raises, unless they have one element.
            if self.dicts != self.copies or any(self.bare):
                return False
        except Exception:
            return False
        return all(entries.get(name) is value for entries, name, value in self.singles)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The entries of ``module.state_dict()``, as the tensors that the module holds."""
    found = module.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[int]]:
    """Indices of the tensors on each device, in order."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    return places


def wrappers(model: nn.Module) -> list[nn.Module]:
    """The model and what is inside it, where it is DataParallel, DistributedDataParallel or torch.compile's; innermost last."""
    found = [model]
    while True:
        model = found[-1]
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            found.append(model.module)
        elif "_orig_mod" in model._modules and type(model).__name__ == "OptimizedModule":  # without importing dynamo
            found.append(model.get_submodule("_orig_mod"))
        else:
            return found


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile."""
    return wrappers(model)[-1]
