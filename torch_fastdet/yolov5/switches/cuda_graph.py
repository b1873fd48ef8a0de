"""``cuda_graph``: forward and backward of a model in training are replayed as CUDA graphs."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fastdet._say import say
from torch_fastdet.graphs import CaptureError, ModuleGraphs
from torch_fastdet.yolov5.heads import STOCK_MODULES, class_of, head_views
from torch_fastdet.yolov5.switch import Switch

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches


class CudaGraph(Switch):
    name = "cuda_graph"
    help = "train with forward and backward as CUDA graphs, one for each image size; needs a GPU"
    modules = ("models.yolo",)
    needs_gpu = True

    def visit(self, module: ModuleType, patches: Patches) -> None:
        if module.__name__ not in STOCK_MODULES:
            return
        model_class = class_of(module, "DetectionModel")
        if model_class is None:
            patches.cannot_apply(self, f"{module.__name__} has no DetectionModel.")
            return
        if any(known.switch == self.name and known.owner is model_class for known in patches.replacements):
            return
        stock = model_class.forward
        graphs: weakref.WeakKeyDictionary[nn.Module, ModuleGraphs] = weakref.WeakKeyDictionary()

        def forward(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or not model.training or not torch.is_grad_enabled():
                return stock(model, x, *args, **kwargs)
            if not x.is_cuda:
                if hasattr(model, "hyp"):  # YOLOv5 sets it before it trains; a dry run on the CPU comes before that
                    patches.cannot_apply(self, "the model trains on the CPU, not on a GPU.")
                return stock(model, x)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                patches.cannot_apply(self, "training on several GPUs (DistributedDataParallel) is not supported yet.")
                return stock(model, x)
            if getattr(model, "_is_replica", False):
                patches.cannot_apply(self, "DataParallel is not supported.")
                return stock(model, x)
            if model not in graphs:
                graphs[model] = graphs_of(model)
            try:
                return graphs[model](x)
            except CaptureError as error:
                graphs[model].required = False
                patches.cannot_apply(self, f"{error}.")
                return stock(model, x)

        def graphs_of(model: nn.Module) -> ModuleGraphs:
            # The values of a WeakKeyDictionary must not hold its keys.
            alive: Any = weakref.ref(model)
            return ModuleGraphs(
                model,
                forward=lambda x: stock(alive(), x),
                capturing=lambda: head_views(alive()),
                required=True,
                say=lambda line: say(f"cuda_graph: {line}"),
            )

        forward.__qualname__ = "cuda_graph.forward"
        patches.replace(model_class, "forward", forward)
