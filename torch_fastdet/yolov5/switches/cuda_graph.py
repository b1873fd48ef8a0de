"""``cuda_graph``: forward and backward of a model in training, and its forward pass in detect.py and val.py, are replayed as CUDA
graphs."""

from __future__ import annotations

import functools
import threading
import weakref
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torch_fastdet._say import say
from torch_fastdet._torch.private import is_replica
from torch_fastdet.graphs import CaptureError, ModuleGraphs, _capture
from torch_fastdet.graphs.distributed import GradientAverage
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import class_of
from torch_fastdet.hosts.shared.ddp import GraphedDDP, group_size
from torch_fastdet.hosts.shared.predictions import PredictionGraphs, settings_of, without_captures
from torch_fastdet.yolov5.heads import fewer_copies
from torch_fastdet.yolov5.training_switch import TrainingSwitch

BACKENDS, TIMERS = ("models.common", "yolov5.models.common"), ("utils.general", "yolov5.utils.general")


class _Predicting(threading.local):
    """The model that a DetectMultiBackend runs in this thread."""

    model: nn.Module | None = None


class CudaGraph(TrainingSwitch):
    name = "cuda_graph"
    help = "train, detect and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU"
    modules = (*TrainingSwitch.modules, "models.common", "utils.general")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.predicting = _Predicting()

    def visit(self, module: ModuleType) -> None:
        super().visit(module)
        name = namespace(module).get("__name__")
        backend = class_of(module, "DetectMultiBackend") if name in BACKENDS else None
        if backend is not None and not self.has_replaced(backend):
            self._patch_backend(backend)
        timer = class_of(module, "Profile") if name in TIMERS else None
        if timer is not None and not self.has_replaced(timer) and self.takes("Profile.time", timer.time, ("self",)):
            self.replace(timer, "time", without_captures(timer.time), quietly=True)

    def _patch_backend(self, backend_class: Any) -> None:
        """While a DetectMultiBackend runs a model, the model's forward takes its graphs."""
        stock, predicting = backend_class.forward, self.predicting

        @functools.wraps(stock, assigned=(), updated=())
        def forward(backend: Any, *args: Any, **kwargs: Any) -> Any:
            predicting.model = getattr(backend, "model", None) if getattr(backend, "pt", False) else None
            try:
                return stock(backend, *args, **kwargs)
            finally:
                predicting.model = None

        forward.__qualname__ = "cuda_graph.forward"
        self.replace(backend_class, "forward", forward)

    @functools.cached_property
    def ddp(self) -> GraphedDDP:
        return GraphedDDP(self)

    def patch_model(self, model_class: type[nn.Module]) -> None:
        stock = model_class.forward
        graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()
        ddp, predicting = self.ddp, self.predicting
        answers = PredictionGraphs(self.name, settings_of, fewer_copies)

        def forward(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if predicting.model is model and not model.training:
                if any((*args, *kwargs.values())):
                    answers.tell("augment= and visualize=: such predictions run without graphs")
                    return stock(model, x, *args, **kwargs)
                return answers(model, x, lambda x: stock(model, x))
            # An input with a gradient is autobatch's, which measures the memory of a step of stock's.
            if args or kwargs or x.requires_grad or not model.training or not torch.is_grad_enabled():
                return stock(model, x, *args, **kwargs)
            if not _capture.on_gpu(x):
                self.trains_on_cpu(model)
                return stock(model, x)
            average = ddp.average(model)
            if average is None and (group_size() > 1 or ddp.wraps(model)):
                if not ddp.wraps(model):
                    self.cannot_apply("several processes train the model, but not by DistributedDataParallel.")
                return stock(model, x)
            if is_replica(model):
                self.cannot_apply("DataParallel is not supported.")
                return stock(model, x)
            if model not in graphs or graphs[model].average is not average:
                graphs[model] = graphs_of(model, average)
            try:
                return graphs[model](x)
            except CaptureError as error:
                # The other ranks may go on in graphs: what is exchanged is the same.
                graphs[model].required = False
                self.cannot_apply(f"{error}.", this_rank=True)
                return stock(model, x)

        def graphs_of(model: nn.Module, average: GradientAverage | None) -> ModuleGraphs:
            # The values of a WeakKeyDictionary must not hold its keys.
            alive: Any = weakref.ref(model)
            return ModuleGraphs(
                model,
                forward=lambda x: stock(alive(), x),
                capturing=lambda: fewer_copies(alive()),
                required=True,
                say=lambda line: say(f"cuda_graph: {line}"),
                average=average,
            )

        forward.__qualname__ = "cuda_graph.forward"
        self.replace(model_class, "forward", forward)
        ddp.take(model_class)
