"""Replaces a model's pass in training, and a method that waits for the GPU, for both frameworks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn

from torch_fastdet._say import count, say
from torch_fastdet._torch.private import group_size, is_replica
from torch_fastdet.graphs import CaptureError, ModuleGraphs, no_capture
from torch_fastdet.graphs.ranks import GradientAverage
from torch_fastdet.memory import with_room
from torch_fastdet.nn import forwards
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import around
from torch_fastdet.patching.switch import Active, Target
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.switches.cuda_graph.ddp import GraphedDDP
from torch_fastdet.switches.frameworks import SELF

# Denoising queries are drawn before a graph of RT-DETR runs.
_DRAWN = {"label_noise_ratio", "box_noise_scale"}
_PLAIN = (bool, int, float, str)


def head_of(model: nn.Module) -> list[nn.Module]:
    """Return the last layer of a framework's model, and the decoder in RT-DETR's; nothing of another module."""
    layers = getattr(model, "model", None)
    if not isinstance(layers, nn.Sequential) or not len(layers):
        return []
    decoder = getattr(layers[-1], "decoder", None)
    return [layers[-1], decoder] if isinstance(decoder, nn.Module) else [layers[-1]]


def options_of_head(model: nn.Module) -> list[dict[str, object]]:
    """Return the numbers, flags and texts of a model's head: a user may change num_queries of RT-DETR, for instance."""
    known = [vars(part).items() for part in head_of(model)]
    return [{name: value for name, value in part if isinstance(value, _PLAIN) and name not in _DRAWN} for part in known]


class TrainingGraphs:
    """Run training passes of models as CUDA graphs, which live beside the models and as long as they do.

    A failure leaves the model on the framework's own code, and one line says why. Where there is no memory for a capture, this holds for
    that shape only: the trainer may go on with a smaller batch. While the switch is on, all training passes that do not run in graphs
    run the original forward methods of the model's blocks: those of ``bn_act_optim`` keep the host longer.
    """

    def __init__(self, switch: Active) -> None:
        self.ddp = GraphedDDP(switch)
        self._switch = switch
        switch.replace(forwards, "fuses", forwards.is_captured, quietly=True)
        self._graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()
        self._options: weakref.WeakKeyDictionary[nn.Module, list[dict[str, object]]] = weakref.WeakKeyDictionary()
        #: Returns the graphs of the last training pass, if they still exist.
        self.last: Callable[[], ModuleGraphs | None] = lambda: None

    def __call__(self, model: nn.Module, x: torch.Tensor, stock: Function, *others: torch.Tensor) -> Stock:
        """Return ``stock(model, x, *others)``, by a replay where that can be."""
        if x.requires_grad:  # a measurement of how much memory a batch needs
            with forwards.captured():
                return stock(model, x, *others)
        average = self.ddp.average(model)
        if average is None and (group_size() > 1 or self.ddp.wraps(model)):
            if not self.ddp.wraps(model):
                self._switch.cannot_apply("several processes train the model, but not by DistributedDataParallel.")
            return stock(model, x, *others)
        if is_replica(model):
            self._switch.cannot_apply("DataParallel is not supported.")
            return stock(model, x, *others)
        graphs = self._graphs.get(model)
        if graphs is None or graphs.average is not average:
            graphs = self._graphs[model] = self._new(model, average, stock)
        self.last = weakref.ref(graphs)
        options = options_of_head(model)
        if self._options.setdefault(model, options) != options and graphs.running() is None:
            self._options[model] = options
            graphs.reset()
        try:
            output = graphs(x, *others)
        except CaptureError as error:
            # The other ranks may keep their graphs, because the exchange is the same.
            graphs.required = False
            self._switch.cannot_apply(f"{error}.", this_rank=True)
            return stock(model, x, *others)
        count(self._switch.name, "training passes" if graphs.reason is None else "training passes without graphs")
        return output

    def make_room(self, run: Callable[[], Stock], device: torch.device) -> Stock:
        """Return ``run()``, which may run more than once. If it runs out of memory that graphs of training hold, they are dropped."""
        if self.last() is None:
            return run()
        return with_room(run, device, lambda line: say(f"{self._switch.name}: {line}"))

    def failed(self, model: nn.Module) -> bool:
        graphs = self._graphs.get(model)
        return graphs is not None and graphs.reason is not None

    def _new(self, model: nn.Module, average: GradientAverage | None, stock: Function) -> ModuleGraphs:
        alive: Function = weakref.ref(model)  # the values of a WeakKeyDictionary must not hold its keys
        name = self._switch.name
        return ModuleGraphs(
            model,
            forward=lambda *inputs: stock(alive(), *inputs),
            capturing=lambda: fewer_copies(alive()),
            required=True,
            say=lambda line: say(f"{name}: {line}"),
            average=average,
        )


class InThread(threading.local):
    """Hold the model that a backend runs, or a trainer validates, in this thread now."""

    model: object = None

    def __init__(self, _: Active) -> None:
        """Make what each thread holds."""


@around
def _time(_: object, stock: Function, timer: object) -> float:
    """Wait for the whole GPU, as the original does: no thread may do so while another one captures."""
    with no_capture():
        return stock(timer)


def timer(where: tuple[str, ...]) -> Target:
    """Return the framework's ``Profile.time``."""
    return Target(where, "Profile.time", make=_time, evidence=(SELF,), otherwise="nothing", quiet=True)
