"""Declares ``bn_act_optim`` of both frameworks: the forward methods of ``Conv``, and of blocks of them such as ``C3``, ``C2f`` and ``SPPF``."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fastdet.nn import forwards
from torch_fastdet.patching.evidence import Asks, Formula, make_images
from torch_fastdet.patching.protocols import Function, Model
from torch_fastdet.patching.switch import GPU, Active, Make, Switch, Target
from torch_fastdet.switches.frameworks import ultralytics, yolov5


def _row(parts: Sequence[Tensor], blocks: Iterable[Function]) -> Tensor:
    """Return the concatenation of the parts and of each block's result, of that of the one before it, the first one of the last part."""
    results = itertools.accumulate(blocks, lambda y, block: block(y), initial=parts[-1])
    return torch.cat([*parts[:-1], *results], 1)


def _sum(self: Model, x: Tensor, *parts: Function) -> Tensor:
    """Return what the parts make of x in a row, each plus what it reads unless ``add`` is False."""
    return functools.reduce(lambda y, part: y + part(y) if getattr(self, "add", True) else part(y), parts, x)


def _psa(self: Model, x: Tensor) -> Tensor:
    first, second = self.cv1(x).chunk(2, 1)
    second = self.m(second) if hasattr(self, "m") else _sum(self, second, self.attn, self.ffn)
    return self.cv2(torch.cat([first, second], 1))


def _down(self: Model, x: Tensor) -> Tensor:
    first, second = F.avg_pool2d(x, 2, 1).chunk(2, 1)
    return torch.cat([self.cv1(first), self.cv2(F.max_pool2d(second, 3, 2, 1))], 1)


def _a2c2f(self: Model, x: Tensor) -> Tensor:
    y = self.cv2(_row([self.cv1(x)], self.m))
    return y if self.gamma is None else x + self.gamma[:, None, None] * y


def _hg_block(self: Model, x: Tensor) -> Tensor:
    y = self.ec(self.sc(_row([x], self.m)))
    return y + x if self.add else y


def _sppf(self: Model, x: Tensor) -> Tensor:
    y = self.cv2(_row([self.cv1(x)], [self.m] * getattr(self, "n", 3)))
    return y + x if getattr(self, "add", False) else y


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
_CHUNKED = ("cat", "chunk", "extend", "list", "torch")
_THREE, _FIVE = (lambda t: t * t + 3), (lambda t: t * t + 5)
C2F = Formula(
    "cv2(cat(a, b, m[0](b), m[1](m[0](b)), ...)) of the halves a and b of cv1(x)",
    lambda self, x: self.cv2(_row(self.cv1(x).chunk(2, 1), self.m)),
    ("cv1", "cv2", "m"),
    _CHUNKED,
    ({**_TWO, "m": [_THREE]}, {**_TWO, "m": [_THREE, _FIVE]}),
)
ELAN = Formula(
    "cv4(cat(a, b, cv2(b), cv3(cv2(b)))) of the halves a and b of cv1(x)",
    lambda self, x: self.cv4(_row(self.cv1(x).chunk(2, 1), [self.cv2, self.cv3])),
    ("cv1", "cv2", "cv3", "cv4"),
    _CHUNKED,
    (_TWO,),
)
A2C2F = Formula(
    "cv2(cat(y, m[0](y), m[1](m[0](y)), ...)) of y = cv1(x), or x plus gamma times that",
    _a2c2f,
    ("cv1", "cv2", "m"),
    ("cat", "extend", "gamma", "shape", "torch", "view"),
    ({"m": [_THREE, _FIVE], "gamma": None}, {"m": [_THREE, _FIVE], "gamma": make_images()[0, 0, 1]}),
)
C2PSA = Formula(
    "cv2(cat(a, m(b))) of the halves a and b of cv1(x)",
    _psa,
    ("cv1", "cv2", "m"),
    ("c", "cat", "split", "torch"),
    ({**_TWO, "c": 1},),
)
PSA = Formula(
    "cv2(cat(a, y + ffn(y))) of y = b + attn(b) of the halves a and b of cv1(x)",
    _psa,
    ("attn", "cv1", "cv2", "ffn"),
    ("c", "cat", "split", "torch"),
    ({**_TWO, "c": 1},),
)
PSA_BLOCK = Formula(
    "y + ffn(y) of y = x + attn(x), or without the sums",
    lambda self, x: _sum(self, x, self.attn, self.ffn),
    ("attn", "ffn"),
    ("add",),
    ({"add": True}, {"add": False}),
)
A_BLOCK = Formula("y + mlp(y) of y = x + attn(x)", lambda self, x: _sum(self, x, self.attn, self.mlp), ("attn", "mlp"))
CIB = Formula(
    "x + cv1(x), or without x",
    lambda self, x: _sum(self, x, self.cv1),
    ("cv1",),
    ("add",),
    ({"add": True}, {"add": False}),
)
DOWN = Formula(
    "cat(cv1(a), cv2(p(b))) of the halves a and b of an average pooling of x, with a max pooling p",
    _down,
    ("cv1", "cv2"),
    ("avg_pool2d", "cat", "chunk", "functional", "max_pool2d", "nn", "torch"),
    ({"cv1": lambda t: t[..., ::2, ::2] ** 2},),
    functools.partial(make_images, 2, 6, 6),
)
LIGHT_CONV = Formula("conv2(conv1(x))", lambda self, x: self.conv2(self.conv1(x)), ("conv1", "conv2"))
HG_BLOCK = Formula(
    "ec(sc(cat(x, m[0](x), m[1](m[0](x)), ...))), or that plus x",
    _hg_block,
    ("ec", "m", "sc"),
    ("add", "cat", "extend", "torch"),
    (
        {"add": True, "m": [_THREE], "ec": lambda t: t.unflatten(1, (2, -1)).sum(1)},
        {"add": False, "m": [_THREE, _FIVE]},
    ),
)
# The first formula is YOLOv5's, the second Ultralytics', which reads a number of poolings and a shortcut by getattr.
_SPPF = "cv2 of cv1(x) and of what m makes of it, again and again"
SPPF = Formula(_SPPF, _sppf, ("cv1", "cv2", "m"), ("cat", "catch_warnings", "simplefilter", "torch", "warnings"))
SPPF_N = Formula(
    _SPPF, _sppf, ("cv1", "cv2", "m"), ("cat", "extend", "getattr", "range", "torch"), ({}, {"n": 2, "add": True})
)

