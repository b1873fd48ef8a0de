"""MuSGD, the optimizer that Ultralytics takes for long trainings: orthogonalised momentum beside SGD."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_fastdet._graph import Graph
from torch_fastdet._multi_tensor import new_state
from torch_fastdet.optim._watch import HAS_MOMENTUM, MOVED_SGD, MUON, NESTEROV, Binding, BoundOptimizer, Numbers, gather

__all__ = ["MuSGD"]

LOGGER = logging.getLogger(__name__)

MUON_BUFFER, SGD_BUFFER = "momentum_buffer", "momentum_buffer_SGD"
# Newton-Schulz: X <- a X + (b A + c A A) X with A = X X', which drives the singular values of X towards 1.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
STREAMS = 16
# Operations that padding may add to save a batch: about what an H200 makes in the time by which a batch prolongs the graph.
PADDING = 4_000_000_000


class _Piece:
    """Matrices of one shape, side by side in flat buffers."""

    def __init__(self, rows: int, columns: int, scale: float, members: list[int]) -> None:
        self.shape, self.scale, self.members = (len(members), rows, columns), scale, members
        self.numel = math.prod(self.shape)
        self.source: Tensor
        self.result: Tensor


class _Batch:
    """Pieces that are orthogonalised together: smaller matrices are padded with zeros, which stay zeros and change nothing."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self.shape = _joint_shape([piece.shape for piece in pieces])
        self._padded: Tensor | None = None
        if len(pieces) > 1:
            source = pieces[0].source
            self._padded = torch.zeros(self.shape, dtype=source.dtype, device=source.device)

    def _places(self, x: Tensor) -> Iterator[tuple[_Piece, Tensor]]:
        start = 0
        for piece in self.pieces:
            count, rows, columns = piece.shape
            yield piece, x[start : start + count, :rows, :columns]
            start += count

    def orthogonalize(self) -> None:
        """Five Newton-Schulz steps from the pieces' sources, in bfloat16, to their results."""
        x = self.pieces[0].source
        if self._padded is not None:
            x = self._padded
            for piece, place in self._places(x):
                place.copy_(piece.source)
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        tall = self.shape[1] > self.shape[2]
        if tall:
            x = x.transpose(-2, -1)
        for _ in range(STEPS):
            a = x @ x.transpose(-2, -1)
            b = torch.baddbmm(a, a, a, beta=B, alpha=C)
            x = torch.baddbmm(x, b, x, beta=A)
        if tall:
            x = x.transpose(-2, -1)
        for piece, place in self._places(x):
            piece.result.copy_(place)
            if piece.scale != 1.0:
                piece.result.mul_(piece.scale)


