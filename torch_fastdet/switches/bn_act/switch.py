"""Declares ``bn_act_optim`` of both frameworks: the forward methods of ``Conv``, ``Bottleneck``, ``C3``, ``C2f``, ``HGBlock`` and ``SPPF``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fastdet.nn.bn_act import (
    bottleneck_forward,
    c2f_forward,
    c3_forward,
    conv_forward,
    conv_forward_fuse,
    hg_block_forward,
    rep_conv_forward,
    sppf_forward,
)
from torch_fastdet.patching.evidence import Asks, Evidence, Formula
from torch_fastdet.patching.protocols import Function, Model
from torch_fastdet.patching.switch import GPU, Active, Make, Switch, Target
from torch_fastdet.switches.frameworks import ultralytics, yolov5


def _c2f(self: Model, x: Tensor) -> Tensor:
    # What each block makes of the one before it, beginning with the second half.
    first, second = self.cv1(x).chunk(2, 1)
    row = itertools.accumulate(self.m, lambda y, block: block(y), initial=second)
    return self.cv2(torch.cat([first, *row], 1))


def _hg_block(self: Model, x: Tensor) -> Tensor:
    row = itertools.accumulate(self.m, lambda y, block: block(y), initial=x)
    y = self.ec(self.sc(torch.cat(list(row), 1)))
    return y + x if self.add else y


def _sppf(self: Model, x: Tensor) -> Tensor:
    # A pyramid: each pooling pools the one before it.
    pyramid = itertools.accumulate(range(getattr(self, "n", 3)), lambda y, _: self.m(y), initial=self.cv1(x))
    y = self.cv2(torch.cat(list(pyramid), 1))
    if getattr(self, "add", False):
        y = y + x
    return y


CONV = Formula("act(bn(conv(x)))", lambda self, x: self.act(self.bn(self.conv(x))), ("act", "bn", "conv"))
CONV_FUSE = Formula("act(conv(x))", lambda self, x: self.act(self.conv(x)), ("act", "conv"))
BOTTLENECK = Formula(
    "x + cv2(cv1(x)), or without x",
    lambda self, x: x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x)),
    ("cv1", "cv2"),
    ("add",),
    ({"add": True}, {"add": False}),
)
REP_CONV = Formula(
    "act(conv1(x) + conv2(x) + bn(x)), or without bn(x)",
    lambda self, x: self.act(self.conv1(x) + self.conv2(x) + (0 if self.bn is None else self.bn(x))),
    ("act", "bn", "conv1", "conv2"),
    (),
    ({}, {"bn": None}),
)
C3 = Formula(
    "cv3(cat(m(cv1(x)), cv2(x)))",
    lambda self, x: self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1)),
    ("cv1", "cv2", "cv3", "m"),
    ("cat", "torch"),
)
_TWO = {"cv1": lambda t: torch.cat([t * t, t + 1], 1)}  # channels, one for each half
C2F = Formula(
    "cv2(cat(a, b, m[0](b), m[1](m[0](b)), ...)) of the halves a and b of cv1(x)",
    _c2f,
    ("cv1", "cv2", "m"),
    ("cat", "chunk", "extend", "list", "torch"),
    ({**_TWO, "m": [lambda t: t * t + 3]}, {**_TWO, "m": [lambda t: t * t + 3, lambda t: t * t + 5]}),
)
LIGHT_CONV = Formula("conv2(conv1(x))", lambda self, x: self.conv2(self.conv1(x)), ("conv1", "conv2"))
HG_BLOCK = Formula(
    "ec(sc(cat(x, m[0](x), m[1](m[0](x)), ...))), or that plus x",
    _hg_block,
    ("ec", "m", "sc"),
    ("add", "cat", "extend", "torch"),
    (
        {"add": True, "m": [lambda t: t * t + 3], "ec": lambda t: t.unflatten(1, (2, -1)).sum(1)},
        {"add": False, "m": [lambda t: t * t + 3, lambda t: t * t + 5]},
    ),
)
# YOLOv5's, and Ultralytics', which has a number of poolings and a shortcut of its own, by getattr.
_SPPF = "cv2 of cv1(x) and of what m makes of it, again and again"
SPPF = Formula(_SPPF, _sppf, ("cv1", "cv2", "m"), ("cat", "catch_warnings", "simplefilter", "torch", "warnings"))
SPPF_N = Formula(
    _SPPF, _sppf, ("cv1", "cv2", "m"), ("cat", "extend", "getattr", "range", "torch"), ({}, {"n": 2, "add": True})
)


def _of_light_convs(stock: Function, light: Function, conv: Function) -> Function:
    return hg_block_forward(stock, light if LIGHT_CONV.is_that_of(light) else None, conv)


# Class, what makes its forward, the classes whose forwards that takes, and evidence. The last class was replaced before.
_BLOCKS: tuple[tuple[str, Function, tuple[str, ...], Formula], ...] = (
    ("Bottleneck", bottleneck_forward, ("Conv",), BOTTLENECK),
    ("C3", c3_forward, ("Conv", "Bottleneck"), C3),
    ("C2f", c2f_forward, ("Conv", "Bottleneck", "C3"), C2F),
    ("HGBlock", _of_light_convs, ("LightConv", "Conv"), HG_BLOCK),
)


def _method(name: str, make: Function, *parts: str) -> Make:
    """Return ``make(stock, ...)`` with the forwards that the classes ``parts`` of the original module have now."""

    def made(_: Active, stock: Callable, __: object) -> object:
        forward = make(stock, *(stock.__globals__[part].forward for part in parts))
        forward.__qualname__ = f"bn_act_optim.{name}.{forward.__name__}"
        return forward

    return made


def _switch(
    conv: tuple[str, ...], blocks: tuple[str, ...], evidence: tuple[Evidence, ...] = (), **options: Any
) -> Switch:
    """Return the switch of a host.

    Args:
        conv: full names of the modules that may define ``Conv``.
        blocks: of those that may define ``Bottleneck``, ``C3``, ``C2f`` and ``SPPF``.
        evidence: beside a GPU.
    """
    return Switch(
        "bn_act_optim",
        "BatchNorm, or bias, and activation as one operator, with the shortcut's sum and the concatenations of C3, C2f and HGBlock; the stem; SPPF; needs a GPU",
        (
            Target(conv, "Conv.forward", make=_method("Conv", conv_forward), evidence=(CONV,)),
            # Without these only fused models, the sum, or the concatenation, stay the original.
            Target(
                conv,
                "Conv.forward_fuse",
                make=_method("Conv", conv_forward_fuse),
                evidence=(CONV_FUSE,),
                after="Conv.forward",
                otherwise="nothing",
            ),
            Target(
                conv,
                "RepConv.forward_fuse",
                make=_method("RepConv", conv_forward_fuse),
                evidence=(CONV_FUSE,),
                after="Conv.forward",
                otherwise="nothing",
            ),
            Target(
                conv,
                "RepConv.forward",
                make=_method("RepConv", rep_conv_forward, "Conv"),
                evidence=(REP_CONV,),
                after="Conv.forward",
                otherwise="nothing",
            ),
            *(
                Target(
                    blocks,
                    f"{name}.forward",
                    make=_method(name, make, *parts),
                    evidence=(formula,),
                    after=f"{parts[-1]}.forward",
                    otherwise="nothing",
                )
                for name, make, parts, formula in _BLOCKS
            ),
            Target(
                blocks,
                "SPPF.forward",
                make=_method("SPPF", lambda stock, conv: sppf_forward(stock, SPPF_N.is_that_of(stock), conv), "Conv"),
                evidence=(Asks(f"it computes {_SPPF}", lambda f: None if SPPF.is_that_of(f) else SPPF_N.obstacle(f)),),
                otherwise="nothing",
            ),
        ),
        evidence=(GPU, *evidence),
        **options,
    )


YOLOV5 = _switch(yolov5("models.common"), yolov5("models.common"), modules=("models.common",))
ULTRALYTICS = _switch(
    ultralytics("nn.modules.conv"), ultralytics("nn.modules.block"), modules=("nn.modules.conv", "nn.modules.block")
)