SPP_ELAN = Formula(
    "cv5 of cv1(x) and of what cv2, cv3 and cv4 make of it in a row",
    lambda self, x: self.cv5(_row([self.cv1(x)], [self.cv2, self.cv3, self.cv4])),
    ("cv1", "cv2", "cv3", "cv4", "cv5"),
    ("cat", "extend", "torch"),
)


# These make the forwards of blocks that change only in evaluation.
_ELAN = functools.partial(forwards.c2f_forward, parts=operator.attrgetter("cv2", "cv3"), last="cv4", trains=False)
_A2C2F = functools.partial(forwards.c2f_forward, pieces=1, trains=False)
_C2PSA = functools.partial(forwards.c2f_forward, parts=lambda block: [block.m], left_out=1, trains=False)
_PSA = functools.partial(forwards.c2f_forward, parts=forwards.attention_of, left_out=1, trains=False)
_SPP_ELAN = functools.partial(forwards.sppf_forward, counts=False, elan=True)
# A row has a method, its maker, the method that is replaced before, and evidence. If one of these is missing, only fused models, the sum,
# or the concatenation run the original code.
_Row = tuple[str, Function, str, Formula]
_CONVS: tuple[_Row, ...] = (
    ("Conv.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("RepConv.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("LightConv.forward", forwards.light_forward, "Conv.forward", LIGHT_CONV),
    ("RepConv.forward", forwards.rep_conv_forward, "Conv.forward", REP_CONV),
)
_BLOCKS: tuple[_Row, ...] = (
    ("Bottleneck.forward", forwards.bottleneck_forward, "Conv.forward", BOTTLENECK),
    ("C3.forward", forwards.c3_forward, "Bottleneck.forward", C3),
    ("C2f.forward", forwards.c2f_forward, "C3.forward", C2F),
    ("RepNCSPELAN4.forward", _ELAN, "Conv.forward", ELAN),
    ("A2C2f.forward", _A2C2F, "Conv.forward", A2C2F),
    ("C2PSA.forward", _C2PSA, "Conv.forward", C2PSA),
    ("PSA.forward", _PSA, "Conv.forward", PSA),
    ("CIB.forward", forwards.cib_forward, "Conv.forward", CIB),
    ("ADown.forward", forwards.down_forward, "Conv.forward", DOWN),
    ("SPPELAN.forward", _SPP_ELAN, "Conv.forward", SPP_ELAN),
    ("RepVGGDW.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("PSABlock.forward", forwards.attention_forward, "Conv.forward", PSA_BLOCK),
    ("ABlock.forward", forwards.attention_forward, "Conv.forward", A_BLOCK),
    ("HGBlock.forward", forwards.hg_block_forward, "Conv.forward", HG_BLOCK),
)


def _made(name: str, make: Function) -> Make:
    def made(_: Active, stock: Callable, __: object) -> object:
        forward = make(stock)
        forward.__qualname__ = f"bn_act_optim.{name.partition('.')[0]}.{forward.__name__}"
        return forward

    return made


def _targets(where: tuple[str, ...], rows: tuple[_Row, ...]) -> list[Target]:
    return [
        Target(where, name, make=_made(name, make), evidence=(formula,), after=after, otherwise="nothing")
        for name, make, after, formula in rows
    ]


def _switch(conv: tuple[str, ...], blocks: tuple[str, ...], modules: tuple[str, ...]) -> Switch:
    """Return the switch of a framework, by full names of the modules that may define ``Conv``, and its other blocks."""
    sppf = _made("SPPF.forward", lambda stock: forwards.sppf_forward(stock, SPPF_N.is_that_of(stock)))
    pools = Asks(f"it computes {_SPPF}", lambda f: None if SPPF.is_that_of(f) else SPPF_N.obstacle(f))
    return Switch(
        "bn_act_optim",
        "BatchNorm, or bias, and activation as one operator, with the shortcut's sum and the concatenations of C3, C2f and HGBlock; the stem; SPPF; needs a GPU",
        (
            Target(conv, "Conv.forward", make=_made("Conv.forward", forwards.conv_forward), evidence=(CONV,)),
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