def _joint_shape(shapes: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    counts, rows, columns = zip(*shapes)
    return sum(counts), max(rows), max(columns)


def _work(shape: tuple[int, int, int]) -> int:
    """Floating-point operations of a batch."""
    count, short, long = shape[0], min(shape[1:]), max(shape[1:])
    return STEPS * count * (4 * short * short * long + 2 * short**3)


def _as_rows(matrix: Tensor, like: Tensor) -> Tensor:
    """A (rows, columns) matrix as a tensor with the shape of ``like``, whose columns follow the memory order of ``like``."""
    if not like.is_contiguous() and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return matrix.view(n, h, w, c).permute(0, 3, 1, 2)
    return matrix.view(like.shape)


class _Muon:
    """Orthogonalises updates of these shapes: one flat buffer that they are copied into, one that holds the results.

    On a GPU the third and later calls replay one CUDA graph, whatever gradients there are. Small products leave most of a GPU idle,
    so that there (``pad``) matrices of similar shapes share a batch.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype, pad: bool) -> None:
        self.key = [self._stamp(p) for p in params]
        pieces = _pieces(params)
        device = params[0].device
        total = sum(piece.numel for piece in pieces)
        self._source = torch.zeros(total, dtype=torch.bfloat16, device=device)
        self._result = torch.empty(total, dtype=dtype, device=device)
        self.inputs: list[Tensor] = [torch.Tensor()] * len(params)
        self.updates: list[Tensor] = [torch.Tensor()] * len(params)
        start = 0
        for piece in pieces:
            end = start + piece.numel
            piece.source, piece.result = (flat[start:end].view(piece.shape) for flat in (self._source, self._result))
            for slot, index in enumerate(piece.members):
                self.inputs[index] = _as_rows(piece.source[slot], params[index])
                self.updates[index] = _as_rows(piece.result[slot], params[index])
            start = end
        self.batches = _batches(pieces, PADDING if pad else -1)
        self._calls = 0
        self._graph: Graph | None = None

    @staticmethod
    def _stamp(p: Tensor) -> tuple:
        return tuple(p.shape), p.stride(), p.device, p.dtype

    def fits(self, params: list[Tensor]) -> bool:
        return len(params) == len(self.key) and all(self._stamp(p) == known for p, known in zip(params, self.key))

    def run(self) -> None:
        """From ``inputs`` to ``updates``."""
        self._calls += 1
        if not self._source.is_cuda or torch.cuda.is_current_stream_capturing():
            self._compute()
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
            if self._calls == 2:  # the first call has set up cuBLAS
                self._graph = self._capture()

    def _capture(self) -> Graph | None:
        streams = _capture_streams(self._source.device)
        graph = Graph(*streams)
        try:
            # Other threads, such as a loader's, may use CUDA meanwhile.
            with torch.cuda.graph(graph.held, stream=streams[-1], capture_error_mode="thread_local"):
                self._compute()
        except RuntimeError as error:
            LOGGER.warning("torch_fastdet: MuSGD goes on without a CUDA graph: %s", str(error).split("\n")[0])
            return None
        return graph

    def _compute(self) -> None:
        if self._source.is_cuda and torch.cuda.is_current_stream_capturing():
            # Small batches leave most of the GPU idle: let several run at a time.
            current = torch.cuda.current_stream(self._source.device)
            streams = _capture_streams(self._source.device)[: min(STREAMS, len(self.batches))]
            for stream in streams:
                stream.wait_stream(current)
            for turn, batch in enumerate(self.batches):
                with torch.cuda.stream(streams[turn % len(streams)]):
                    batch.orthogonalize()
            for stream in streams:
                current.wait_stream(stream)
        else:
            for batch in self.batches:
                batch.orthogonalize()


@functools.cache
def _capture_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Side streams, and the captures' own behind them.

    The same for every capture: torch hands out 32 streams in turn, and others would soon be those of a loader's thread.
    """
    return [torch.cuda.Stream(device) for _ in range(STREAMS + 1)]


def _pieces(params: list[Tensor]) -> list[_Piece]:
    """The parameters' matrices by shape."""
    buckets: dict[tuple[int, int, float], list[int]] = {}
    for index, p in enumerate(params):
        scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
        buckets.setdefault((p.size(0), p.numel() // p.size(0), scale), []).append(index)
    return [_Piece(rows, columns, scale, members) for (rows, columns, scale), members in buckets.items()]


def _batches(pieces: list[_Piece], padding: int) -> list[_Batch]:
    """Batches of pieces, those with most work first. Two are joined where padding adds no more operations than ``padding``."""
    groups = [[piece] for piece in pieces]

    def added(left: list[_Piece], right: list[_Piece]) -> int:
        joint, *apart = ([piece.shape for piece in group] for group in (left + right, left, right))
        return _work(_joint_shape(joint)) - sum(_work(_joint_shape(shapes)) for shapes in apart)

    while len(groups) > 1:
        least, i, j = min((added(groups[i], groups[j]), i, j) for j in range(len(groups)) for i in range(j))
        if least > padding:
            break
        groups[i] += groups.pop(j)
    return sorted((_Batch(group) for group in groups), key=lambda batch: -_work(batch.shape))


class MusgdBinding(Binding):
    """Two MultiTensorStates a device: of all parameters, for SGD, and of those with ``use_muon``, for Muon's momentum.

    A step is one launch for the momentum, which writes what is to be orthogonalised, Newton-Schulz, and one launch that moves
    each matrix along its result and then takes SGD's step.
    """

    name = "MuSGD"
    buffer_names = (MUON_BUFFER, SGD_BUFFER)

    @staticmethod
    def tensors_of(group: dict[str, Any]) -> tuple[Any, ...]:
        return group["lr"], group["momentum"], group["weight_decay"]

    @staticmethod
    def numbers(optimizer: Any, device: torch.device) -> Numbers:
        groups: list[tuple[list[float | Tensor], int]] = []
        for group in optimizer.param_groups:
            lr, along = group["lr"], 0.0
            if group["use_muon"]:
                lr, along = lr * optimizer.sgd, -(lr * optimizer.muon)
            flags = NESTEROV * bool(group["nesterov"]) + HAS_MOMENTUM
            groups.append(([lr, group["momentum"], 0.0, group["weight_decay"], along], flags))
        return gather(groups, device)

    def __init__(self, optimizer: Any, make_state: Callable[[list[Tensor], list[int], list[int]], Any]) -> None:
        self.matrices: dict[torch.device, list[int]] = {}  # by their place among the parameters
        self.muons: dict[torch.device, dict[torch.dtype, _Muon]] = {}
        self.muon_states: dict[torch.device, Any] = {}
        self.sharing: set[torch.device] = set()  # devices whose two states share what the reduction found
        place = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                if group["use_muon"] and p.dim() < 2:
                    raise ValueError(
                        f"MuSGD: use_muon is True for a parameter of shape {list(p.shape)}, but two or more dimensions are wanted"
                    )
                if group["use_muon"] and p.numel():
                    self.matrices.setdefault(p.device, []).append(place)
                place += 1
        self.own_groups = [bool(group["use_muon"]) for group in optimizer.param_groups]
        super().__init__(optimizer, make_state)

    def is_current(self) -> bool:
        if [bool(group["use_muon"]) for group in self.optimizer.param_groups] != self.own_groups:
            return False
        return super().is_current() and all(
            muon.fits([self.params[i] for i in self._of_type(device, dtype)])
            for device, muons in self.muons.items()
            for dtype, muon in muons.items()
        )

    def _of_type(self, device: torch.device, dtype: torch.dtype) -> list[int]:
        return [i for i in self.matrices[device] if self.params[i].dtype == dtype]

    def make_buffers(self) -> None:
        state = self.optimizer.state
        if self.complete and self.same_buffers():
            return
        with torch.inference_mode(False), torch.no_grad():  # later steps write into them
            matrices = {id(p) for group in self.optimizer.param_groups if group["use_muon"] for p in group["params"]}
            for p in self.lacking():
                state[p][MUON_BUFFER] = torch.zeros_like(p)
                if id(p) in matrices:
                    state[p][SGD_BUFFER] = torch.zeros_like(p)
        self.take_buffers()

    def _hand_over(self) -> None:
        groups = self.optimizer.param_groups
        muon_group = [group["use_muon"] for group in groups for _ in group["params"]]
        along: dict[int, Tensor] = {}
        for device, at in self.matrices.items():
            orthogonal = self.muons.setdefault(device, {})
            inputs: dict[int, Tensor] = {}
            for dtype in dict.fromkeys(self.params[i].dtype for i in at):
                mine = self._of_type(device, dtype)
                if dtype not in orthogonal:
                    orthogonal[dtype] = _Muon([self.params[i] for i in mine], dtype, device.type == "cuda")
                inputs.update(zip(mine, orthogonal[dtype].inputs))
                along.update(zip(mine, orthogonal[dtype].updates))
            if device not in self.muon_states:
                owner = [index for index, group in enumerate(groups) for _ in group["params"]]
                self.muon_states[device] = new_state("MuSGD", [self.params[i] for i in at], [owner[i] for i in at], at)
            self.muon_states[device].set_buffers(MUON, self._found(MUON_BUFFER, at), [inputs[i] for i in at], [])
        for device, at in self.places.items():
            buffers = [self._found(SGD_BUFFER if muon_group[i] else MUON_BUFFER, [i])[0] for i in at]
            self.states[device].set_buffers(MOVED_SGD, buffers, [along.get(i) for i in at], [])

    def before_update(
        self,
        device: torch.device,
        numbers: Numbers,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        reduced: bool = False,
    ) -> None:
        if device not in self.muon_states:
            return
        if reduced and device not in self.sharing:
            self.sharing.add(device)
            self.muon_states[device].set_workspace(self.states[device].workspace())
        self.muon_states[device].step_(*numbers, grad_scale, found_inf, reduced)
        for muon in self.muons[device].values():
            muon.run()


class MuSGD(BoundOptimizer):
    """``ultralytics.optim.MuSGD`` with few launches: momentum and SGD of all groups are one each, Newton-Schulz a CUDA graph.

    Arguments, results and state_dict (both ways) are those of Ultralytics' class. In a group with ``use_muon`` each parameter,
    a matrix or a convolution's weight, moves by its orthogonalised momentum times ``lr * muon``, then by SGD with ``lr * sgd``;
    the other groups have SGD with ``lr``.

    Matrices of one shape are batched and go through stock's bfloat16 products; momentum and SGD are stock's arithmetic in
    float32. Beside Newton-Schulz a step is two launches. With GradScaler, overflow is decided on the device: a skipped step
    writes nothing, and no step waits for the GPU. lr, momentum and weight_decay may be one-element tensors on the parameters'
    device, which a captured step follows. In a CUDA graph capture, take one step before it.

    Raises:
        ValueError: a parameter of a group with ``use_muon`` has less than two dimensions; at the step.
    """

    _binding_class = MusgdBinding

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        use_muon: bool = False,
        muon: float = 0.5,
        sgd: float = 0.5,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "use_muon": use_muon,
        }
        super().__init__(params, defaults)
        self.muon = muon
        self.sgd = sgd

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "muon": self.muon, "sgd": self.sgd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._binding = None
