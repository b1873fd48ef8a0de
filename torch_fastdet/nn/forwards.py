"""Runs norm and activation behind a convolution as one operator, in training and in evaluation.

Where the framework has fused the norm into the convolution, its bias and the activation are that operator. The functions here make forward
methods for the frameworks' ``Conv``, and for blocks of these such as ``Bottleneck``, ``C3``, ``C2f`` and ``SPPF``. They look at the modules at
each call, because anything may have changed since the last one. What one operator cannot do with the original results and in the original order
stays as it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch import private
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.nn import joint
from torch_fastdet.nn.stem import convolve, convolve_squares, divided, has_stem_shape, is_stem
from torch_fastdet.nn.widened import is_slow, widened

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Hardswish: "hardswish",
    nn.Identity: "identity",
}
# These are torch's own forwards. If a class has another one, somebody has replaced it.
_KINDS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.Sequential, *ACTIVATIONS)
_FORWARDS = {kind: kind.forward for kind in _KINDS}
# The operator is faster on these devices.
DEVICES = ("cuda",)
# One access moves so many half-precision channels. Slices of other numbers of channels are copied one by one.
_VECTOR = 8

Forward = Callable[..., Tensor]
Block: TypeAlias = Any  # a module of a framework, such as its Conv
# _finished() computes a block's result from its last Conv, the output of that Conv's convolution, and what is added to the result.
Opened: TypeAlias = tuple[Block, Tensor, Tensor | None]
Opener: TypeAlias = Callable[[Block, Tensor, Tensor], Opened | None]
#: A module has this attribute while it is captured: a function of x that returns what :func:`opened` does.
OPENS = "torch_fastdet_opens"
# Every forward that is made here has this attribute: the function that made it.
_MADE_BY = "made_by"


class _Thread(threading.local):
    """Know whether this thread is inside of :func:`captured`. Only forward passes are, so autograd's threads need not know."""

    def __init__(self) -> None:
        self.captures = False  # not on the class, where torch.compile would not see that it changes


_thread = _Thread()


def is_watched() -> bool:
    """Return whether something sees each module's call, or records a program that has to run without us."""
    return private.every_module_has_hooks() or private.is_recorded() or private.is_transforming()


def _maker_of(forward: object) -> object:
    """Return the function that made ``forward``; None for another one, also if ``functools.wraps`` has given it our attributes."""
    wrapped = getattr(forward, "__wrapped__", None)
    return None if hasattr(wrapped, _MADE_BY) else getattr(forward, _MADE_BY, None)


def _made_by(maker: object, block: Block) -> bool:
    return _maker_of(getattr(type(block), "forward", None)) is maker


def is_captured() -> bool:
    return _thread.captures


def fuses() -> bool:
    """Return whether blocks are fused in the call that runs now.

    An eager call of a fused block keeps the host longer than its modules do. ``cuda_graph`` puts :func:`is_captured` in the place of this
    function: its models run as the original's wherever they do not run in graphs.
    """
    return True


def captured() -> AbstractContextManager[None]:
    """Mark this thread's calls inside as captured, or as having to give what a replay gives."""
    return own_attributes([(_thread, "captures", True)])


def _fuses(block: Block) -> bool:
    """Return whether norm, or the convolution's bias, and activation of a block are ones that an operator knows, unobserved.

    In evaluation, whether :func:`_write` does what is behind its convolution, without a gradient.
    """
    norm, act = getattr(block, "bn", None), block.act
    if not fuses() or type(act) not in ACTIVATIONS or (norm is not None and type(norm) is not nn.BatchNorm2d):
        return False
    if block.training:
        ready = norm is not None and norm.training and (norm.momentum is not None or not norm.track_running_stats)
    else:
        ready = (
            not (torch.is_grad_enabled() or torch.compiler.is_compiling())
            and _is_plain(block.conv)
            and block.conv.weight.device.type in DEVICES
            and (norm is None or (not norm.training and norm.running_mean is not None))
        )
    return (
        ready
        and private.runs_plainly(act, _FORWARDS[type(act)])
        and (norm is None or private.runs_plainly(norm, _FORWARDS[nn.BatchNorm2d]))
        and not is_watched()
    )


