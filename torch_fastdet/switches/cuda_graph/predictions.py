"""Makes the graphs of models that predict, for the switch ``cuda_graph`` of both frameworks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_fastdet._say import saying_once, warn
from torch_fastdet._torch.private import inside_compiled, is_compiled_in_place
from torch_fastdet.graphs import InferenceGraphs
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.captured import CapturedPasses
from torch_fastdet.patching.import_hook import top_level
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.rewrites.rewrite import adds_freely
from torch_fastdet.switches.channels_last.layout import is_faster_in_nhwc, precision, to_channels_last
from torch_fastdet.switches.cuda_graph.common import head_of

# Heads of Ultralytics keep these for the shape of their last input, and recompute them for another.
_CACHES = {"shape", "shapes", "anchors", "strides", "valid_mask"}


class PredictionGraphs:
    """Run models in eval mode as :class:`InferenceGraphs`, which live beside them and as long as they do.

    Args:
        switch: the switch, for lines.
        beside: as for :class:`InferenceGraphs`.
        may_move: returns whether models may be put into NHWC memory.
    """

    def __init__(
        self,
        switch: str,
        beside: Callable[[], CapturedPasses | None] = lambda: None,
        may_move: Callable[[], bool] = lambda: True,
    ) -> None:
        self._beside, self._may_move = beside, may_move
        #: Models that keep their memory format.
        self.stay: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.tell, self._say = saying_once(switch, warn), saying_once(switch)
        self._graphs: weakref.WeakKeyDictionary[nn.Module, InferenceGraphs] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, model: object, x: Stock, forward: Callable[[Tensor], object]) -> object:
        """Return ``forward(x)``, which runs ``model``."""
        if not isinstance(model, nn.Module) or not isinstance(x, Tensor):
            return forward(x)
        if not _capture.on_gpu(x):
            self.tell(f"predictions on {x.device} run without graphs")
            return forward(x)
        if is_compiled_in_place(model) or inside_compiled(model) is not None:
            self.tell("predictions of a model that torch.compile has compiled run without torch_fastdet's graphs")
            return forward(x)
        with self._lock:
            graphs = self._graphs.get(model)
            if graphs is None:
                graphs = self._graphs[model] = self._new(model)
        return graphs(x, forward)

    def _new(self, model: nn.Module) -> InferenceGraphs:
        if self._may_move() and model not in self.stay and _is_faster_in_nhwc(model):
            with torch.inference_mode(False):  # so that the weights can be trained
                to_channels_last(model)
        # The values of a WeakKeyDictionary must not refer to its keys or owner, so that memory is freed without the cycle collector.
        alive: Function = weakref.ref(model)
        return InferenceGraphs(
            model, settings=_settings_of, capturing=lambda: fewer_copies(alive()), beside=self._beside, say=self._say
        )


def _is_faster_in_nhwc(model: nn.Module) -> bool:
    """Return whether NHWC is faster here in the precision of a model of Ultralytics whose graphs round in other places anyway.

    These are those of ``bn_act_optim`` without modules of a user, which may ask for views that NHWC has not, and RT-DETR's in half precision.
    """
    kind = next((type(part) for part in head_of(model)), None)
    if kind is None or kind.__module__ != "ultralytics.nn.modules.head":
        return False
    weight = next(model.parameters())
    half = weight.dtype in (torch.float16, torch.bfloat16)
    packages = {top_level(type(part).__module__) for part in model.modules()}
    rounds = (half and kind.__name__ == "RTDETRDecoder") or (
        packages <= {"torch", "ultralytics"} and adds_freely(model)
    )
    dtype = str(weight.dtype).removeprefix("torch.")
    computes_in = precision(weight.device) if dtype == "float32" else dtype
    return rounds and is_faster_in_nhwc(computes_in, weight.device)


def _settings_of(model: nn.Module) -> list[object]:
    """Return the attributes of a model and of its head, beside tensors and layers: a predictor sets max_det, for instance."""
    parts = [model, *head_of(model)]
    return [value for part in parts for name, value in vars(part).items() if name not in _CACHES]
