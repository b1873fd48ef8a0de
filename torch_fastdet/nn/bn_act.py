"""Runs norm and activation behind a convolution as one operator, in training and in evaluation.

Where the framework has fused the norm into the convolution, its bias and the activation are that operator. The functions here make forward
methods for the frameworks' ``Conv``, ``Bottleneck``, ``C3``, ``C2f``, ``HGBlock`` and ``SPPF``. They look at the modules at each call, because
anything may have changed since the last one. What one operator cannot do with the original results and in the original order stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.private import (
    every_module_has_hooks,
    is_compiled_in_place,
    is_recorded,
    is_transforming,
    module_has_hooks,
    runs_plainly,
)
from torch_fastdet.nn.joint import (
    JOINT,
    OF_ONE_INPUT,
    Keep,
    NormInto,
    NormsOfParts,
    NormSplit,
    Options,
    Twice,
    room_like,
)
from torch_fastdet.nn.stem import convolve, convolve_squares, divided, has_stem_shape, is_stem
from torch_fastdet.nn.widened import is_slow, widened

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Hardswish: "hardswish",
    nn.Identity: "identity",
}
# Torch's own, to see whether somebody has put another one on the class.
_KINDS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.Sequential, *ACTIVATIONS)
_FORWARDS = {kind: kind.forward for kind in _KINDS}
# The operator is faster on these.
DEVICES = ("cuda",)
# Channels of half precision that one access moves: slices of other numbers of channels are copied one by one.
_VECTOR = 8

Forward = Callable[..., Tensor]
Block: TypeAlias = Any  # a module of a framework, such as its Conv
# Attribute of every forward that conv_forward() and c3_forward() made: the name of the function that made it.
_MADE_BY = "made_by"
# An entry for each captured() that a thread is inside of.
_capturing: list[None] = []


def is_watched() -> bool:
    """Return whether something sees each module's call, or records a program that has to run without us."""
    return every_module_has_hooks() or is_recorded() or is_transforming()


def _made_by(maker: Callable[..., Forward], block: Block) -> bool:
    return getattr(type(block).forward, _MADE_BY, None) is maker


def is_captured() -> bool:
    return bool(_capturing)


def fuses() -> bool:
    """Return whether blocks are fused in the call that runs now.

    An eager call of a fused block keeps the host longer than its modules do. ``cuda_graph`` puts :func:`is_captured` in the place of this
    function: its models run as the original's wherever they do not run in graphs.
    """
    return True


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Mark calls inside as captured, or as having to give what a replay gives."""
    _capturing.append(None)
    try:
        yield
    finally:
        _capturing.pop()


def can_fuse(norm: nn.Module, act: nn.Module) -> bool:
    """Return whether norm and activation are ones that :func:`torch_fastdet.ops.bn_act` knows, in training, and unobserved."""
    return (
        fuses()
        and type(norm) is nn.BatchNorm2d
        and type(act) in ACTIVATIONS
        and norm.training
        and (norm.momentum is not None or not norm.track_running_stats)
        and runs_plainly(norm, _FORWARDS[nn.BatchNorm2d])
        and runs_plainly(act, _FORWARDS[type(act)])
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


def _is_evaluated(block: Block) -> bool:
    """Return whether a block in evaluation is a convolution and what :func:`_write` does behind it, unobserved and without a gradient."""
    norm, act = getattr(block, "bn", None), block.act
    return (
        fuses()
        and not (block.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        and _is_plain(block.conv)
        and block.conv.weight.device.type in DEVICES
        and type(act) in ACTIVATIONS
        and runs_plainly(act, _FORWARDS[type(act)])
        and (norm is None or (type(norm) is nn.BatchNorm2d and runs_plainly(norm, _FORWARDS[nn.BatchNorm2d])))
        and (norm is None or (not norm.training and norm.running_mean is not None))
        and not is_watched()
    )


def _is_plain(conv: nn.Module) -> bool:
    """Return whether this is a convolution whose bias can be added later."""
    return (
        type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and (conv.bias is None or conv.bias.dtype == conv.weight.dtype)
        and runs_plainly(conv, _FORWARDS[nn.Conv2d])
    )


def convolved(branch: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a branch makes of x but for the bias of the convolution that it ends in, and that bias; its result and None otherwise."""
    if type(branch) is not nn.Sequential or not len(branch) or not runs_plainly(branch, _FORWARDS[nn.Sequential]):
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
    """Return the block's result, plus ``shortcut``, for x of :func:`_begun`; in evaluation in :func:`_place`. Ask :func:`_ends_in` first."""
    if block.training:
        return norm_and_activation(block.bn, block.act, x, shortcut)
    if not _fits_evaluated(x, block):
        norm, bias = getattr(block, "bn", None), block.conv.bias
        if norm is not None:
            x = norm(x)
        elif bias is not None:
            x = x + bias[:, None, None]
        y = block.act(x)
        return y if shortcut is None else shortcut + y
    added, place = shortcut is not None and _is_added(shortcut, x), _place(block, x)
    _write(block, x, place, shortcut if added else None)
    return place if added or shortcut is None else shortcut + place


