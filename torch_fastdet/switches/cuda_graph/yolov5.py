"""Holds what ``cuda_graph`` puts in the place of YOLOv5's methods."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import around
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.cuda_graph.common import InThread, TrainingGraphs
from torch_fastdet.switches.cuda_graph.predictions import PredictionGraphs


def trains(active: Active, model: nn.Module, x: torch.Tensor) -> bool:
    """Return whether this is a pass of a training script on a GPU. One on the CPU is YOLOv5's dry run, or an error."""
    if not model.training or not torch.is_grad_enabled():
        return False
    # Before training YOLOv5 sets the first of these, or the second on a classifier. A dry run precedes that.
    begun = hasattr(model, "hyp") or hasattr(model, "transforms")
    if not _capture.on_gpu(x) and begun:
        active.cannot_apply("the model trains on the CPU, not on a GPU.")
    return _capture.on_gpu(x)


@around
def backend_forward(active: Active, stock: Function, backend: object, *args: object, **kwargs: object) -> object:
    """Let the model's forward take its graphs while ``DetectMultiBackend.forward`` runs it."""
    model = getattr(backend, "model", None) if getattr(backend, "pt", False) else None
    with own_attributes([(active.shared(InThread), "model", model)]):
        return stock(backend, *args, **kwargs)


def model_forward(active: Active, stock: Function, model_class: Stock) -> Function:
    """Return the ``forward`` of a model's class by graphs, in training and where a backend predicts."""
    here = active.shared(InThread)
    graphs = active.shared(TrainingGraphs)
    answers = PredictionGraphs(active.name, lambda: graphs.last())

    def forward(model: nn.Module, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        if here.model is model and not model.training:
            if any((*args, *kwargs.values())):
                answers.tell("predictions with augment= or visualize= run without graphs")
                return stock(model, x, *args, **kwargs)
            return answers(model, x, lambda x: stock(model, x))
        if args or kwargs or not (x.requires_grad or trains(active, model, x)):
            run = partial(stock, model, x, *args, **kwargs)
            return run() if model.training else graphs.make_room(run, x.device)
        return graphs(model, x, stock)

    forward.__qualname__ = "cuda_graph.forward"
    graphs.ddp.take(model_class)
    return forward
