"""What the ``bn_act_optim`` switches of both hosts share: the forward methods of ``Conv``, ``Bottleneck``, ``C3`` and ``SPPF``."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import Switch, class_of
from torch_fastdet.hosts.formula import Formula
from torch_fastdet.layers.bn_act import bottleneck_forward, c3_forward, conv_forward, sppf_forward


def _bottleneck(self: Any, x: Tensor) -> Tensor:
    return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


def _c3(self: Any, x: Tensor) -> Tensor:
    return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))


def _sppf(self: Any, x: Tensor) -> Tensor:
    parts = [self.cv1(x)]
    for _ in range(getattr(self, "n", 3)):
        parts.append(self.m(parts[-1]))
    y = self.cv2(torch.cat(parts, 1))
    return y + x if getattr(self, "add", False) else y


CONV = Formula(lambda self, x: self.act(self.bn(self.conv(x))), ("act", "bn", "conv"))
BOTTLENECK = Formula(_bottleneck, ("cv1", "cv2"), ("add",), ({"add": True}, {"add": False}))
C3 = Formula(_c3, ("cv1", "cv2", "cv3", "m"), ("cat", "torch"))
# YOLOv5's, and Ultralytics', which has a number of poolings and a shortcut of its own, by getattr.
SPPF = Formula(_sppf, ("cv1", "cv2", "m"), ("cat", "catch_warnings", "simplefilter", "torch", "warnings"))
SPPF_N = Formula(
    _sppf, ("cv1", "cv2", "m"), ("cat", "extend", "getattr", "range", "torch"), ({}, {"n": 2, "add": True})
)


class BnActMethods(Switch):
    """Replaces the forward methods of ``Conv``, ``Bottleneck``, ``C3`` and ``SPPF`` in the modules of the host that define them."""

    name = "bn_act_optim"
    help = "BatchNorm and activation in training as one operator, with the shortcut's sum and C3's concatenation; the stem; SPPF; needs a GPU"
    needs_gpu = True
    #: Full names of the modules that may define ``Conv``.
    conv_modules: ClassVar[tuple[str, ...]]
    #: And of those that may define ``Bottleneck``, ``C3`` and ``SPPF``.
    bottleneck_modules: ClassVar[tuple[str, ...]]

    def visit(self, module: ModuleType) -> None:
        name = namespace(module).get("__name__")
        if name in self.conv_modules:
            self._patch_conv(module)
        if name in self.bottleneck_modules:
            self._patch_bottleneck(module)
            self._patch_c3(module)
            self._patch_sppf(module)

    def _patch_conv(self, module: ModuleType) -> None:
        conv = class_of(module, "Conv")
        if conv is None or self.has_replaced(conv):
            return
        stock = vars(conv).get("forward")
        if not CONV.is_that_of(stock):
            self.cannot_apply(f"{module.__name__}.Conv.forward is not act(bn(conv(x))).")
            return
        forward = conv_forward(stock)
        forward.__qualname__ = "bn_act_optim.Conv.forward"
        self.replace(conv, "forward", forward)

    def _patch_bottleneck(self, module: ModuleType) -> None:
        bottleneck, conv = class_of(module, "Bottleneck"), namespace(module).get("Conv")
        if bottleneck is None or self.has_replaced(bottleneck) or not self.has_replaced(conv):
            return
        stock = vars(bottleneck).get("forward")
        if not BOTTLENECK.is_that_of(stock):
            return  # only the sum stays stock's
        forward = bottleneck_forward(stock, vars(conv)["forward"])
        forward.__qualname__ = "bn_act_optim.Bottleneck.forward"
        self.replace(bottleneck, "forward", forward)

    def _patch_c3(self, module: ModuleType) -> None:
        c3, bottleneck, conv = (class_of(module, "C3"), class_of(module, "Bottleneck"), namespace(module).get("Conv"))
        if c3 is None or self.has_replaced(c3) or not self.has_replaced(bottleneck):
            return
        stock = vars(c3).get("forward")
        if not C3.is_that_of(stock):
            return  # only the concatenation stays stock's
        forward = c3_forward(stock, vars(conv)["forward"], vars(bottleneck)["forward"])
        forward.__qualname__ = "bn_act_optim.C3.forward"
        self.replace(c3, "forward", forward)

    def _patch_sppf(self, module: ModuleType) -> None:
        sppf = class_of(module, "SPPF")
        if sppf is None or self.has_replaced(sppf):
            return
        stock = vars(sppf).get("forward")
        for formula, counts in ((SPPF, False), (SPPF_N, True)):
            if formula.is_that_of(stock):
                forward = sppf_forward(stock, counts)
                forward.__qualname__ = "bn_act_optim.SPPF.forward"
                self.replace(sppf, "forward", forward)
