"""Averages gradients and sends buffers between processes, as DistributedDataParallel does, on flat memory.

A replayed backward pass runs no hooks. So all gradients of a dtype lie in one flat tensor, which is averaged over the ranks behind the
backward pass, without a host sync. Nothing of NCCL is captured: ranks that run eagerly exchange the same tensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_fastdet._torch import private
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet._torch.tensors import Walk, same_objects

#: Gradients begin at multiples of this many bytes: fused kernels read 16 at once, and caches have lines of 128.
ALIGNMENT = 128
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def training_group(process_group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group that trains: the one given, else the default group where that has several ranks, else None."""
    if not private.in_group():
        if process_group is not None:
            raise RuntimeError("process_group is given, but torch.distributed.init_process_group was not called")
        return None
    if process_group is None:
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    if dist.get_rank(process_group) < 0:
        raise ValueError("process_group: this process is not a member of the group")
    return process_group


def _wait(work: Any) -> None:
    """Make the current stream wait. ``work.wait()`` would make the host wait under TORCH_NCCL_BLOCKING_WAIT, which Ultralytics sets."""
    work.get_future().wait()


def start_alike(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give parameters and buffers the values of the group's first rank; raise RuntimeError on every rank if the models differ."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    described = "\n".join(f"{name} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}" for name, t in tensors)
    number = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "big")
    device = next((tensor.device for _, tensor in tensors), torch.device("cpu"))
    extremes = torch.tensor([number, -number], device=device)
    _wait(dist.all_reduce(extremes, dist.ReduceOp.MAX, group, async_op=True))
    largest, smallest = extremes.tolist()
    if largest != -smallest:
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: the ranks have different models; names, shapes, strides, dtypes and requires_grad "
            f"of {type(module).__name__}'s parameters and buffers must be equal on all of them"
        )
    _Packed([tensor.detach() for _, tensor in tensors], group).broadcast()


class _Packed:
    """Pack tensors of any dtype in one flat tensor of bytes, to be sent at once."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        starts, end = [], 0
        for tensor in self._tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.inference_mode(False):
            self._flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self._places = [
            self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(self._tensors, starts)
        ]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank the tensors of the group's first rank."""
        if not self._tensors:
            return
        source = dist.get_global_rank(self._group, 0)
        sends = dist.get_rank() == source
        if sends:
            _copy(self._places, self._tensors)
        _wait(dist.broadcast(self._flat, source, self._group, async_op=True))
        if not sends:
            _copy(self._tensors, self._places)


