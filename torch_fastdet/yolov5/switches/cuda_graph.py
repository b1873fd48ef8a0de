"""``cuda_graph``: forward and backward of a model in training are replayed as CUDA graphs."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from torch_fastdet._say import say
from torch_fastdet.graphs import CaptureError, ModuleGraphs, _capture
from torch_fastdet.graphs.distributed import GradientAverage
from torch_fastdet.patching.ddp import GraphedDDP, group_size
from torch_fastdet.yolov5.heads import fewer_copies
from torch_fastdet.yolov5.training_switch import TrainingSwitch


class CudaGraph(TrainingSwitch):
    name = "cuda_graph"
    help = "train with forward and backward as CUDA graphs, one for each image size; needs a GPU"

    @functools.cached_property
    def ddp(self) -> GraphedDDP:
        return GraphedDDP(self)

    def patch_model(self, model_class: type[nn.Module]) -> None:
        stock = model_class.forward
        graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()
        ddp = self.ddp

        def forward(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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
            if getattr(model, "_is_replica", False):
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
