"""``nms_optim``: decoding and non-maximum suppression in val.py, detect.py, their segment twins and train.py's validation.

``non_max_suppression`` is replaced in every module that holds it. Raw heads in float32 (or float64) are decoded by one
kernel; half heads stay with stock's ``Detect.forward``, whose roundings on the way move boxes by up to half a pixel:
validation in half precision would not print the same numbers. Where gradients are needed of a model in eval mode, stock's
``Detect.forward`` runs too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_fastdet import ops
from torch_fastdet._say import say
from torch_fastdet._torch.private import writes
from torch_fastdet.hosts.engine.import_hook import namespace, top_level
from torch_fastdet.hosts.engine.replace import describe, is_code_of
from torch_fastdet.hosts.engine.switch import Name, Switch, class_of
from torch_fastdet.yolov5.dropins import non_max_suppression
from torch_fastdet.yolov5.trials import decoding_differs, nms_differs

DETECT_MODULES = ("models.yolo", "yolov5.models.yolo")


def _decoding(stock: Callable) -> Callable:
    """``Detect.forward`` that decodes by ops.yolov5_decode where stock decodes in single or double precision."""
    # Reading the strides from the GPU is a synchronisation: once for each head, and again when they change.
    strides: WeakKeyDictionary[torch.nn.Module, tuple[torch.Tensor, int | None, list[float]]] = WeakKeyDictionary()

    def stride_list(head: Any) -> list[float]:
        stride = head.stride
        version = writes(stride)
        known = strides.get(head)
        if known is None or known[0] is not stride or known[1] != version:
            known = strides[head] = (stride, version, stride.tolist())
        return known[2]

    @functools.wraps(stock)
    def forward(self: Any, x: list[torch.Tensor]) -> Any:
        exporting = self.export or torch.jit.is_tracing() or torch.compiler.is_compiling()
        narrow = x[0].dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(x[0].device.type)
        # Who asks for gradients in eval mode gets stock's, in every bit.
        trained = torch.is_grad_enabled() and (
            any(feature.requires_grad for feature in x) or any(p.requires_grad for p in self.parameters())
        )
        if self.training or exporting or narrow or trained or not isinstance(self.stride, torch.Tensor):
            return stock(self, x)
        for level in range(self.nl):
            head = self.m[level](x[level])
            images, _, rows, columns = head.shape
            # As stock's: the loss of a validation reads these.
            x[level] = head.view(images, self.na, self.no, rows, columns).permute(0, 1, 3, 4, 2).contiguous()
        return ops.yolov5_decode(x, self.anchors, stride_list(self), self.no - 5 - self.nc), x

    return forward


class _OfInstances:
    """A method that is ours on instances and stock's on the class.

    ``Segment.__init__`` keeps ``Detect.forward`` in the instance, and pickle looks for that very object under its name: it is
    stock's before, during and after the patch.
    """

    def __init__(self, stock: Callable, ours: Callable) -> None:
        self._stock, self._ours = stock, ours
        self.__module__, self.__qualname__ = stock.__module__, stock.__qualname__  # in the line that patch() says

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A partial, for torch.compile cannot make a bound method here.
        return self._stock if instance is None else functools.partial(self._ours, instance)


def _segmenting(stock: Callable, stock_detect: Callable, detect: Callable) -> Callable:
    """``Segment.forward`` that calls our ``detect`` where it would call stock's, which its instances keep."""

    @functools.wraps(stock)
    def forward(self: Any, x: list[torch.Tensor]) -> Any:
        if self.training or self.export or getattr(self, "detect", None) is not stock_detect:
            return stock(self, x)
        prototypes = self.proto(x[0])
        decoded, raw = detect(self, x)
        return decoded, prototypes, raw

    return forward


class NmsOptim(Switch):
    name = "nms_optim"
    help = (
        "decode and non-maximum suppression without host syncs or a time limit, in val, detect, segment and validation"
    )
    modules = ("utils.general", "models.yolo", "models.common")
    names = (Name("non_max_suppression", non_max_suppression, ("utils.general", "yolov5.utils.general")),)

    def refusal(self, name: Name, stock: Any) -> str | None:
        return super().refusal(name, stock) or nms_differs(stock)

    def visit(self, module: ModuleType) -> None:
        detect = class_of(module, "Detect") if namespace(module).get("__name__") in DETECT_MODULES else None
        if detect is not None and not self.has_replaced(detect) and self._decodes_as_ours(detect):
            what = " (float32 heads decoded by torch_fastdet.ops.yolov5_decode)"
            stock, ours = detect.forward, _decoding(detect.forward)
            package = top_level(detect.__module__)
            self.replace_stock(detect, "forward", _OfInstances(stock, ours), package, what)
            segment = class_of(module, "Segment")
            if segment is not None and self.has_replaced(detect):
                self.replace(segment, "forward", _segmenting(segment.forward, stock, ours), what)

    def _decodes_as_ours(self, detect: Any) -> bool:
        """Says once if not. Suppression goes on without it."""
        found = decoding_differs(detect) if is_code_of(detect.forward, top_level(detect.__module__)) else None
        if found is not None and found not in self._told:
            self._told.add(found)
            say(f"{self.name}: {describe(detect)}.forward stays: {found}")
        return found is None