class BufferBroadcast:
    """Send the buffers of the group's first rank to all ranks.

    No training pass reads the running statistics of batch norm in training mode: each rank keeps its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._walk: Walk | None = None
        self._norms: list[nn.Module] = []
        self._own: list[bool] = []  # norms that were in training mode
        self._sent: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._send: _Packed | None = None
        self.sent = False  # since the last forward pass

    def suffices(self) -> bool:
        """Return whether the next forward pass reads nothing but what was sent: a norm that has left training mode reads its statistics."""
        return self.sent and not any(own and not norm.training for own, norm in zip(self._own, self._norms))

    def __call__(self, walk: Walk) -> None:
        if walk is not self._walk:
            self._walk, self._send = walk, None
            self._norms = [child for child in walk.submodules if isinstance(child, NORMS)]
        own = [norm.training for norm in self._norms]
        if self._send is None or own != self._own or [b.data_ptr() for b in self._sent] != self._addresses:
            kept = {id(b) for norm in self._norms if norm.training for b in norm.buffers(recurse=False)}
            self._own, self._sent = own, [b for b in walk.buffers if id(b) not in kept]
            self._addresses = [b.data_ptr() for b in self._sent]
            self._send = _Packed([b.detach() for b in self._sent], self._group)
        self._send.broadcast()
        self.sent = True


class _Flat:
    """Hold the gradients of one dtype, one behind the other, and behind them a mark for each parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], marks: int) -> None:
        first = parameters[0]
        step = max(ALIGNMENT // first.element_size(), 1)
        starts, end = [], 0
        for parameter in parameters:
            starts.append(end)
            end += -(-parameter.numel() // step) * step
        with torch.inference_mode(False):
            self.whole = torch.zeros(end + marks, dtype=first.dtype, device=first.device)
        self.gradients, self.marks = self.whole[:end], self.whole[end:]
        # Strides are the parameter's own where that has no gaps.
        alike = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self.places = [self.whole.as_strided(like.shape, like.stride(), start) for like, start in zip(alike, starts)]


class _Layout:
    """Note where each gradient lies."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        kinds: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            kinds.setdefault(parameter.dtype, []).append(index)
        self.flats: list[_Flat] = []
        places: dict[int, torch.Tensor] = {}
        for number, indices in enumerate(kinds.values()):
            marks = 0 if number else len(self.parameters)
            self.flats.append(_Flat([self.parameters[index] for index in indices], marks))
            places.update(zip(indices, self.flats[-1].places))
        self.places = [places[index] for index in range(len(self.parameters))]
        self._marks: dict[tuple[int, ...], torch.Tensor] = {}

    def marks(self, missing: tuple[int, ...]) -> torch.Tensor:
        """Return 1 for each parameter that has a gradient on this rank, 0 for those in ``missing``."""
        if missing not in self._marks:
            absent = set(missing)
            values = [float(index not in absent) for index in range(len(self.parameters))]
            with torch.inference_mode(False):
                self._marks[missing] = torch.tensor(values).to(self.flats[0].marks)
        return self._marks[missing]


def _nothing() -> None:
    pass


class GradientAverage:
    """Average all ranks' gradients by one all-reduce for each dtype: the same tensors in the same order on every rank.

    A parameter without a gradient on one rank counts as zeros there; without one on any rank it keeps none, for which a rank where gradients
    are missing waits for the GPU, as DistributedDataParallel does with ``find_unused_parameters``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self._all: list[nn.Parameter] = []
        self._seen: tuple[list[int], list[bool]] = [], []
        self._layout: _Layout | None = None
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        self._queued = False
        self._behind: Callable[[], None] = _nothing
        self._stream: torch.cuda.Stream | None = None

    def prepare(self, parameters: list[nn.Parameter]) -> None:
        """Look at a module's parameters, before a capture and before each average; those that require a gradient get their places."""
        seen = [p.data_ptr() for p in parameters], [p.requires_grad for p in parameters]
        if self._layout is None or not same_objects(self._all, parameters, len(parameters)) or seen != self._seen:
            self._all, self._seen = list(parameters), seen
            self._layout = _Layout([p for p in parameters if p.requires_grad])
            self._places = dict(zip(self._layout.parameters, self._layout.places))

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return where this parameter's gradient is averaged without being copied."""
        return self._places.get(parameter)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have a place, in the order of :meth:`exchange`."""
        return [] if self._layout is None else self._layout.parameters

    def watch(self, outputs: object, behind: Callable[[], None]) -> None:
        """Average ``p.grad`` at the end of each backward pass that comes through ``outputs``, and then call ``behind()``."""
        self._queued = False  # an earlier backward pass may have failed on its way
        self._behind = behind
        layout = self._layout
        assert layout is not None
        device = layout.flats[0].whole.device if layout.flats else torch.device("cpu")
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        for output in private.tree_flatten(outputs)[0]:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._begin)

    def _begin(self, _: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            private.at_end_of_backward(self._finish)

    def _finish(self) -> None:
        self._queued = False
        if self._stream is not None:  # the forward pass's, on which a replay wrote the gradients
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                current.wait_stream(self._stream)
        self.average()
        self._behind()

    @torch.no_grad()
    def average(self) -> None:
        """Replace each ``p.grad`` by the mean over the ranks."""
        layout = self._layout
        assert layout is not None
        if self.size == 1 or not layout.parameters:
            return
        missing: list[int] = []
        elsewhere: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for index, (parameter, place) in enumerate(zip(layout.parameters, layout.places)):
            gradient = parameter.grad
            if gradient is None:
                missing.append(index)
            elif gradient is not place and gradient.data_ptr() != place.data_ptr():
                elsewhere.append(gradient)
                places.append(place)
        if elsewhere:
            _copy(places, elsewhere)
        found = self.exchange(missing)
        if elsewhere:
            _copy(elsewhere, places)
        for index in found:
            layout.parameters[index].grad = layout.places[index]

    @torch.no_grad()
    def exchange(self, missing: Sequence[int] = ()) -> list[int]:
        """Average what lies in the places; returns those of ``missing``, by their place in :attr:`parameters`, that another rank has."""
        layout = self._layout
        assert layout is not None
        for index in missing:
            layout.places[index].zero_()
        layout.flats[0].marks.copy_(layout.marks(tuple(missing)))
        works = []
        for flat in layout.flats:
            flat.gradients.mul_(1 / self.size)  # before the sum, which may overflow
            works.append(dist.all_reduce(flat.whole, group=self.group, async_op=True))
        for work in works:
            _wait(work)
        if not missing:
            return []
        counts = layout.flats[0].marks.tolist()
        return [index for index in missing if counts[index] > 0]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    kinds: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources):
        left, right = kinds.setdefault(target.dtype, ([], []))
        left.append(target)
        right.append(source)
    for left, right in kinds.values():
        private.foreach_copy_(left, right)


class Ranks:
    """Do what surrounds the passes of one model that several ranks train: DistributedDataParallel's part of the work.

    Buffers are sent behind the gradients, while the GPU runs the backward pass; before a forward pass only where none came.
    """

    def __init__(self, group: dist.ProcessGroup, broadcast_buffers: bool = True) -> None:
        self.average = GradientAverage(group)
        self.broadcast_buffers = broadcast_buffers
        #: Whether backward passes average: that of the next forward pass, and that of the one before it.
        self.sync = self.synced = True
        self._buffers = BufferBroadcast(group)
        self._walk: Walk | None = None

    @classmethod
    def of(cls, module: nn.Module, process_group: dist.ProcessGroup | None, broadcast_buffers: bool) -> Ranks | None:
        """Return an exchange for a module whose ranks start alike from now on; None for a single process."""
        group = training_group(process_group)
        if group is None:
            return None
        start_alike(module, group)
        return cls(group, broadcast_buffers)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return own_attributes([(self, "sync", False)])

    def _look(self, module: nn.Module) -> Walk:
        walk = self._walk = Walk.renewed(self._walk, module)
        return walk

    def prepare(self, module: nn.Module) -> None:
        """Give the module's gradients their places, before they are averaged."""
        self.average.prepare(self._look(module).parameters)

    def before_forward(self, module: nn.Module) -> None:
        """Prepare a forward pass in training."""
        # The buffers are sent after a pass that averaged, as in DistributedDataParallel.
        if self.synced and not self._buffers.suffices():
            self.send_buffers(module)
        self._buffers.sent, self.synced = False, self.sync

    def passed_by(self) -> None:
        """Note a pass that ran outside of here and may have changed buffers."""
        self._buffers.sent = False

    def send_buffers(self, module: nn.Module) -> None:
        """Send buffers behind the gradients of a training pass."""
        if self._sends:
            self._buffers(self._look(module))

    @property
    def _sends(self) -> bool:
        return self.broadcast_buffers and self.average.size > 1

    def run(self, module: nn.Module, forward: Callable[[], object]) -> object:
        """Return ``forward()`` of a training pass; its backward pass averages the gradients, except inside of :meth:`no_sync`."""
        self.before_forward(module)
        outputs = forward()
        walk = self._look(module)  # now that the GPU has something to do
        self.average.prepare(walk.parameters)
        if self.sync:
            # This is neither a method of this object nor holds the module, either of which would live until the cycle collector runs.
            self.average.watch(outputs, functools.partial(self._buffers, walk) if self._sends else _nothing)
        return outputs
