"""Holds what ``cuda_graph`` puts in the place of Ultralytics' methods.

The trainer computes predictions and loss in one call, ``model(batch)``. It calls ``predict`` of detectors and classifiers, which is replaced;
the loss stays outside of the graphs. Predictors and validators call ``PyTorchBackend.forward``, and a trainer's validations ``BaseModel.forward``,
which are replaced too. Graphs live beside the model: copies of it, such as the moving average, are plain, and checkpoints hold nothing of
torch_fastdet.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from torch_fastdet import memory
from torch_fastdet._say import saying_once
from torch_fastdet._torch import meanwhile
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.rows import RowGraphs
from torch_fastdet.patching.engine import ALL
from torch_fastdet.patching.evidence import Obstacle, Signature
from torch_fastdet.patching.protocols import Function, Stock, Trainer
from torch_fastdet.patching.replace import around, in_place_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.cuda_graph.common import InThread, TrainingGraphs
from torch_fastdet.switches.cuda_graph.predictions import PredictionGraphs
from torch_fastdet.switches.loss.ultralytics import KINDS

PREDICT = Signature(("self", "x", "profile", "augment", "embed"))
FORWARD = Signature(("self", "x", "args", "kwargs"))


def trains(model: nn.Module, x: object) -> bool:
    """Return whether this is a forward pass of the trainer on a GPU, and not a dry run."""
    if not (model.training and torch.is_grad_enabled() and getattr(model, "criterion", None) is not None):
        return False
    return isinstance(x, torch.Tensor) and _capture.on_gpu(x)


def obstacle_in_training(trainer: Trainer) -> Obstacle | None:
    """Return why the switch cannot apply to this training; None where it can."""
    if trainer.args.compile:
        return obstacle_in_compile(str(trainer.args.compile))
    device = trainer.device.type
    return None if device == "cuda" else Obstacle(f"the model trains on {device}, not on a GPU.")


@around
def setup_train(active: Active, stock: Function, trainer: Trainer) -> object:
    """Ask first for an :func:`obstacle_in_training`, in ``BaseTrainer._setup_train``."""
    if (obstacle := obstacle_in_training(trainer)) is not None:
        active.cannot_apply(obstacle)
    return stock(trainer)


def obstacle_in_compile(value: str) -> Obstacle | None:
    if value == "False":
        return None
    return Obstacle(f"compile={value} is given too, which makes graphs of its own; leave one of the two out.")


def training_graphs(active: Active) -> TrainingGraphs:
    say = saying_once(active.name)

    def new_graphs() -> RowGraphs:
        return RowGraphs("the RLE part of PoseLoss26", say, lambda line: active.tell(f"{active.name}: {line}"))

    active.replace(KINDS["PoseLoss26"], "new_graphs", staticmethod(new_graphs), quietly=True)
    return TrainingGraphs(active)


@around
def begin_again(_: object, stock: Function, trainer: Trainer) -> object:
    """Give memory back in ``BaseTrainer._build_train_pipeline``, by which the trainer also goes on with a smaller batch where it ran out."""
    memory.release(trainer.device)
    return stock(trainer)


def model_predict(active: Active, stock: Function, model_class: Stock) -> Function:
    """Return the ``predict`` of a model's class by graphs in training."""
    graphs = active.shared(training_graphs)

    @in_place_of(stock, "cuda_graph.predict")
    def predict(model: nn.Module, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        takes = getattr(x, "requires_grad", False) or trains(model, x)
        if torch.compiler.is_compiling() or args or kwargs or not takes:
            return stock(model, x, *args, **kwargs)
        return graphs(model, x, stock)

    graphs.ddp.take(model_class)
    return predict


def _evaluation_graphs(active: Active) -> PredictionGraphs:
    training = active.shared(training_graphs)
    return PredictionGraphs(active.name, lambda: training.last(), lambda: _may_move(active))


def _may_move(active: Active) -> bool:
    """Return whether the weights may move to NHWC: not if the last ``patch()`` that concerns channels_last leaves it out."""
    name, requests = "channels_last", reversed(active.patches.requests)
    return next((each.get(name, True) for each in requests if name in each or each.get(ALL, not each)), True)


@around
def validate(active: Active, stock: Function, trainer: Trainer) -> object:
    """Note that ``BaseTrainer.validate`` validates the moving average of the weights."""
    with own_attributes([(active.shared(InThread), "model", getattr(trainer.ema, "ema", None))]):
        return stock(trainer)


def model_forward(active: Active, stock: Function, _: object) -> Function:
    """Return ``BaseModel.forward``: by graphs while a trainer validates this model."""
    here, graphs = active.shared(InThread), active.shared(_evaluation_graphs)

    @in_place_of(stock, "cuda_graph.forward")
    def forward(model: object, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or here.model is not model or args or any(kwargs.values()):
            return stock(model, x, *args, **kwargs)
        found = graphs(model, x, functools.partial(stock, model))
        with torch.autocast("cuda", enabled=False):  # which is on for the model alone
            meanwhile.launched()
        return found

    return forward


def backend_init(active: Active, stock: Function, _: object) -> Function:
    """Return ``AutoBackend.__init__`` that notes a model for which ``channels_last=False`` is given."""
    graphs = active.shared(_evaluation_graphs)

    @in_place_of(stock)
    def __init__(backend: Stock, *args: object, **kwargs: object) -> None:
        stock(backend, *args, **kwargs)
        model = getattr(backend, "model", None)
        if kwargs.get("channels_last") is False and isinstance(model, nn.Module):
            graphs.stay.add(model)

    return __init__


def backend_forward(active: Active, stock: Function, _: object) -> Function:
    """Return ``PyTorchBackend.forward`` by graphs."""
    graphs = active.shared(_evaluation_graphs)

    @in_place_of(stock, "cuda_graph.forward")
    def forward(backend: Stock, im: object, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or not getattr(backend, "base_model", False):
            return stock(backend, im, *args, **kwargs)
        # These are augment=, embed= and other arguments that predict() passes to the model.
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            graphs.tell("predictions with augment=, embed= or other arguments of the model run without graphs")
            return stock(backend, im, *args, **kwargs)
        found = graphs(backend.model, im, functools.partial(stock, backend))
        meanwhile.launched()
        return found

    return forward
