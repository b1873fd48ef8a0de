"""What takes the place of a model's pass in training: in another memory layout, and as CUDA graphs, for both hosts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from torch_fastdet._say import count, say
from torch_fastdet._torch.private import is_replica
from torch_fastdet.graphs import CaptureError, ModuleGraphs
from torch_fastdet.graphs.ranks import GradientAverage, group_size
from torch_fastdet.patching.evidence import Evidence
from torch_fastdet.patching.replace import in_place_of
from torch_fastdet.patching.switch import Active, Make, Target
from torch_fastdet.switches.channels_last.common import plain_copy, plain_fuse
from torch_fastdet.switches.channels_last.layout import LayoutChoice
from torch_fastdet.switches.cuda_graph.ddp import GraphedDDP
from torch_fastdet.switches.cuda_graph.predictions import without_captures

#: Whether ``model(x)`` with these further arguments is a pass of the training, and not a dry run or a measurement.
Trains = Callable[[Active, nn.Module, Any, tuple[Any, ...], dict[str, Any]], bool]


def in_layout(method: str, trains: Trains, unless: Callable[[], bool]) -> Make:
    """Makes the host's ``method`` of a model, whose training passes run in the layout that is faster."""

    def make(active: Active, stock: Callable[..., object], _: object) -> object:
        if unless():
            return None
        choice = LayoutChoice(active.name)

        @in_place_of(stock, f"channels_last.{method}")
        def run(model: nn.Module, x: Any, *args: object, **kwargs: object) -> object:
            if trains(active, model, x, args, kwargs):
                x = choice.place(model, x, stock)
            return stock(model, x, *args, **kwargs)

        return run

    return make


def layout_targets(
    where: tuple[str, ...],
    method: str,
    trains: Trains,
    evidence: tuple[Evidence, ...] = (),
    unless: Callable[[], bool] = lambda: False,
    model: str = "DetectionModel",
    missing: Literal["nothing", "refuse"] = "refuse",
) -> tuple[Target, ...]:
    """What ``channels_last`` replaces in the class ``model`` of the modules ``where``, unless the host does it itself."""
    name = f"{model}.{method}"
    return (
        Target(where, name, make=in_layout(method, trains, unless), evidence=evidence, missing=missing),
        Target(where, f"{model}.__deepcopy__", make=lambda *_: plain_copy, adds=True, after=name),
        Target(where, f"{model}.fuse", make=lambda _, stock, __: plain_fuse(stock), after=name, quiet=True),
    )


class TrainingGraphs:
    """Runs training passes of models as CUDA graphs, which live beside the models and as long as they do.

    A failure leaves the model on the host's own code, and one line says why. Where there is no memory for a capture, this holds for
    that shape only: the host's trainer may go on with a smaller batch.

    Args:
        switch: the switch.
        fewer_copies: a context of a model to be in while it is captured.
    """

    def __init__(self, switch: Active, fewer_copies: Callable[[nn.Module], AbstractContextManager]) -> None:
        self.ddp = GraphedDDP(switch)
        self._switch, self._fewer_copies = switch, fewer_copies
        self._graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()

    def __call__(self, model: nn.Module, x: torch.Tensor, stock: Callable[[nn.Module, torch.Tensor], object]) -> object:
        """``stock(model, x)``, by a replay where that can be."""
        average = self.ddp.average(model)
        if average is None and (group_size() > 1 or self.ddp.wraps(model)):
            if not self.ddp.wraps(model):
                self._switch.cannot_apply("several processes train the model, but not by DistributedDataParallel.")
            return stock(model, x)
        if is_replica(model):
            self._switch.cannot_apply("DataParallel is not supported.")
            return stock(model, x)
        graphs = self._graphs.get(model)
        if graphs is None or graphs.average is not average:
            graphs = self._graphs[model] = self._new(model, average, stock)
        try:
            output = graphs(x)
        except CaptureError as error:
            # The other ranks may go on in graphs: what is exchanged is the same.
            graphs.required = False
            self._switch.cannot_apply(f"{error}.", this_rank=True)
            return stock(model, x)
        count(self._switch.name, "training passes" if graphs.reason is None else "training passes without graphs")
        return output

    def _new(self, model: nn.Module, average: GradientAverage | None, stock: Callable[..., object]) -> ModuleGraphs:
        alive: Any = weakref.ref(model)  # the values of a WeakKeyDictionary must not hold its keys
        fewer_copies, name = self._fewer_copies, self._switch.name
        return ModuleGraphs(
            model,
            forward=lambda x: stock(alive(), x),
            capturing=lambda: fewer_copies(alive()),
            required=True,
            say=lambda line: say(f"{name}: {line}"),
            average=average,
        )


def timer(where: tuple[str, ...], evidence: tuple[Evidence, ...]) -> Target:
    """The host's ``Profile.time``, which waits for the whole GPU."""
    return Target(
        where, "Profile.time", make=lambda _, stock, __: without_captures(stock), evidence=evidence, quiet=True
    )