def _fits(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Return whether the operator takes x and the norm's tensors. What stock refuses, stock shall refuse."""
    if type(x) is not Tensor or x.device.type not in DEVICES or x.dim() != 4 or not x.is_floating_point():
        return False
    if x.numel() == 0 or x.shape[1] != norm.num_features or x.numel() == x.shape[1]:
        return False
    kinds = (torch.float32, x.dtype)
    for vector in (norm.weight, norm.bias):
        if vector is not None and (vector.dtype not in kinds or vector.device != x.device):
            return False
    if not norm.track_running_stats:
        return True
    for running in (norm.running_mean, norm.running_var):
        if running is None or running.dtype not in kinds or running.device != x.device or not running.is_contiguous():
            return False
    tracked = norm.num_batches_tracked
    return tracked is None or (tracked.dtype == torch.int64 and tracked.dim() == 0 and tracked.device == x.device)


def _slope(act: nn.Module) -> float:
    return act.negative_slope if type(act) is nn.LeakyReLU else 0.0


def _is_plain(conv: nn.Module) -> bool:
    """Return whether this is a convolution whose bias can be added later."""
    return (
        type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and (conv.bias is None or conv.bias.dtype == conv.weight.dtype)
        and private.runs_plainly(conv, _FORWARDS[nn.Conv2d])
    )


def convolved(branch: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a branch makes of x but for the bias of the convolution that it ends in, and that bias; its result and None otherwise."""
    if (
        type(branch) is not nn.Sequential
        or not len(branch)
        or not private.runs_plainly(branch, _FORWARDS[nn.Sequential])
    ):
        return branch(x), None
    layers: list[Block] = list(branch)
    last = layers.pop()
    for layer in layers:
        x = layer(x)
    return (_convolve(last, x, None), last.bias) if _is_plain(last) else (last(x), None)


def _convolve(conv: Block, x: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None and x.dtype == conv.weight.dtype and is_slow(conv, x.dtype):
        return widened(conv, x)
    return F.conv2d(x, conv.weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def _vectors(block: Block) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float]:
    """Return weight, bias, mean and variance of an evaluated block's norm, and its eps; the bias alone where the convolution holds the norm."""
    norm = getattr(block, "bn", None)
    if norm is None:
        return None, block.conv.bias, None, None, 0.0
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps


def _begun(block: Block, x: Tensor) -> Tensor:
    """Return what the block's convolution makes of x; in evaluation without the bias that :func:`_finished` adds."""
    conv = block.conv
    if block.training:
        return convolve(conv, x)
    return _convolve(conv, x, conv.bias if hasattr(block, "bn") else None)


def _write(
    block: Block, x: Tensor, room: Tensor, shortcut: Tensor | None, last: Tensor | None = None, first: int = 0
) -> None:
    """Write the block's result in evaluation, for x of its convolution, into ``room`` from channel ``first`` on; its last ones into ``last``."""
    place = room if room.shape == x.shape else room.narrow(1, first, x.shape[1])
    options = ACTIVATIONS[type(block.act)], _slope(block.act), shortcut, last
    torch.ops.torch_fastdet.bias_act(x, place, *_vectors(block), *options)


def _fits_evaluated(x: Tensor, block: Block) -> bool:
    """Return whether the operator takes x, of the block's convolution."""
    kinds, vectors = (torch.float32, x.dtype), [v for v in _vectors(block)[:4] if v is not None]
    return (
        type(x) is Tensor
        and x.device.type in DEVICES
        and x.dim() == 4
        and x.numel() > 0
        and all(v.dtype in kinds and v.device == x.device and len(v) == x.shape[1] for v in vectors)
    )


def _finished(block: Block, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return the block's result, plus ``shortcut``, for x of :func:`_begun`; in evaluation in :func:`_place`. Ask :func:`_fuses` first."""
    norm: Any = getattr(block, "bn", None)
    act, inside = block.act, shortcut if _is_added(shortcut, x) else None
    if block.training and _fits(x, norm):
        of_batches = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        running = of_batches if norm.track_running_stats else (None, None, None)
        given: list[Any] = [*running, *_options(norm, act), inside]
        y = ops.bn_act(x, norm.weight, norm.bias, *given)
    elif not block.training and _fits_evaluated(x, block):
        y = _place(block, x)
        _write(block, x, y, inside)
    else:
        inside = None
        if norm is not None:
            x = norm(x)
        elif block.conv.bias is not None:
            x = x + block.conv.bias[:, None, None]
        y = act(x)
    return y if shortcut is None or inside is not None else shortcut + y


def _place(block: Block, x: Tensor) -> Tensor:
    """Return where an evaluated block's result for x may be written: x, or a tensor without the channels that :func:`widened` adds."""
    return joint.room_like(x, x.shape[1]) if is_slow(block.conv, x.dtype) else x


def _is_added(shortcut: Tensor | None, x: Tensor) -> bool:
    return shortcut is None or (shortcut.dtype == x.dtype and shortcut.shape == x.shape)


def _options(norm: nn.BatchNorm2d, act: nn.Module) -> joint.Options:
    return norm.momentum or 0.0, norm.eps, ACTIVATIONS[type(act)], _slope(act)


def _is_whole(norm: nn.BatchNorm2d) -> bool:
    """Return whether the norm has parameters, running statistics and a count of its batches."""
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return norm.track_running_stats and all(tensor is not None for tensor in tensors)


def _takes_all(inputs: Sequence[Tensor], blocks: list[Block]) -> bool:
    """Return whether one operator can do what is behind the convolutions of blocks in training, for what these make."""
    options = [_options(block.bn, block.act) for block in blocks]
    return options.count(options[0]) == len(options) and all(
        _is_whole(block.bn) and _fits(x, block.bn) for x, block in zip(inputs, blocks)
    )


def _jointly(blocks: list[Block], x: Tensor, before: list[int]) -> tuple[Tensor, ...] | None:
    """Return each block's ``act(bn(conv(x)))``, with ``before[i]`` channels in front, by one convolution; None where there is none.

    Ask :func:`_fuses` for each block first.
    """
    run = vars(blocks[0].conv).get(joint.JOINT)
    z = None if run is None else run(x)
    if z is None or not _takes_all(z.detach().split([block.conv.out_channels for block in blocks], 1), blocks):
        return None
    norms = [block.bn for block in blocks]
    if len({(norm.weight.dtype, norm.bias.dtype) for norm in norms}) > 1:
        return None
    weights_and_biases = [norm.weight for norm in norms] + [norm.bias for norm in norms]
    return joint.NormsOfParts.apply(z, before, norms, _options(norms[0], blocks[0].act), *weights_and_biases)


def _can_share(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Return whether x, of the norm's channels, may be handed to several readers. torch.compile knows no Function that writes in place."""
    return _fits(x, norm) and not torch.compiler.is_compiling()


def _is_like(x: Tensor, room: Tensor) -> bool:
    """Return whether x can be some channels of ``room``."""
    return x.dtype == room.dtype and x.shape[2:] == room.shape[2:] and x.is_contiguous() == room.is_contiguous()


def _goes_into(room: Tensor, block: Block, x: Tensor, shortcut: Tensor | None) -> bool:
    """Return whether the block's result for x of :func:`_begun`, plus ``shortcut``, can be written into ``room``."""
    fits = _fits(x, block.bn) and _is_whole(block.bn) if block.training else _fits_evaluated(x, block)
    return fits and _is_added(shortcut, x) and _is_like(x, room)


def _into(room: Tensor, first: int, block: Block, x: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return ``room`` with the block's result for x, plus ``shortcut``, in its channels from ``first`` on. Ask :func:`_goes_into` first."""
    if block.training:
        norm = block.bn
        return joint.NormInto.apply(room, first, x, norm, _options(norm, block.act), shortcut, norm.weight, norm.bias)
    _write(block, x, room, shortcut, first=first)
    return room


def _made(maker: object, forward: Forward, stock: Forward) -> Forward:
    """Note what made ``forward``. TorchScript, which reads the source of what is wrapped, compiles ``stock``."""
    vars(forward).update({_MADE_BY: maker, "__wrapped__": stock})
    return forward


def conv_forward(stock: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``act(bn(conv(x)))``; ``stock`` is what it replaces."""

    def forward(self: Block, x: Tensor) -> Tensor:
        if _fuses(self):
            return _finished(self, _begun(self, x))
        return stock(self, x)

    return _made(conv_forward, forward, stock)


def conv_forward_fuse(stock: Forward) -> Forward:
    """Stand in for what a block calls once its convolution holds the norm: ``act(conv(x))``. Instances keep it as their ``forward``."""

    def forward_fuse(self: Block, x: Tensor) -> Tensor:
        if type(self).forward_fuse is forward_fuse and not hasattr(self, "bn") and _fuses(self):
            return _finished(self, _begun(self, x))
        return stock(self, x)

    return _made(conv_forward_fuse, forward_fuse, stock)


def _is_fused(block: Block) -> bool:
    """Return whether a call of the block is one of the :func:`conv_forward_fuse` that its class has now."""
    forward = getattr(vars(block).get("forward"), "__func__", None)
    return (
        _maker_of(forward) is conv_forward_fuse
        and type(block).forward_fuse is forward
        and not hasattr(block, "bn")
        and not private.module_has_hooks(block)
        and not private.is_compiled_in_place(block)
    )


def is_used(model: nn.Module) -> bool:
    """Return whether ``model`` has a block of :func:`conv_forward`. Only then may its captured steps round in other places than eager ones."""
    return any(_made_by(conv_forward, block) for block in model.modules())


def begins_with_stem(block: Block) -> bool:
    """Return whether ``block`` is one of :func:`conv_forward` with a stem's convolution, whose images may be divided on the way."""
    conv = getattr(block, "conv", None)
    return (
        _made_by(conv_forward, block)
        and private.runs_plainly(block, type(block).forward)
        and type(conv) is nn.Conv2d
        and has_stem_shape(conv)
    )


def forward_of_bytes(block: Block, x: Tensor) -> Tensor:
    """Return the block's result for ``x / 255``, where x is uint8; for other x its own. Ask :func:`begins_with_stem` first."""
    if x.dtype != torch.uint8:
        return type(block).forward(block, x)
    if block.training and _fuses(block) and is_stem(block.conv, x, floating=False):
        return _finished(block, convolve_squares(block.conv, x))
    alike = torch.contiguous_format if block.conv.weight.is_contiguous() else torch.channels_last
    return type(block).forward(block, divided(x.contiguous(memory_format=alike)))


def _is_conv(block: Block) -> bool:
    """Return whether ``block`` is one of :func:`conv_forward`, its norm fused or not, and one for :func:`_finished`."""
    if not _made_by(conv_forward, block) or (not block.training and torch.is_grad_enabled()):
        return False
    plain = hasattr(block, "bn") and private.runs_plainly(block, type(block).forward)
    return (plain or _is_fused(block)) and _fuses(block)


def opened(block: Block, x: Tensor, shortcut: Tensor | None = None) -> Opened:
    """Return the ``Conv`` that ``block`` ends in, what its convolution makes of what is before it, and what is added to its result.

    Where the block cannot be opened, the first is None, and the second the block's result. ``shortcut``: x once more, for what is added.
    """
    if _is_conv(block):
        return block, _begun(block, x), None
    if (opens := getattr(block, OPENS, None)) is not None:
        return opens(x)
    forward = getattr(type(block), "forward", None)
    opener, found = getattr(_maker_of(forward), "opener", None), None
    if forward is _FORWARDS[nn.Sequential]:
        opener = _open_sequential
    if opener is not None and private.runs_plainly(block, forward):
        found = opener(block, x, x if shortcut is None else shortcut)
    return (None, block(x), None) if found is None else found


def closed(end: Block | None, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return the result of a block that was :func:`opened`."""
    if end is not None:
        return _finished(end, x, shortcut)
    return x if shortcut is None else shortcut + x


def added(shortcut: Tensor, block: Block, x: Tensor) -> Tensor:
    """Return ``shortcut + block(x)``, in evaluation by the operator behind the convolution that the block ends in."""
    if getattr(block, "training", True):
        return shortcut + block(x)
    return closed(*_plus(opened(block, x), shortcut))


def _plus(found: Opened, shortcut: Tensor) -> Opened:
    """Return what was :func:`opened` with ``shortcut`` added, too."""
    end, y, inner = found
    return (end, y, shortcut) if inner is None else (None, closed(*found), shortcut)


def _open_sequential(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    layers = [] if block.training else list(block)
    for layer in layers[:-1]:
        x = layer(x)
    return opened(layers[-1], x) if layers else None


def _opens(opener: Opener) -> Callable[[Forward], Forward]:
    """Let ``opener`` make forwards. It returns what :func:`opened` does, or None where the original forward shall run."""

    def make(stock: Forward) -> Forward:
        def forward(self: Block, x: Tensor) -> Tensor:
            parts = opener(self, x, x)
            return stock(self, x) if parts is None else closed(*parts)

        return _made(make, forward, stock)

    vars(make)["opener"] = opener
    return make


@_opens
def bottleneck_forward(block: Block, x: Tensor, shortcut: Tensor) -> Opened | None:
    """Run ``x + cv2(cv1(x)) if add else cv2(cv1(x))``. The sum joins the second block's norm and activation."""
    end = block.cv2
    return (end, _begun(end, block.cv1(x)), shortcut if block.add else None) if _is_conv(end) else None


@_opens
def c3_forward(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    """Run ``cv3(cat((m(cv1(x)), cv2(x)), 1))``, with bottlenecks ``m`` in a row.

    The last bottleneck and ``cv2`` write into the concatenation; ``cv1`` and ``cv2`` are one convolution where a captured step has
    joined them (:mod:`torch_fastdet.nn.joint`).
    """
    parts = _c3_parts(block, x)
    return None if parts is None else opened(block.cv3, parts)


@_opens
def light_forward(block: Block, x: Tensor, _: Tensor) -> Opened:
    """Run ``conv2(conv1(x))``."""
    return opened(block.conv2, block.conv1(x))


def _ends_in_conv(tail: Block) -> bool:
    return type(tail) is nn.Sequential and len(tail) > 0 and _is_conv(tail[-1])


@_opens
def attention_forward(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    """Run ``y + ffn(y)`` of ``y = x + attn(x)``, or with ``mlp``, if ``add``. In evaluation the sums join operators behind convolutions."""
    tail = block.ffn if hasattr(block, "ffn") else block.mlp
    if block.training or not getattr(block, "add", True) or not _ends_in_conv(tail):
        return None
    return _attended(block, tail, x)


def _attended(block: Block, tail: Block, x: Tensor) -> Opened:
    x = added(x, block.attn, x)
    return _plus(opened(tail, x), x)


@_opens
def cib_forward(block: Block, x: Tensor, shortcut: Tensor) -> Opened | None:
    """Run ``x + cv1(x) if add else cv1(x)`` in evaluation, with convolutions ``cv1`` in a row."""
    if block.training or not _ends_in_conv(block.cv1):
        return None
    found = opened(block.cv1, x)
    return _plus(found, shortcut) if block.add else found


@_opens
def rep_conv_forward(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    """Run ``act(conv1(x) + conv2(x))``. The sum joins the second block's norm. With ``bn(x)`` in the sum, the original runs."""
    last = block.conv2
    if block.bn is not None or not _is_conv(last):
        return None
    return None, block.act(_finished(last, _begun(last, x), block.conv1(x))), None


def _c3_parts(c3: Block, x: Tensor) -> Tensor | None:
    """Return the concatenation that ``cv3`` of :func:`c3_forward` reads; None, with nothing done, where it cannot be written in place."""
    if type(c3.m) is not nn.Sequential:
        return None
    inner: list[Block] = list(c3.m)
    last = inner[-1] if inner else None
    if not (
        last is not None
        and private.runs_plainly(c3.m, _FORWARDS[nn.Sequential])
        and _made_by(bottleneck_forward, last)
        and private.runs_plainly(last, type(last).forward)
        and _is_conv(last.cv2)
        and _is_conv(c3.cv2)
    ):
        return None
    halves = _jointly([c3.cv1, c3.cv2], x, [0, last.cv2.conv.out_channels]) if _is_conv(c3.cv1) else None
    y = c3.cv1(x) if halves is None else halves[0]
    for block in inner[:-1]:
        y = block(y)
    shortcut = None
    if last.add:
        shortcut, y = joint.Twice.apply(y) if last.cv2.training and _can_share(y, last.cv2.bn) else (y, y)
    deep = _begun(last.cv2, last.cv1(y))
    if halves is not None:
        if _goes_into(halves[1], last.cv2, deep, shortcut):
            return _into(halves[1], 0, last.cv2, deep, shortcut)
        return torch.cat([_finished(last.cv2, deep, shortcut), halves[1][:, deep.shape[1] :]], 1)
    return _side_by_side(last.cv2, deep, c3.cv2, _begun(c3.cv2, x), shortcut)


def _side_by_side(first: Block, x: Tensor, second: Block, y: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return the concatenation of the results of two blocks for x and y of their convolutions, the first one plus ``shortcut``.

    The blocks' operators write straight into it where that is possible. Two blocks in training share one, if their options are the same.
    """
    if first.training and second.training:
        alike = (x.dtype, x.device, x.shape[0], x.shape[2:]) == (y.dtype, y.device, y.shape[0], y.shape[2:])
        if alike and _is_added(shortcut, x) and _takes_all([x, y], [first, second]):
            norms = [first.bn, second.bn]
            given: list[Any] = [*joint.buffers_of(norms), *_options(first.bn, first.act), shortcut]
            return ops.bn_act_cat([x, y], [n.weight for n in norms], [n.bias for n in norms], *given)
    else:
        room = joint.room_like(y, x.shape[1] + y.shape[1])
        if _goes_into(room, first, x, shortcut) and _goes_into(room, second, y, None):
            return _into(_into(room, 0, first, x, shortcut), x.shape[1], second, y, None)
    return torch.cat([_finished(first, x, shortcut), _finished(second, y)], 1)


@_opens
def down_forward(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    """Run YOLOv9's ADown in evaluation, where ``cv1`` and ``cv2`` write into the concatenation."""
    if block.training or not (_is_conv(block.cv1) and _is_conv(block.cv2)):
        return None
    left, right = F.avg_pool2d(x, 2, 1).chunk(2, 1)
    pooled = F.max_pool2d(right, 3, 2, 1)
    return None, _side_by_side(block.cv1, _begun(block.cv1, left), block.cv2, _begun(block.cv2, pooled)), None


def c2f_forward(
    stock: Forward,
    parts: Callable[[Block], Sequence[Block]] = lambda block: list(block.m) if type(block.m) is nn.ModuleList else [],
    last: str = "cv2",
    pieces: int = 2,
    left_out: int = 0,
    trains: bool = True,
) -> Forward:
    """Stand in for the forward of a block that computes ``cv2(cat((a, b, m[0](b), m[1](m[0](b)), ...), 1))`` of ``a, b = cv1(x).chunk(2, 1)``.

    ``cv1`` writes into the concatenation, and so does the last of ``m`` where it can be :func:`opened`. What one more block
    reads is copied: ``b``, and the result of each of ``m`` but the last. Backward, the gradients of its readers are added in one pass.

    Args:
        stock: the forward that it replaces.
        parts: returns the blocks; none if the block shall stay as it is.
        last: the name of what reads the concatenation.
        pieces: parts of ``cv1(x)``; of one, the result is x plus ``gamma`` times that above, unless ``gamma`` is None.
        left_out: 1 if the last part is not in the concatenation.
        trains: whether blocks in training are meant, too.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        blocks = list(parts(self))
        if not blocks or (self.training and not trains) or not _is_conv(self.cv1):
            return stock(self, x)
        y = getattr(self, last)(_row(self.cv1, _begun(self.cv1, x), blocks, pieces, left_out))
        gamma = self.gamma if pieces == 1 else None
        return y if gamma is None else x + gamma[:, None, None] * y

    return _made(c2f_forward, forward, stock)


def _row(cv1: Block, x: Tensor, blocks: list[Block], pieces: int, left_out: int) -> Tensor:
    """Return the concatenation of :func:`c2f_forward`; x is the result of ``cv1``'s convolution."""
    half = x.shape[1] // pieces
    fits = _can_share(x, cv1.bn) and _is_whole(cv1.bn) if cv1.training else _fits_evaluated(x, cv1)
    if half % _VECTOR or x.shape[1] % pieces or not fits:
        parts = list(_finished(cv1, x).chunk(pieces, 1))
        if left_out:
            parts[-1], blocks = closed(*opened(blocks[0], parts[-1])), blocks[1:]
        return _chain(parts, blocks)
    kept = half * (pieces - left_out)
    return _filled(*_split(cv1, x, kept + half * len(blocks), half), kept, blocks)


def _filled(room: Tensor, shortcut: Tensor, y: Tensor, first: int, blocks: Sequence[Block]) -> Tensor:
    """Return ``room`` with what the blocks make of y, each of the result of the one before it, in its channels from ``first`` on.

    It is another concatenation of the same where they do not fit. ``shortcut`` is y.
    """
    width = (room.shape[1] - first) // len(blocks)
    for i, block in enumerate(blocks, 1):
        end, y, residual = opened(block, y, shortcut)
        goes_into = end is not None and y.shape[1] == width and _goes_into(room, end, y, residual)
        if goes_into and i == len(blocks):
            return _into(room, first, end, y, residual)
        if goes_into and not end.training:
            shortcut = _place(end, y)
            _write(end, y, room, residual, last=shortcut, first=first)
            y = shortcut
        else:
            y = closed(end, y, residual)
            if y.shape[1] != width or not _is_like(y, room):
                return _chain([room[:, :first], y], blocks[i:])
            room, shortcut, y = joint.Keep.apply(room, first, y)
        first += width
    return room


def attention_of(block: Block) -> list[Block]:
    """Return the one part of a block that has ``attn`` and ``ffn`` itself: ``y + ffn(y)`` of ``y = x + attn(x)``."""
    return [SimpleNamespace(**{OPENS: functools.partial(_attended, block, block.ffn)})]


@_opens
def hg_block_forward(block: Block, x: Tensor, _: Tensor) -> Opened | None:
    """Run ``ec(sc(cat((x, m[0](x), m[1](m[0](x)), ...), 1)))``, plus ``x`` if ``add``, in evaluation.

    Each of ``m`` that can be :func:`opened` writes into the concatenation. The sum joins the activation of ``ec``.
    """
    if block.training or type(block.m) is not nn.ModuleList or not (_is_conv(block.sc) and _is_conv(block.ec)):
        return None
    blocks, channels = list(block.m), block.sc.conv.in_channels
    if not blocks or type(x) is not Tensor or x.numel() == 0 or (channels - x.shape[1]) % len(blocks):
        return None
    room = joint.room_like(x, channels)
    torch.ops.torch_fastdet.sum_slices([x], room.narrow(1, 0, x.shape[1]))
    y = block.sc(_filled(room, x, x, x.shape[1], blocks))
    return block.ec, _begun(block.ec, y), x if block.add else None


def _split(cv1: Block, x: Tensor, channels: int, half: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor of ``channels`` that begins with the result of ``cv1`` for x of its convolution, and twice a copy of that's last ``half``."""
    if cv1.training:
        return joint.NormSplit.apply(x, channels, cv1.bn, _options(cv1.bn, cv1.act), cv1.bn.weight, cv1.bn.bias)
    room, last = joint.room_like(x, channels), joint.room_like(x, half)
    _write(cv1, x, room, None, last)
    return room, last, last


def _chain(parts: list[Tensor], blocks: Sequence[nn.Module]) -> Tensor:
    for block in blocks:
        parts.append(block(parts[-1]))
    return torch.cat(parts, 1)


def blocks_of_one_input(blocks: Sequence[Block], x: Tensor) -> dict[nn.Module, Tensor]:
    """Return what those of the blocks whose convolutions were joined make of x, by one convolution; nothing where there is none."""
    joined = [b for b in blocks if isinstance(getattr(b, "conv", None), nn.Module) and joint.JOINT in vars(b.conv)]
    if not joined or not all(map(_is_conv, joined)):
        return {}
    return dict(zip(joined, _jointly(joined, x, [0] * len(joined)) or ()))


def convolutions_of_one_input(model: nn.Module) -> Iterator[list[nn.Conv2d]]:
    """Return convolutions that read one tensor: of ``OF_ONE_INPUT``, and of ``cv1`` and ``cv2`` where the forward is one of
    :func:`c3_forward`."""
    modules: list[Block] = list(model.modules())
    groups = [blocks for module in modules for blocks in vars(module).get(joint.OF_ONE_INPUT, [])]
    for blocks in groups + [[block.cv1, block.cv2] for block in modules if _made_by(c3_forward, block)]:
        convs = [getattr(block, "conv", None) for block in blocks]
        yield [conv for conv in convs if isinstance(conv, nn.Conv2d)]


def window_of(pool: nn.Module) -> int:
    """Return the side of the window of a max pooling of stride 1 that the operators know, unobserved; 0 for another module."""
    if type(pool) is not nn.MaxPool2d or not private.runs_plainly(pool, _FORWARDS[nn.MaxPool2d]):
        return 0
    size = pool.kernel_size
    known = (pool.stride, pool.dilation) == (1, 1) and not pool.return_indices
    return size if type(size) is int and size <= 15 and known else 0


def can_pool(pool: Block) -> bool:
    """Return whether this is a max pooling that :func:`torch_fastdet.ops.max_pools_cat` knows, unobserved."""
    size = window_of(pool)
    keeps_size = size % 2 == 1 and pool.padding == size // 2 and not pool.ceil_mode
    return keeps_size and fuses() and not is_watched()


def _pooled(cv1: Block, pool: Block, pools: int, x: Tensor) -> Tensor:
    """Return the concatenation of ``cv1(x)`` and of ``pools`` poolings, each of the one before it."""
    if not cv1.training and _is_conv(cv1):
        y = _begun(cv1, x)
        room = joint.room_like(y, y.shape[1] * (pools + 1))
        if _goes_into(room, cv1, y, None):
            torch.ops.torch_fastdet.max_pools_(_into(room, 0, cv1, y, None), pool.kernel_size, pools)
            return room
        y = _finished(cv1, y)
    else:
        y = cv1(x)
    plain = type(y) is Tensor and y.device.type in DEVICES and y.dim() == 4 and y.is_floating_point()
    return ops.max_pools_cat(y, pool.kernel_size, pools) if plain else _chain([y], [pool] * pools)


def sppf_forward(stock: Forward, elan: bool = False) -> Forward:
    """Stand in for the forward of a block that computes ``cv2(cat((y, m(y), m(m(y)), ...)))`` of ``y = cv1(x)``.

    There are ``n`` poolings, or three, and x is added if the block has ``add``. ``elan`` is for blocks whose poolings are ``cv2``, ``cv3`` and
    ``cv4``, with ``cv5`` behind them, in evaluation alone.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        last = self.cv5 if elan else self.cv2
        pools = [self.cv2, self.cv3, self.cv4] if elan else [self.m] * getattr(self, "n", 3)
        known = all(map(can_pool, pools)) and len({pool.kernel_size for pool in pools}) == 1
        if not known or (torch.is_grad_enabled() and (elan or not self.training)):
            return stock(self, x)
        y = _pooled(self.cv1, pools[0], len(pools), x)
        if not getattr(self, "add", False):
            return last(y)
        return last(y) + x if self.training else added(x, last, y)

    return _made(sppf_forward, forward, stock)
