"""Turns the state of a training between two epochs into values that a file can hold, and back."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._say import warn
from torch_fastdet._torch.modules import is_channels_last
from torch_fastdet._torch.tensors import unwrap
from torch_fastdet.switches.resume_exact import files
from torch_fastdet.switches.resume_exact.files import NotOurs, State

_PARTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("random", "model", "gradients", "optimizer", "scaler", "ema", "stopper", "loader", "locals"), dict
    ),
    "channels_last": list,
    "updates": int,
    "table": (list, tuple),
}


def plain(value: object, where: str = "state") -> Any:
    """Return a copy on the CPU that a file may hold: numbers of numpy become Python's; raises TypeError for anything else."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {plain(key, where): plain(each, f"{where}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each, where) for each in value) if type(value) in (list, tuple) else list(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
        return value.item()
    raise TypeError(f"{where} holds a {type(value).__name__}, which resume_exact cannot keep")


# Random states --------------------------------------------------------------------------------------------------------


def random_states(device: torch.device) -> State:
    """Return the states of the generators of Python, numpy, torch, and of a GPU."""
    import numpy as np

    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: State, device: torch.device) -> None:
    import numpy as np

    version, words, following = states["python"]
    random.setstate((version, tuple(words), following))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# Model, average, optimizer, scaler ------------------------------------------------------------------------------------


def take(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, ema: Any, stopper: object
) -> State:
    """Return everything that steps change, in full precision."""
    model = unwrap(model)
    device = next(model.parameters()).device
    return {
        "random": random_states(device),
        "model": plain(model.state_dict(), "the model"),
        "channels_last": [name for name, p in model.named_parameters() if is_channels_last(p)],
        "gradients": {name: plain(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        "optimizer": plain(optimizer.state_dict(), "the optimizer"),
        "scaler": plain(scaler.state_dict(), "the scaler"),
        "ema": plain(ema.ema.state_dict(), "the moving average"),
        "updates": int(ema.updates),
        "stopper": {name: plain(value) for name, value in vars(stopper).items() if _is_number(value)},
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (hasattr(value, "item") and getattr(value, "size", 0) == 1)


@contextlib.contextmanager
def or_as_stocks() -> Iterator[None]:
    """Leave the block if the state is not torch_fastdet's: the training resumes as without the switch, and one line says so."""
    try:
        yield
    except NotOurs as reason:
        warn(f"resume_exact: the training resumes as without the switch: {reason}")


def read(path: Path) -> State:
    """Return the state that belongs to the checkpoint ``path``. Raise NotOurs if there is none, or it lacks a part."""
    state = files.read(path)
    if wrong := [name for name, kind in _PARTS.items() if not isinstance(state.get(name), kind)]:
        raise NotOurs(f"it lacks {', '.join(wrong)}.")
    return state


def check(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise NotOurs where the state is not of this model and optimizer. Nothing is changed."""
    if _shapes(state["model"]) != _shapes(unwrap(model).state_dict()):
        raise NotOurs("its model has other layers.")
    if _group_sizes(state["optimizer"]) != _group_sizes(optimizer.state_dict()):
        raise NotOurs("its optimizer has other groups of parameters.")
    device = next(unwrap(model).parameters()).device
    if (device.type == "cuda") != ("cuda" in state["random"]):
        raise NotOurs(f"it was trained on another kind of device, not on {device.type}.")


def _shapes(values: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(value, "shape", None) for name, value in values.items()}


def _group_sizes(state: State) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]


def put(
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ema: Any,
    stopper: object,
) -> None:
    """Put back what :func:`take` has taken, random states last."""
    model = unwrap(model)
    device = next(model.parameters()).device
    parameters = dict(model.named_parameters())
    for name in state["channels_last"]:
        parameters[name].data = parameters[name].data.contiguous(memory_format=torch.channels_last)
    model.load_state_dict(state["model"])
    for name, parameter in parameters.items():
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(device)
    optimizer.load_state_dict(state["optimizer"])
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    ema.ema.load_state_dict(state["ema"])
    ema.updates = state["updates"]
    for name, value in state["stopper"].items():
        setattr(stopper, name, value)
    set_random_states(state["random"], device)


# The table of results -------------------------------------------------------------------------------------------------


def table(path: Path) -> tuple[int, str]:
    """Return length and checksum of results.csv."""
    data = path.read_bytes() if path.exists() else b""
    return len(data), hashlib.sha256(data).hexdigest()


def cut_table(path: Path, length: int, checksum: str) -> None:
    """Drop the rows of epochs that a killed training finished and did not save: they are trained again."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) > length and hashlib.sha256(data[:length]).hexdigest() == checksum:
        with open(path, "r+b") as file:
            file.truncate(length)
