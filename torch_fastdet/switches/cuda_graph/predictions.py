"""The graphs of models that predict, for the switch ``cuda_graph`` of both hosts."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from torch_fastdet._say import saying_once
from torch_fastdet._torch.private import inside_compiled, is_compiled_in_place
from torch_fastdet.graphs import InferenceGraphs
from torch_fastdet.graphs import capture as _capture


class PredictionGraphs:
    """Runs models in eval mode as :class:`InferenceGraphs`, which live beside them and as long as they do.

    Args:
        switch: its name, for what is printed.
        settings: what the host's models read beside tensors and layers.
        capturing: a context of a model to be in while it is captured.
    """

    def __init__(
        self,
        switch: str,
        settings: Callable[[nn.Module], Iterable[object]],
        capturing: Callable[[nn.Module], AbstractContextManager],
    ) -> None:
        self.tell, self._say = saying_once(switch, logging.WARNING), saying_once(switch)
        self._settings, self._capturing = settings, capturing
        self._graphs: weakref.WeakKeyDictionary[nn.Module, InferenceGraphs] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, model: object, x: Any, forward: Callable[[Tensor], object]) -> object:
        """``forward(x)``, which runs ``model``."""
        if not isinstance(model, nn.Module) or not isinstance(x, Tensor):
            return forward(x)
        if not _capture.on_gpu(x):
            self.tell(f"predictions on {x.device} run without graphs")
            return forward(x)
        if is_compiled_in_place(model) or inside_compiled(model) is not None:
            self.tell("predictions of a model that torch.compile has compiled run without graphs of ours")
            return forward(x)
        with self._lock:
            graphs = self._graphs.get(model)
            if graphs is None:
                graphs = self._graphs[model] = self._new(model)
        return graphs(x, forward)

    def _new(self, model: nn.Module) -> InferenceGraphs:
        # The values of a WeakKeyDictionary must not hold its keys, nor its owner: memory goes back without the cycle collector.
        alive: Any = weakref.ref(model)
        capturing = self._capturing
        return InferenceGraphs(model, settings=self._settings, capturing=lambda: capturing(alive()), say=self._say)


def without_captures(stock: Callable[..., float]) -> Callable[..., float]:
    """A method that measures time by waiting for the whole GPU, which no thread may do while another one captures."""

    @functools.wraps(stock)
    def time(timer: object) -> float:
        with _capture.no_capture():
            return stock(timer)

    return time


def settings_of(model: object, caches: Collection[str] = ()) -> list[object]:
    """The attributes of a host's model and of its head, beside tensors and layers: a predictor sets max_det, for instance.

    Args:
        model: the host's.
        caches: attributes that the head computes from the shape of its input.
    """
    layers = getattr(model, "model", None)
    parts = (model, layers[-1]) if isinstance(layers, nn.Sequential) and len(layers) else (model,)
    return [value for part in parts for name, value in vars(part).items() if name not in caches]