def _place(block: Block, x: Tensor) -> Tensor:
    """Return where an evaluated block's result for x may be written: x, or a tensor without the channels that :func:`widened` adds."""
    return room_like(x, x.shape[1]) if is_slow(block.conv, x.dtype) else x


def _is_added(shortcut: Tensor | None, x: Tensor) -> bool:
    return shortcut is None or (shortcut.dtype == x.dtype and shortcut.shape == x.shape)


def norm_and_activation(norm: nn.BatchNorm2d, act: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """Return ``act(norm(x))``, plus ``shortcut``: one operator where that is possible, the modules where not. Ask can_fuse first."""
    if not _fits(x, norm):
        y = act(norm(x))
        return y if shortcut is None else shortcut + y
    add = shortcut is not None and _is_added(shortcut, x)
    tracked = norm.track_running_stats
    y = ops.bn_act(
        x,
        norm.weight,
        norm.bias,
        norm.running_mean if tracked else None,
        norm.running_var if tracked else None,
        norm.num_batches_tracked if tracked else None,
        norm.momentum or 0.0,
        norm.eps,
        ACTIVATIONS[type(act)],
        _slope(act),
        shortcut if add else None,
    )
    return y if add or shortcut is None else shortcut + y


def _options(block: Block) -> Options:
    return block.bn.momentum or 0.0, block.bn.eps, ACTIVATIONS[type(block.act)], _slope(block.act)


def _is_whole(norm: nn.BatchNorm2d) -> bool:
    """Return whether the norm has parameters, running statistics and a count of its batches."""
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return norm.track_running_stats and all(tensor is not None for tensor in tensors)


def norms_and_activations_cat(blocks: list[Block], inputs: list[Tensor], shortcut: Tensor | None = None) -> Tensor:
    """Run ``torch.cat`` of each block's ``act(bn(x))`` along the channels, the first one plus ``shortcut``.

    One operator, whose parts write straight into the concatenation, where they have the same options; else a concatenation of
    :func:`norm_and_activation`. Ask can_fuse for each block first.
    """
    norms: list[Any] = [block.bn for block in blocks]
    first = inputs[0]
    joined = (
        all(_fits(x, norm) and _is_whole(norm) for x, norm in zip(inputs, norms))
        and all(_options(block) == _options(blocks[0]) for block in blocks)
        and all(x.dtype == first.dtype and x.device == first.device for x in inputs)
        and all(x.shape[0] == first.shape[0] and x.shape[2:] == first.shape[2:] for x in inputs)
        and _is_added(shortcut, first)
    )
    if not joined:
        shortcuts = [shortcut, *[None] * (len(blocks) - 1)]
        parts = [norm_and_activation(b.bn, b.act, x, s) for b, x, s in zip(blocks, inputs, shortcuts)]
        return torch.cat(parts, 1)
    return ops.bn_act_cat(
        inputs,
        [norm.weight for norm in norms],
        [norm.bias for norm in norms],
        [norm.running_mean for norm in norms],
        [norm.running_var for norm in norms],
        [norm.num_batches_tracked for norm in norms],
        *_options(blocks[0]),
        shortcut,
    )


def _jointly(blocks: list[Block], x: Tensor, before: list[int]) -> tuple[Tensor, ...] | None:
    """Return each block's ``act(bn(conv(x)))``, with ``before[i]`` channels in front, by one convolution; None where there is none.

    Ask can_fuse for each block first.
    """
    joint = vars(blocks[0].conv).get(JOINT)
    z = None if joint is None else joint(x)
    if z is None:
        return None
    norms = [block.bn for block in blocks]
    if not all(_is_whole(norm) and _options(b) == _options(blocks[0]) for b, norm in zip(blocks, norms)):
        return None
    parts = z.detach().split([block.conv.out_channels for block in blocks], 1)
    dtypes = {(norm.weight.dtype, norm.bias.dtype) for norm in norms}
    if len(dtypes) > 1 or not all(_fits(part, norm) for part, norm in zip(parts, norms)):
        return None
    weights_and_biases = [norm.weight for norm in norms] + [norm.bias for norm in norms]
    return NormsOfParts.apply(z, before, norms, _options(blocks[0]), *weights_and_biases)


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
        return NormInto.apply(room, first, x, norm, _options(block), shortcut, norm.weight, norm.bias)
    _write(block, x, room, shortcut, first=first)
    return room


def _behind(block: Block, x: Tensor, rest: Tensor, shortcut: Tensor | None) -> Tensor:
    """Return the concatenation of the block's ``act(bn(x))``, plus ``shortcut``, and the last channels of ``rest``."""
    if _goes_into(rest, block, x, shortcut):
        return _into(rest, 0, block, x, shortcut)
    room = rest.shape[1] - x.shape[1]
    return torch.cat([norm_and_activation(block.bn, block.act, x, shortcut), rest[:, -room:]], 1)


def _made(maker: Callable[..., Forward], forward: Forward, stock: Forward) -> Forward:
    """Note what made ``forward``. TorchScript, which reads the source of what is wrapped, compiles ``stock``."""
    vars(forward).update({_MADE_BY: maker, "__wrapped__": stock})
    return forward


def conv_forward(stock: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``act(bn(conv(x)))``; ``stock`` is what it replaces."""

    def forward(self: Block, x: Tensor) -> Tensor:
        if (self.training and can_fuse(self.bn, self.act)) or _is_evaluated(self):
            return _finished(self, _begun(self, x))
        return stock(self, x)

    return _made(conv_forward, forward, stock)


def conv_forward_fuse(stock: Forward) -> Forward:
    """Stand in for what a block calls once its convolution holds the norm: ``act(conv(x))``. Instances keep it as their ``forward``."""

    def forward_fuse(self: Block, x: Tensor) -> Tensor:
        if type(self).forward_fuse is forward_fuse and not hasattr(self, "bn") and _is_evaluated(self):
            return _finished(self, _begun(self, x))
        return stock(self, x)

    return _made(conv_forward_fuse, forward_fuse, stock)


def _is_fused(block: Block) -> bool:
    """Return whether a call of the block is one of the :func:`conv_forward_fuse` that its class has now."""
    forward = getattr(vars(block).get("forward"), "__func__", None)
    return (
        getattr(forward, _MADE_BY, None) is conv_forward_fuse
        and type(block).forward_fuse is forward
        and not hasattr(block, "bn")
        and not module_has_hooks(block)
        and not is_compiled_in_place(block)
    )


def is_used(model: nn.Module) -> bool:
    """Return whether ``model`` has a block of :func:`conv_forward`. Only then may its captured steps round in other places than eager ones."""
    return any(_made_by(conv_forward, block) for block in model.modules())


def begins_with_stem(block: Block) -> bool:
    """Return whether ``block`` is one of :func:`conv_forward` with a stem's convolution, whose images may be divided on the way."""
    conv = getattr(block, "conv", None)
    return (
        _made_by(conv_forward, block)
        and runs_plainly(block, type(block).forward)
        and type(conv) is nn.Conv2d
        and has_stem_shape(conv)
    )


def forward_of_bytes(block: Block, x: Tensor) -> Tensor:
    """Return the block's result for ``x / 255``, where x is uint8; for other x its own. Ask :func:`begins_with_stem` first."""
    if x.dtype != torch.uint8:
        return type(block).forward(block, x)
    if block.training and can_fuse(block.bn, block.act) and is_stem(block.conv, x, floating=False):
        return norm_and_activation(block.bn, block.act, convolve_squares(block.conv, x))
    alike = torch.contiguous_format if block.conv.weight.is_contiguous() else torch.channels_last
    return type(block).forward(block, divided(x.contiguous(memory_format=alike)))


def _ends_in(block: Block, conv: Forward) -> bool:
    """Return whether ``block`` is a block whose forward is ``conv``, or what ``conv`` is once the norm is fused, and is one for :func:`_finished`."""
    if block.training:
        return hasattr(block, "bn") and runs_plainly(block, conv) and can_fuse(block.bn, block.act)
    if type(block).forward is not conv or torch.is_grad_enabled():
        return False
    return (_is_fused(block) or (hasattr(block, "bn") and runs_plainly(block, conv))) and _is_evaluated(block)


def _ends_plainly(block: Block, forward: Forward, end: str, conv: Forward) -> bool:
    """Return whether ``block`` is one whose forward is ``forward``, and whose part ``end`` is as :func:`_ends_in` asks."""
    return runs_plainly(block, forward) and _ends_in(getattr(block, end), conv)


def bottleneck_forward(stock: Forward, conv: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``x + cv2(cv1(x)) if add else cv2(cv1(x))``.

    The sum joins the second block's norm and activation where that block's forward is ``conv``, one of :func:`conv_forward`.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        last = self.cv2
        if self.add and _ends_in(last, conv):
            return _finished(last, _begun(last, self.cv1(x)), x)
        return stock(self, x)

    return _made(bottleneck_forward, forward, stock)


def rep_conv_forward(stock: Forward, conv: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``act(conv1(x) + conv2(x))``, plus ``bn(x)`` in the sum if there is one.

    Without one, the sum joins the second block's norm where that block's forward is ``conv``, one of :func:`conv_forward`.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        last = self.conv2
        if self.bn is None and _ends_in(last, conv):
            return self.act(_finished(last, _begun(last, x), self.conv1(x)))
        return stock(self, x)

    return _made(rep_conv_forward, forward, stock)


def c3_forward(stock: Forward, conv: Forward, bottleneck: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``cv3(cat((m(cv1(x)), cv2(x)), 1))``, with bottlenecks ``m`` in a row.

    The last bottleneck and ``cv2`` write into the concatenation, where they are blocks with the forward methods ``bottleneck``
    and ``conv``. ``cv1`` and ``cv2`` are one convolution where a captured step has joined them (:mod:`torch_fastdet.nn.joint`).
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        parts = _c3_parts(self, x, conv, bottleneck)
        return stock(self, x) if parts is None else self.cv3(parts)

    return _made(c3_forward, forward, stock)


def _c3_parts(c3: Block, x: Tensor, conv: Forward, bottleneck: Forward) -> Tensor | None:
    """Return the concatenation that :func:`c3_forward`'s ``cv3`` reads; None, with nothing done, where it cannot be written in place."""
    if type(c3.m) is not nn.Sequential:
        return None
    inner: list[Block] = list(c3.m)
    last = inner[-1] if inner else None
    if not (
        last is not None
        and runs_plainly(c3.m, _FORWARDS[nn.Sequential])
        and _ends_plainly(last, bottleneck, "cv2", conv)
        and _ends_in(c3.cv2, conv)
    ):
        return None
    joint = None
    if _ends_in(c3.cv1, conv):
        joint = _jointly([c3.cv1, c3.cv2], x, [0, last.cv2.conv.out_channels])
    y = c3.cv1(x) if joint is None else joint[0]
    for block in inner[:-1]:
        y = block(y)
    shortcut = None
    if last.add:
        shortcut, y = Twice.apply(y) if last.cv2.training and _can_share(y, last.cv2.bn) else (y, y)
    deep = _begun(last.cv2, last.cv1(y))
    if joint is not None:
        return _behind(last.cv2, deep, joint[1], shortcut)
    shallow = _begun(c3.cv2, x)
    if last.cv2.training and c3.cv2.training:
        return norms_and_activations_cat([last.cv2, c3.cv2], [deep, shallow], shortcut)
    room = room_like(shallow, deep.shape[1] + shallow.shape[1])
    if not (_goes_into(room, last.cv2, deep, shortcut) and _goes_into(room, c3.cv2, shallow, None)):
        return torch.cat([_finished(last.cv2, deep, shortcut), _finished(c3.cv2, shallow)], 1)
    return _into(_into(room, 0, last.cv2, deep, shortcut), deep.shape[1], c3.cv2, shallow, None)


def c2f_forward(stock: Forward, conv: Forward, bottleneck: Forward, c3: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``cv2(cat((a, b, m[0](b), m[1](m[0](b)), ...), 1))`` of ``a, b = cv1(x).chunk(2, 1)``.

    ``cv1`` writes into the concatenation, and so does the last of ``m`` where its forward is ``bottleneck`` or ``c3``. What one more block
    reads is copied: ``b``, and the result of each of ``m`` but the last. Backward, the gradients of its readers are added in one pass.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        if type(self.m) is not nn.ModuleList or not _ends_in(self.cv1, conv):
            return stock(self, x)
        return self.cv2(_c2f_parts(self, _begun(self.cv1, x), conv, bottleneck, c3))

    return _made(c2f_forward, forward, stock)


def _c2f_parts(c2f: Block, x: Tensor, conv: Forward, bottleneck: Forward, c3: Forward) -> Tensor:
    """Return the concatenation that :func:`c2f_forward`'s ``cv2`` reads; x is the result of ``cv1``'s convolution."""
    cv1, blocks, half = c2f.cv1, list(c2f.m), x.shape[1] // 2
    fits = _can_share(x, cv1.bn) and _is_whole(cv1.bn) if cv1.training else _fits_evaluated(x, cv1)
    if not blocks or half % _VECTOR or x.shape[1] % 2 or not fits:
        return _chain(list(_finished(cv1, x).chunk(2, 1)), blocks)
    room, shortcut, y = _split(cv1, x, half * (2 + len(blocks)))
    for i, block in enumerate(blocks):
        first, added = half * (2 + i), None
        end: Block = None
        if _ends_plainly(block, bottleneck, "cv2", conv):
            end, added = block.cv2, shortcut if block.add else None
            y = _begun(end, block.cv1(y))
        elif _ends_plainly(block, c3, "cv3", conv) and (parts := _c3_parts(block, y, conv, bottleneck)) is not None:
            end = block.cv3
            y = _begun(end, parts)
        else:
            y = block(y)
        goes_into = end is not None and y.shape[1] == half and _goes_into(room, end, y, added)
        if goes_into and i == len(blocks) - 1:
            return _into(room, first, end, y, added)
        if goes_into and not end.training:
            shortcut = _place(end, y)
            _write(end, y, room, added, last=shortcut, first=first)
            y = shortcut
            continue
        if end is not None:
            y = _finished(end, y, added)
        if y.shape[1] != half or not _is_like(y, room):
            return _chain([room[:, :first], y], blocks[i + 1 :])
        room, shortcut, y = Keep.apply(room, first, y)
    return room


def hg_block_forward(stock: Forward, light: Forward | None, conv: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``ec(sc(cat((x, m[0](x), m[1](m[0](x)), ...), 1)))``, plus ``x`` if ``add``.

    In evaluation each of ``m`` writes into the concatenation where its forward is ``conv``, or where it is ``light``, which computes
    ``conv2(conv1(x))``, and that of ``conv2`` is ``conv``. The sum joins the activation of ``ec``.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        if self.training or type(self.m) is not nn.ModuleList or not _ends_in(self.ec, conv):
            return stock(self, x)
        y = _begun(self.ec, self.sc(_hg_parts(list(self.m), x, light, conv)))
        return _finished(self.ec, y, x if self.add else None)

    return _made(hg_block_forward, forward, stock)


def _hg_parts(blocks: list[Block], x: Tensor, light: Forward | None, conv: Forward) -> Tensor:
    """Return the concatenation that :func:`hg_block_forward`'s ``sc`` reads."""
    ends: list[Block] = []
    for block in blocks:
        two = light is not None and runs_plainly(block, light)
        ends.append(block.conv2 if two else block)
        if not _ends_in(ends[-1], conv):
            return _chain([x], blocks)
    y, first, room = x, x.shape[1], x
    for i, (block, end) in enumerate(zip(blocks, ends)):
        y = _begun(end, y if end is block else block.conv1(y))
        if i == 0:
            room = room_like(y, first + sum(each.conv.out_channels for each in ends))
        if not (_goes_into(room, end, y, None) and _is_like(x, room)):
            return _chain([room[:, :first] if i else x, _finished(end, y)], blocks[i + 1 :])
        if i == 0:
            torch.ops.torch_fastdet.sum_slices([x], room.narrow(1, 0, first))
        last = None if i == len(blocks) - 1 else _place(end, y)
        _write(end, y, room, None, last, first)
        first += y.shape[1]
        y = y if last is None else last
    return room


def _split(cv1: Block, x: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor of ``channels`` that begins with the result of ``cv1`` for x of its convolution, and twice a copy of that's second half."""
    if cv1.training:
        return NormSplit.apply(x, channels, cv1.bn, _options(cv1), cv1.bn.weight, cv1.bn.bias)
    room, half = room_like(x, channels), room_like(x, x.shape[1] // 2)
    _write(cv1, x, room, None, half)
    return room, half, half


def _chain(parts: list[Tensor], blocks: Sequence[nn.Module]) -> Tensor:
    for block in blocks:
        parts.append(block(parts[-1]))
    return torch.cat(parts, 1)


def blocks_of_one_input(blocks: Sequence[Block], x: Tensor) -> dict[nn.Module, Tensor]:
    """Return what those of the blocks whose convolutions were joined make of x, by one convolution; nothing where there is none."""
    joined = [b for b in blocks if isinstance(getattr(b, "conv", None), nn.Module) and JOINT in vars(b.conv)]
    if not joined or not all(_made_by(conv_forward, b) and _ends_in(b, type(b).forward) for b in joined):
        return {}
    return dict(zip(joined, _jointly(joined, x, [0] * len(joined)) or ()))


def convolutions_of_one_input(model: nn.Module) -> Iterator[list[nn.Conv2d]]:
    """Return convolutions that read one tensor: of ``OF_ONE_INPUT``, and of ``cv1`` and ``cv2`` where the forward is one of
    :func:`c3_forward`."""
    modules: list[Block] = list(model.modules())
    groups = [blocks for module in modules for blocks in vars(module).get(OF_ONE_INPUT, [])]
    for blocks in groups + [[block.cv1, block.cv2] for block in modules if _made_by(c3_forward, block)]:
        convs = [getattr(block, "conv", None) for block in blocks]
        yield [conv for conv in convs if isinstance(conv, nn.Conv2d)]


def window_of(pool: nn.Module) -> int:
    """Return the side of the window of a max pooling of stride 1 that the operators know, unobserved; 0 for another module."""
    if type(pool) is not nn.MaxPool2d or not runs_plainly(pool, _FORWARDS[nn.MaxPool2d]):
        return 0
    size = pool.kernel_size
    known = (pool.stride, pool.dilation) == (1, 1) and not pool.return_indices
    return size if type(size) is int and size <= 15 and known else 0


def can_pool(pool: Block) -> bool:
    """Return whether this is a max pooling that :func:`torch_fastdet.ops.max_pools_cat` knows, unobserved."""
    size = window_of(pool)
    keeps_size = size % 2 == 1 and pool.padding == size // 2 and not pool.ceil_mode
    return keeps_size and fuses() and not is_watched()


def _pooled(cv1: Block, pool: Block, pools: int, x: Tensor, conv: Forward) -> Tensor:
    """Return the concatenation of ``cv1(x)`` and of ``pools`` poolings, each of the one before it."""
    if pools > 0 and not cv1.training and _ends_in(cv1, conv):
        y = _begun(cv1, x)
        room = room_like(y, y.shape[1] * (pools + 1))
        if _goes_into(room, cv1, y, None):
            torch.ops.torch_fastdet.max_pools_(_into(room, 0, cv1, y, None), pool.kernel_size, pools)
            return room
        y = _finished(cv1, y)
    else:
        y = cv1(x)
    plain = type(y) is Tensor and y.device.type in DEVICES and y.dim() == 4 and y.is_floating_point()
    return ops.max_pools_cat(y, pool.kernel_size, pools) if plain and pools > 0 else _chain([y], [pool] * pools)


def sppf_forward(stock: Forward, counts: bool, conv: Forward) -> Forward:
    """Stand in for the forward of a block that computes ``cv2(cat((y, m(y), m(m(y)), ...)))`` of ``y = cv1(x)``.

    Args:
        stock: the forward that it replaces.
        counts: whether the block has a number of poolings ``n`` and a shortcut ``add``, as Ultralytics' has; without them there
            are three poolings and no shortcut.
        conv: the forward of its ``cv1`` and ``cv2``, one of :func:`conv_forward`.
    """

    def forward(self: Block, x: Tensor) -> Tensor:
        if not (self.training or not torch.is_grad_enabled()) or not can_pool(self.m):
            return stock(self, x)
        pools, added = (getattr(self, "n", 3), getattr(self, "add", False)) if counts else (3, False)
        y = _pooled(self.cv1, self.m, pools, x, conv)
        if added and not self.training and _ends_in(self.cv2, conv):
            return _finished(self.cv2, _begun(self.cv2, y), x)
        y = self.cv2(y)
        return y + x if added else y

    return _made(sppf_forward, forward, stock)
