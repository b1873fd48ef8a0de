"""Replaces ``Detect.forward`` and ``Segment.forward`` of YOLOv5 by methods that decode boxes with one kernel.

Half heads stay with the original, whose roundings move boxes by up to half a pixel, and so do models in eval mode with gradients.
"""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch

from torch_fastdet import ops
from torch_fastdet._torch.private import writes
from torch_fastdet.patching.protocols import AnchorHead, Function, Head
from torch_fastdet.patching.switch import Active
from torch_fastdet.rewrites.heads import raw_heads


def decoding(stock: Function) -> Function:
    """Return ``Detect.forward`` that decodes by ops.yolov5_decode where the original decodes in single or double precision."""
    # Reading the strides from the GPU synchronizes, so they are read once for each head, and again when they change.
    strides: WeakKeyDictionary[AnchorHead, tuple[torch.Tensor, int | None, list[float]]] = WeakKeyDictionary()

    def stride_list(head: AnchorHead) -> list[float]:
        stride = head.stride
        version = writes(stride)
        known = strides.get(head)
        if known is None or known[0] is not stride or known[1] != version:
            known = strides[head] = (stride, version, stride.tolist())
        return known[2]

    @functools.wraps(stock)
    def forward(self: AnchorHead, x: list[torch.Tensor]) -> object:
        exporting = self.export or torch.jit.is_tracing() or torch.compiler.is_compiling()
        narrow = x[0].dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(x[0].device.type)
        # Gradients in eval mode have the original's bits.
        trained = torch.is_grad_enabled() and (
            any(feature.requires_grad for feature in x) or any(p.requires_grad for p in self.parameters())
        )
        if self.training or exporting or narrow or trained or not isinstance(self.stride, torch.Tensor):
            return stock(self, x)
        x[:] = [head.contiguous() for head in raw_heads(self, x)]  # the loss of a validation reads them
        return ops.yolov5_decode(x, self.anchors, stride_list(self), self.no - 5 - self.nc), x

    return forward


class OfInstances:
    """Act as torch_fastdet's method on instances and as the original on the class, where pickle looks for what ``Segment.__init__`` keeps."""

    def __init__(self, stock: Function) -> None:
        self.stock, self.ours = stock, decoding(stock)
        self.__module__, self.__qualname__ = stock.__module__, stock.__qualname__  # in the line that patch() prints

    def __get__(self, instance: object, owner: type | None = None) -> object:
        # torch.compile cannot create a bound method here, but it can create a partial.
        return self.stock if instance is None else functools.partial(self.ours, instance)


def segmenting(active: Active, stock: Function, segment: type) -> Function:
    """Return ``Segment.forward`` that calls torch_fastdet's decoding where it would call the original ``Detect.forward``, which its instances keep."""
    detect = next(new for base in segment.__mro__ if (new := active.replacement(base, "forward")) is not None)

    @functools.wraps(stock)
    def forward(self: Head, x: list[torch.Tensor]) -> object:
        if self.training or self.export or getattr(self, "detect", None) is not detect.stock:
            return stock(self, x)
        prototypes = self.proto(x[0])
        decoded, raw = detect.ours(self, x)
        return decoded, prototypes, raw

    return forward
