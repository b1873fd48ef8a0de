"""Declares ``bn_act_optim`` of both frameworks: the forward methods of ``Conv``, and of blocks of them such as ``C3``, ``C2f`` and ``SPPF``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

from torch_fastdet.nn import forwards
from torch_fastdet.patching.evidence import Evidence, Formula, SameCode
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.switch import GPU, Active, Make, Switch, Target
from torch_fastdet.switches.frameworks import ALL_READ, ultralytics, yolov5

CONV = Formula("act(bn(conv(x)))", lambda self, x: self.act(self.bn(self.conv(x))))
CONV_FUSE = Formula("act(conv(x))", lambda self, x: self.act(self.conv(x)))
BOTTLENECK = Formula(
    "x + cv2(cv1(x)), or without x",
    lambda self, x: x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x)),
    ({"add": True}, {"add": False}),
)
C3 = Formula("cv3(cat(m(cv1(x)), cv2(x)))", lambda self, x: self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1)))

# These make the forwards of blocks that change only in evaluation.
_ELAN = functools.partial(forwards.c2f_forward, parts=operator.attrgetter("cv2", "cv3"), last="cv4", trains=False)
_A2C2F = functools.partial(forwards.c2f_forward, pieces=1, trains=False)
_C2PSA = functools.partial(forwards.c2f_forward, parts=lambda block: [block.m], left_out=1, trains=False)
_PSA = functools.partial(forwards.c2f_forward, parts=forwards.attention_of, left_out=1, trains=False)
_SPP_ELAN = functools.partial(forwards.sppf_forward, elan=True)


def _read(fingerprint: str) -> SameCode:
    return SameCode({"": (fingerprint,)}, ALL_READ)


# A row has a method, its maker, the method that is replaced before, and evidence. If one of these is missing, only fused models, the sum,
# or the concatenation run the original code.
_Row = tuple[str, Function, str, Evidence]
_CONVS: tuple[_Row, ...] = (
    ("Conv.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("RepConv.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("LightConv.forward", forwards.light_forward, "Conv.forward", _read("c08b80c8")),
    ("RepConv.forward", forwards.rep_conv_forward, "Conv.forward", _read("80fe2e0b")),
)
_BLOCKS: tuple[_Row, ...] = (
    ("Bottleneck.forward", forwards.bottleneck_forward, "Conv.forward", BOTTLENECK),
    ("C3.forward", forwards.c3_forward, "Bottleneck.forward", C3),
    ("C2f.forward", forwards.c2f_forward, "C3.forward", _read("3cb2576b")),
    ("RepNCSPELAN4.forward", _ELAN, "Conv.forward", _read("db0ffb42")),
    ("A2C2f.forward", _A2C2F, "Conv.forward", _read("d9e43420")),
    ("C2PSA.forward", _C2PSA, "Conv.forward", _read("8e97e0b4")),
    ("PSA.forward", _PSA, "Conv.forward", _read("2ba09ef4")),
    ("CIB.forward", forwards.cib_forward, "Conv.forward", _read("02023280")),
    ("ADown.forward", forwards.down_forward, "Conv.forward", _read("45658f9b")),
    ("SPPELAN.forward", _SPP_ELAN, "Conv.forward", _read("4c665d56")),
    ("RepVGGDW.forward_fuse", forwards.conv_forward_fuse, "Conv.forward", CONV_FUSE),
    ("PSABlock.forward", forwards.attention_forward, "Conv.forward", _read("9e3719a4")),
    ("ABlock.forward", forwards.attention_forward, "Conv.forward", _read("66e45f86")),
    ("HGBlock.forward", forwards.hg_block_forward, "Conv.forward", _read("3f1b7720")),
    ("SPPF.forward", forwards.sppf_forward, "", SameCode({"": ("244477b3", "dc79f93a")}, f"YOLOv5 7.0 or {ALL_READ}")),
)


def _made(name: str, make: Function) -> Make:
    def made(_: Active, stock: Callable, __: object) -> object:
        forward = make(stock)
        forward.__qualname__ = f"bn_act_optim.{name.partition('.')[0]}.{forward.__name__}"
        return forward

    return made


def _targets(where: tuple[str, ...], rows: tuple[_Row, ...]) -> list[Target]:
    return [
        Target(where, name, make=_made(name, make), evidence=(evidence,), after=after, otherwise="nothing")
        for name, make, after, evidence in rows
    ]


def _switch(framework: Callable[[str], tuple[str, ...]], *modules: str) -> Switch:
    """Return the switch of a framework, of whose ``modules`` the first defines ``Conv`` and the last other blocks."""
    conv, blocks = framework(modules[0]), framework(modules[-1])
    return Switch(
        "bn_act_optim",
        "BatchNorm, or bias, and activation as one operator, with the shortcut's sum and the concatenations of C3, C2f and HGBlock; the stem; SPPF; needs a GPU",
        (
            Target(conv, "Conv.forward", make=_made("Conv.forward", forwards.conv_forward), evidence=(CONV,)),
            *_targets(conv, _CONVS),
            *_targets(blocks, _BLOCKS),
        ),
        evidence=(GPU,),
        modules=modules,
    )


YOLOV5 = _switch(yolov5, "models.common")
ULTRALYTICS = _switch(ultralytics, "nn.modules.conv", "nn.modules.block")
