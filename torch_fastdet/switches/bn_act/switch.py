"""Declares ``bn_act_optim`` of both frameworks: the forward methods of ``Conv``, ``Bottleneck``, ``C3``, ``C2f``, ``HGBlock`` and ``SPPF``."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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
from torch_fastdet.patching.evidence import Asks, Formula
from torch_fastdet.patching.protocols import Function, Model
from torch_fastdet.patching.switch import GPU, Active, Make, Switch, Target
from torch_fastdet.switches.frameworks import ultralytics, yolov5


def _c2f(self: Model, x: Tensor) -> Tensor:
    # Each block reads the result of the one before it, the first one the second half.
    first, second = self.cv1(x).chunk(2, 1)
    row = itertools.accumulate(self.m, lambda y, block: block(y), initial=second)
    return self.cv2(torch.cat([first, *row], 1))


def _hg_block(self: Model, x: Tensor) -> Tensor:
    row = itertools.accumulate(self.m, lambda y, block: block(y), initial=x)
    y = self.ec(self.sc(torch.cat(list(row), 1)))
    return y + x if self.add else y


def _sppf(self: Model, x: Tensor) -> Tensor:
    # Each pooling pools the result of the one before it.
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


# Method, what makes it, the classes whose forwards that takes, and evidence. Without one of these only fused models, the sum, or the
# concatenation, stay the original. Conv.forward, or that of the last class, is replaced before.
_Row = tuple[str, Function, tuple[str, ...], Formula]
_CONVS: tuple[_Row, ...] = (
    ("Conv.forward_fuse", conv_forward_fuse, (), CONV_FUSE),
    ("RepConv.forward_fuse", conv_forward_fuse, (), CONV_FUSE),
    ("RepConv.forward", rep_conv_forward, ("Conv",), REP_CONV),
)
_BLOCKS: tuple[_Row, ...] = (
    ("Bottleneck.forward", bottleneck_forward, ("Conv",), BOTTLENECK),
    ("C3.forward", c3_forward, ("Conv", "Bottleneck"), C3),
    ("C2f.forward", c2f_forward, ("Conv", "Bottleneck", "C3"), C2F),
    ("HGBlock.forward", _of_light_convs, ("LightConv", "Conv"), HG_BLOCK),
)


def _method(name: str, make: Function, *parts: str) -> Make:
    """Return ``make(stock, ...)`` with the forwards that the classes ``parts`` of the original module have now."""

    def made(_: Active, stock: Callable, __: object) -> object:
        forward = make(stock, *(stock.__globals__[part].forward for part in parts))
        forward.__qualname__ = f"bn_act_optim.{name}.{forward.__name__}"
        return forward

    return made


def _targets(where: tuple[str, ...], rows: tuple[_Row, ...]) -> list[Target]:
    return [
        Target(
            where,
            name,
            make=_method(name.partition(".")[0], make, *parts),
            evidence=(formula,),
            after=f"{parts[-1] if parts else 'Conv'}.forward",
            otherwise="nothing",
        )
        for name, make, parts, formula in rows
    ]


def _switch(conv: tuple[str, ...], blocks: tuple[str, ...], modules: tuple[str, ...]) -> Switch:
    """Return the switch of a framework, by full names of the modules that may define ``Conv``, and its other blocks."""
    sppf = _method("SPPF", lambda stock, conv: sppf_forward(stock, SPPF_N.is_that_of(stock), conv), "Conv")
    pools = Asks(f"it computes {_SPPF}", lambda f: None if SPPF.is_that_of(f) else SPPF_N.obstacle(f))
    return Switch(
        "bn_act_optim",
        "BatchNorm, or bias, and activation as one operator, with the shortcut's sum and the concatenations of C3, C2f and HGBlock; the stem; SPPF; needs a GPU",
        (
            Target(conv, "Conv.forward", make=_method("Conv", conv_forward), evidence=(CONV,)),
            *_targets(conv, _CONVS),
            *_targets(blocks, _BLOCKS),
            Target(blocks, "SPPF.forward", make=sppf, evidence=(pools,), otherwise="nothing"),
        ),
        evidence=(GPU,),
        modules=modules,
    )


YOLOV5 = _switch(yolov5("models.common"), yolov5("models.common"), ("models.common",))
ULTRALYTICS = _switch(
    ultralytics("nn.modules.conv"), ultralytics("nn.modules.block"), ("nn.modules.conv", "nn.modules.block")
)
