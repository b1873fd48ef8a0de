"""What the ``bn_act_optim`` switches of both hosts share: the forward methods of ``Conv``, ``Bottleneck``, ``C3`` and ``SPPF``."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from torch_fastdet.bn_act import bottleneck_forward, c3_forward, computes, conv_forward, sppf_forward
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.switch import Switch, class_of

# What SPPF.forward reads -> whether the block has a number of poolings and a shortcut of its own.
_SPPF = {
    frozenset({"catch_warnings", "cat", "cv1", "cv2", "m", "simplefilter", "torch", "warnings"}): False,
    frozenset({"cat", "cv1", "cv2", "extend", "getattr", "range", "torch"}): True,
}


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
        if not computes(stock, {"act", "bn", "conv"}):
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
        if not computes(stock, {"add", "cv1", "cv2"}):
            return  # only the sum stays stock's
        forward = bottleneck_forward(stock, vars(conv)["forward"])
        forward.__qualname__ = "bn_act_optim.Bottleneck.forward"
        self.replace(bottleneck, "forward", forward)

    def _patch_c3(self, module: ModuleType) -> None:
        c3, bottleneck, conv = (class_of(module, "C3"), class_of(module, "Bottleneck"), namespace(module).get("Conv"))
        if c3 is None or self.has_replaced(c3) or not self.has_replaced(bottleneck):
            return
        stock = vars(c3).get("forward")
        if not computes(stock, {"cat", "cv1", "cv2", "cv3", "m", "torch"}):
            return  # only the concatenation stays stock's
        forward = c3_forward(stock, vars(conv)["forward"], vars(bottleneck)["forward"])
        forward.__qualname__ = "bn_act_optim.C3.forward"
        self.replace(c3, "forward", forward)

    def _patch_sppf(self, module: ModuleType) -> None:
        sppf = class_of(module, "SPPF")
        if sppf is None or self.has_replaced(sppf):
            return
        stock = vars(sppf).get("forward")
        for names, counts in _SPPF.items():
            if computes(stock, set(names)):
                forward = sppf_forward(stock, counts)
                forward.__qualname__ = "bn_act_optim.SPPF.forward"
                self.replace(sppf, "forward", forward)
