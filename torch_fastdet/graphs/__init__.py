"""Runs training and inference as CUDA graphs: the host launches one graph instead of thousands of kernels.

:class:`GraphedModule` replays a module's forward and backward pass and leaves the loop around it as it is; :class:`TrainStep` replays a
whole step; :class:`InferenceGraphs` replays the forward pass in eval mode. docs/training_loop.md shows how.
"""

from torch_fastdet.graphs.capture import capture_into, no_capture
from torch_fastdet.graphs.inference import InferenceGraphs
from torch_fastdet.graphs.loss import GraphLoss
from torch_fastdet.graphs.module import GraphedModule, ModuleGraphs
from torch_fastdet.graphs.refusal import CaptureError, why_not
from torch_fastdet.graphs.step import TrainStep

__all__ = [
    "CaptureError",
    "GraphLoss",
    "GraphedModule",
    "InferenceGraphs",
    "ModuleGraphs",
    "TrainStep",
    "capture_into",
    "no_capture",
    "why_not",
]
