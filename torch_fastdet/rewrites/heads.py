"""Returns the outputs of a head as its convolutions write them, and runs the first convolutions of its branches as one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.forwards import blocks_of_one_input, convolved
from torch_fastdet.nn.joint import OF_ONE_INPUT
from torch_fastdet.patching.evidence import agree, make_images, stand_ins
from torch_fastdet.patching.protocols import Function, Head, Model, Names
from torch_fastdet.rewrites import rewrite
from torch_fastdet.rewrites.rewrite import ADDS_FREELY, IN_NHWC, Rewrite

_SEQUENTIAL = nn.Sequential.forward


def raw_heads(detect: Head, x: list[Tensor]) -> list[Tensor]:
    """Return what YOLOv5's Detect returns in training, (bs, na, ny, nx, no) a level, as views of its convolutions' outputs, also in ``x``."""
    outputs = (convolution(features) for convolution, features in zip(detect.m, x))
    x[:] = [output.unflatten(1, (detect.na, detect.no)).movedim(2, -1) for output in outputs]
    return x


@functools.cache
def _makes_views(forward: Function) -> bool:
    """Return whether this is what YOLOv5's ``Detect.forward`` computes in training: forks change it under the same name."""
    attributes = {"nl": 2, "na": 2, "no": 3, "m": list(stand_ins("0", "1").values()), "training": True, "export": False}
    return agree(forward, raw_heads, attributes, [make_images(6), -make_images(6)])


@functools.partial(Rewrite, "YOLOv5's Detect returns views of its convolutions' outputs", ())
def head_views(model: Model) -> rewrite.Changes:
    """Let YOLOv5's Detect return (bs, na, ny, nx, no) views of its convolutions' outputs, where the original copies them.

    ComputeLoss writes its gradients in the same layout, so that these are not copied either.
    """
    detect = rewrite.detect_of(model, "forward", rewrite.YOLOV5)
    if detect is not None and _makes_views(type(detect).forward):
        yield detect, "forward", functools.partial(raw_heads, detect)


def _joined(head: Head, x: list[Tensor]) -> Tensor:
    """Return what ``head`` makes of each level, (N, channels, anchors of all levels), with the channels of an anchor side by side."""
    rows = [part(features).permute(0, 2, 3, 1).flatten(1, 2) for part, features in zip(head, x)]
    return torch.cat(rows, 1).transpose(1, 2)


def _written(head: Head, x: list[Tensor]) -> Tensor:
    """Return :func:`_joined` without a gradient: the last convolutions' bias is added on the way into the rows."""
    parts = [convolved(part, features) for part, features in zip(head, x)]
    first, positions = parts[0][0], [y.shape[2] * y.shape[3] for y, _ in parts]
    rows = first.new_empty(len(first), sum(positions), first.shape[1])
    for (y, bias), place in zip(parts, rows.split(positions, 1)):
        image = place.unflatten(1, y.shape[2:]).permute(0, 3, 1, 2)
        if y.is_contiguous(memory_format=torch.channels_last):
            torch.ops.torch_fastdet.bias_act(y, image, None, bias, activation="identity")
        else:
            image.copy_(y if bias is None else y + bias[:, None, None])
    return rows.transpose(1, 2)


def _distances(dfl: Head, x: Tensor) -> Tensor:
    """Return Ultralytics' DFL for x whose channels of an anchor lie side by side."""
    shares = x.transpose(1, 2).unflatten(2, (4, dfl.c1)).softmax(-1)
    return (shares @ dfl.conv.weight.flatten()).transpose(1, 2)


def _outputs(detect: object, x: list[Tensor], box_head: object = None, cls_head: object = None) -> Names:
    """Return boxes and scores of all anchors beside the features that they come from; nothing where a head is missing."""
    heads = {"boxes": box_head, "scores": cls_head}
    if any(head is None for head in heads.values()):
        return {}
    joined = _joined if torch.is_grad_enabled() else _written
    return {name: joined(head, x) for name, head in heads.items()} | {"feats": x}


@functools.partial(Rewrite, "Ultralytics' Detect writes the channels of an anchor side by side", (ADDS_FREELY, IN_NHWC))
def head_rows(model: Model) -> rewrite.Changes:
    """Let the boxes and scores of Ultralytics' Detect have the channels of an anchor side by side, as its convolutions write them.

    In evaluation the distances of boxes are made from them as they lie.
    """
    detect = rewrite.detect_of(model, "forward_head", rewrite.ULTRALYTICS_HEADS, evaluated=True)
    if detect is not None and rewrite.is_read(getattr(type(detect), "forward_head", None), "e09fa378"):
        yield detect, "forward_head", functools.partial(_outputs, detect)
        dfl, forward = detect.dfl, type(detect.dfl).forward
        if not model.training and runs_plainly(dfl, forward) and rewrite.is_read(forward, "75cbd4c6"):
            yield dfl, "forward", functools.partial(_distances, dfl)


class _Level:
    """Join the branches of a head that read the same features. The first that is called runs the first blocks of all as one convolution."""

    def __init__(self, branches: list[nn.Sequential]) -> None:
        self.branches = branches
        self.blocks = [branch[0] for branch in branches]
        self._made: dict[nn.Module, Tensor] = {}
        self._of: Tensor | None = None

    def forward(self, branch: nn.Sequential, x: Tensor) -> Tensor:
        if self._of is not x:
            self._of, self._made = x, blocks_of_one_input(self.blocks, x)
        y = self._made.pop(branch[0], None)
        if y is None:
            return _SEQUENTIAL(branch, x)
        for layer in list(branch)[1:]:
            y = layer(y)
        return y


def _levels(head: object) -> Iterator[_Level]:
    for prefix in ("", "one2one_"):
        branches = [getattr(head, f"{prefix}{name}", None) for name in ("cv2", "cv3", "cv4")]
        for level in zip(*(b for b in branches if isinstance(b, nn.ModuleList))):
            plain = [b for b in level if type(b) is nn.Sequential and len(b) and runs_plainly(b, _SEQUENTIAL)]
            if len(plain) > 1:
                yield _Level(plain)


@functools.partial(Rewrite, "first convolutions of a level's branches are one", (ADDS_FREELY,))
def first_blocks(model: Model) -> rewrite.Changes:
    """Let boxes and classes of YOLOv8, and boxes and masks, or angles, of all, begin with one convolution (:mod:`torch_fastdet.nn.joint`)."""
    head = rewrite.head_of(model, rewrite.ULTRALYTICS_HEADS)
    if levels := list(_levels(head)):
        yield head, OF_ONE_INPUT, [level.blocks for level in levels]
        for level in levels:
            for branch in level.branches:
                yield branch, "forward", functools.partial(level.forward, branch)
