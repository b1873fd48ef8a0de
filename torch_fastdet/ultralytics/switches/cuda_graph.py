"""``cuda_graph``: passes of the model are replayed as CUDA graphs, one for each shape of images.

The trainer computes predictions and loss in one call, ``model(batch)``. Replaced is ``DetectionModel.predict``, which that call
comes to; the loss stays outside of the graphs, whichever it is. Predictors and validators run the model by way of
``PyTorchBackend.forward``, which is replaced too. Graphs live beside the model, not in it: copies of it, such as
the moving average, are plain, and checkpoints hold nothing of ours.
"""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torch_fastdet._say import say
from torch_fastdet.graphs import CaptureError, ModuleGraphs, _capture
from torch_fastdet.graphs._refusal import is_out_of_memory
from torch_fastdet.graphs.distributed import GradientAverage
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import class_of
from torch_fastdet.hosts.shared.ddp import GraphedDDP, group_size
from torch_fastdet.hosts.shared.predictions import PredictionGraphs, settings_of, without_captures
from torch_fastdet.ultralytics.necks import fewer_copies
from torch_fastdet.ultralytics.training_switch import TrainingSwitch

BACKEND, TIMER = "ultralytics.nn.backends.pytorch", "ultralytics.utils.ops"
# What heads keep for the shape of their last input, and compute again for another.
CACHES = {"shape", "shapes", "anchors", "strides", "valid_mask"}


class CudaGraph(TrainingSwitch):
    name = "cuda_graph"
    help = "train, predict and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU"
    modules = (*TrainingSwitch.modules, "nn.backends.pytorch", "utils.ops")

    def visit(self, module: ModuleType) -> None:
        super().visit(module)
        name = namespace(module).get("__name__")
        if name == BACKEND:
            backend = class_of(module, "PyTorchBackend")
            if backend is not None and not self.has_replaced(backend):
                self._patch_backend(backend)
        elif name == TIMER:
            timer = class_of(module, "Profile")
            if timer is not None and not self.has_replaced(timer) and self.takes("Profile.time", timer.time, ("self",)):
                self.replace(timer, "time", without_captures(timer.time), quietly=True)

    def _patch_backend(self, backend_class: Any) -> None:
        stock = backend_class.forward
        graphs = PredictionGraphs(self.name, functools.partial(settings_of, caches=CACHES), fewer_copies)

        @functools.wraps(stock, assigned=(), updated=())
        def forward(backend: Any, im: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not getattr(backend, "base_model", False):
                return stock(backend, im, *args, **kwargs)
            # augment=, embed= and what predict() hands on to the model
            if any(value is not None and value is not False for value in (*args, *kwargs.values())):
                graphs.tell("augment=, embed= and other arguments of the model: such predictions run without graphs")
                return stock(backend, im, *args, **kwargs)
            return graphs(backend.model, im, functools.partial(stock, backend))

        forward.__qualname__ = "cuda_graph.forward"
        self.replace(backend_class, "forward", forward)

    def objection(self, trainer: Any) -> str | None:
        if trainer.args.compile:
            return (
                f"compile={trainer.args.compile} is given too, which makes graphs of its own; leave one of the two out."
            )
        return super().objection(trainer)

    @functools.cached_property
    def ddp(self) -> GraphedDDP:
        return GraphedDDP(self)

    def patch_model(self, model_class: Any) -> None:
        stock = model_class.predict
        if not self.takes("DetectionModel.predict", stock, ("self", "x", "profile", "augment", "embed")):
            return
        graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()
        ddp = self.ddp

        @functools.wraps(stock, assigned=(), updated=())  # its signature, which the next switch looks at
        def predict(model: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or args or kwargs or not _trains(model, x):
                return stock(model, x, *args, **kwargs)
            average = ddp.average(model)
            if average is None and (group_size() > 1 or ddp.wraps(model)):
                if not ddp.wraps(model):
                    self.cannot_apply("several processes train the model, but not by DistributedDataParallel.")
                return stock(model, x)
            if model not in graphs or graphs[model].average is not average:
                graphs[model] = graphs_of(model, average)
            try:
                return graphs[model](x)
            except CaptureError as error:
                if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                    del graphs[model]  # the trainer goes on with a smaller batch, and so do new graphs
                    raise error.__cause__ from None
                # The other ranks may go on in graphs: what is exchanged is the same.
                graphs[model].required = False
                self.cannot_apply(f"{error}.", this_rank=True)
                return stock(model, x)

        def graphs_of(model: nn.Module, average: GradientAverage | None) -> ModuleGraphs:
            alive: Any = weakref.ref(model)  # the values of a WeakKeyDictionary must not hold its keys
            return ModuleGraphs(
                model,
                forward=lambda x: stock(alive(), x),
                capturing=lambda: fewer_copies(alive()),
                required=True,
                say=lambda line: say(f"cuda_graph: {line}"),
                average=average,
            )

        predict.__qualname__ = "cuda_graph.predict"
        self.replace(model_class, "predict", predict)
        ddp.take(model_class)


def _trains(model: nn.Module, x: Any) -> bool:
    """Whether this is a forward pass of the trainer, and not a dry run or a measurement of the batch size."""
    if not (model.training and torch.is_grad_enabled() and getattr(model, "criterion", None) is not None):
        return False
    return isinstance(x, torch.Tensor) and not x.requires_grad and _capture.on_gpu(x)
