"""MuSGD, the optimizer that Ultralytics takes for long trainings: orthogonalised momentum beside SGD."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fastdet._multi_tensor import by_device, new_state, same_objects
from torch_fastdet._private import foreach_add_, foreach_copy_, foreach_mul, foreach_mul_

__all__ = ["MuSGD"]

LOGGER = logging.getLogger(__name__)

MUON_BUFFER, SGD_BUFFER = "momentum_buffer", "momentum_buffer_SGD"
NESTEROV, HAS_MOMENTUM = 1, 4  # flags of MultiTensorState.sgd_
# Newton-Schulz: X <- a X + (b A + c A A) X with A = X X', which drives the singular values of X towards 1.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
STREAMS = 8


class _Batch:
    """Matrices of one shape, side by side in a flat buffer."""

    def __init__(self, rows: int, columns: int, scale: float, members: list[int]) -> None:
        self.shape, self.scale, self.members = (len(members), rows, columns), scale, members
        self.numel = math.prod(self.shape)

    @property
    def work(self) -> int:
        return self.numel * min(self.shape[1:])

    def orthogonalize(self, source: Tensor, target: Tensor) -> None:
        """Five Newton-Schulz steps from ``source`` to ``target``, both of this batch's shape in bfloat16."""
        x = source / (source.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        tall = self.shape[1] > self.shape[2]
        if tall:
            x = x.transpose(-2, -1)
        for _ in range(STEPS):
            a = x @ x.transpose(-2, -1)
            b = torch.baddbmm(a, a, a, beta=B, alpha=C)
            x = torch.baddbmm(x, b, x, beta=A)
        target.copy_(x.transpose(-2, -1) if tall else x)


def _as_rows(matrix: Tensor, like: Tensor) -> Tensor:
    """A (rows, columns) matrix as a tensor with the shape of ``like``, whose columns follow the memory order of ``like``."""
    if not like.is_contiguous() and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return matrix.view(n, h, w, c).permute(0, 3, 1, 2)
    return matrix.view(like.shape)


class _Muon:
    """Orthogonalises updates of these shapes: one flat buffer that they are copied into, one that holds the results.

    On a GPU the third and later calls replay one CUDA graph, whatever gradients there are.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype) -> None:
        self.key = [self._stamp(p) for p in params]
        batches = _plan(params)
        device = params[0].device
        total = sum(batch.numel for batch in batches)
        self._source = torch.empty(total, dtype=torch.bfloat16, device=device)
        self._target = torch.empty_like(self._source)
        self._result = torch.empty(total, dtype=dtype, device=device)
        self.inputs: list[Tensor] = [torch.Tensor()] * len(params)
        self.updates: list[Tensor] = [torch.Tensor()] * len(params)
        self._places: list[tuple[_Batch, Tensor, Tensor, Tensor]] = []
        start = 0
        for batch in batches:
            end = start + batch.numel
            source, target, result = (
                flat[start:end].view(batch.shape) for flat in (self._source, self._target, self._result)
            )
            self._places.append((batch, source, target, result))
            for slot, index in enumerate(batch.members):
                self.inputs[index] = _as_rows(source[slot], params[index])
                self.updates[index] = _as_rows(result[slot], params[index])
            start = end
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

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

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as a loader's, may use CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._compute()
        except RuntimeError as error:
            LOGGER.warning("torch_fastdet: MuSGD goes on without a CUDA graph: %s", str(error).split("\n")[0])
            return None
        return graph

    def _compute(self) -> None:
        if self._source.is_cuda and torch.cuda.is_current_stream_capturing():
            # Small batches leave most of the GPU idle: let several run at a time.
            current = torch.cuda.current_stream(self._source.device)
            streams = [torch.cuda.Stream(self._source.device) for _ in range(STREAMS)]
            for stream in streams:
                stream.wait_stream(current)
            for turn, (batch, source, target, _) in enumerate(self._places):
                with torch.cuda.stream(streams[turn % STREAMS]):
                    batch.orthogonalize(source, target)
            for stream in streams:
                current.wait_stream(stream)
        else:
            for batch, source, target, _ in self._places:
                batch.orthogonalize(source, target)
        self._result.copy_(self._target)
        for batch, _, _, result in self._places:
            if batch.scale != 1.0:
                result.mul_(batch.scale)


def _plan(params: list[Tensor]) -> list[_Batch]:
    """Batches of the parameters' matrices, those with most work first."""
    buckets: dict[tuple[int, int, float], list[int]] = {}
    for index, p in enumerate(params):
        scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
        buckets.setdefault((p.size(0), p.numel() // p.size(0), scale), []).append(index)
    batches = [_Batch(rows, columns, scale, members) for (rows, columns, scale), members in buckets.items()]
    return sorted(batches, key=lambda batch: -batch.work)


@dataclass
class _Move:
    """Parameters of a group, what to orthogonalise for each, and how far to go along that."""

    params: list[Tensor]
    updates: list[Tensor]
    rate: float


class _Sgd:
    """One MultiTensorState a device over all parameters that have a gradient, and its momentum buffers."""

    def __init__(self, params: list[Tensor], owners: list[int], buffers: list[Tensor]) -> None:
        self.params, self.buffers = params, buffers
        self.states = []
        for at in by_device(params).values():
            state = new_state("MuSGD", [params[i] for i in at], [owners[i] for i in at], at)
            state.set_momentum_buffers([buffers[i] for i in at])
            self.states.append(state)

    def fits(self, params: list[Tensor], buffers: list[Tensor]) -> bool:
        return same_objects(self.params, params, len(params)) and same_objects(self.buffers, buffers, len(buffers))


class MuSGD(torch.optim.Optimizer):
    """``ultralytics.optim.MuSGD`` with few launches: the SGD of all groups is one, Newton-Schulz a CUDA graph.

    Arguments, results and state_dict (both ways) are those of Ultralytics' class. In a group with ``use_muon`` each parameter,
    a matrix or a convolution's weight, moves by its orthogonalised momentum times ``lr * muon``, then by SGD with ``lr * sgd``;
    the other groups have SGD with ``lr``.

    Matrices of one shape are batched and go through stock's bfloat16 products; momentum and SGD are stock's arithmetic in
    float32. GradScaler reads its overflow flag on the host before a step, as it does with stock.
    """

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
        self._forget()

    def _forget(self) -> None:
        self._muons: dict[Any, _Muon] = {}
        self._sgd: _Sgd | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "muon": self.muon, "sgd": self.sgd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params: list[Tensor] = []
        owners: list[int] = []
        buffers: list[Tensor] = []
        hyper: list[float] = []
        flags: list[int] = []
        moves: list[_Move] = []
        for index, group in enumerate(self.param_groups):
            found = [p for p in group["params"] if p.grad is not None]
            name = SGD_BUFFER if group["use_muon"] else MUON_BUFFER
            for p in found:
                state = self.state[p]
                if len(state) == 0:
                    state[MUON_BUFFER] = torch.zeros_like(p)
                    if group["use_muon"]:
                        state[SGD_BUFFER] = torch.zeros_like(p)
                buffers.append(state[name])
            if group["use_muon"] and found:
                moves.append(self._momentum(group, found))
            params += found
            owners += [index] * len(found)
            rate = group["lr"] * self.sgd if group["use_muon"] else group["lr"]
            hyper += [float(rate), float(group["momentum"]), 0.0, float(group["weight_decay"])]
            flags.append(NESTEROV * bool(group["nesterov"]) + HAS_MOMENTUM)
        self._move(moves)
        if params:
            bound = self._sgd
            if bound is None or not bound.fits(params, buffers):
                self._sgd = bound = _Sgd(params, owners, buffers)
            for state in bound.states:
                state.sgd_(hyper, [], flags, None, None)
        return loss

    def _momentum(self, group: dict[str, Any], params: list[Tensor]) -> _Move:
        """The momentum of a group's parameters, one step on, and how far to go along its orthogonalisation."""
        for p in params:
            if p.dim() < 2:
                raise ValueError(
                    f"MuSGD: use_muon is True for a parameter of shape {list(p.shape)}, but two or more dimensions are wanted"
                )
        beta = group["momentum"]
        grads: Any = [p.grad for p in params]
        updates = [self.state[p][MUON_BUFFER] for p in params]
        foreach_mul_(updates, beta)
        foreach_add_(updates, grads, alpha=1 - beta)
        if group["nesterov"]:
            updates = foreach_mul(updates, beta)
            foreach_add_(updates, grads, alpha=1 - beta)
        return _Move(params, updates, -(group["lr"] * self.muon))

    def _move(self, moves: list[_Move]) -> None:
        """Orthogonalise the momenta of all groups together, and move each group along them."""
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor, float]]] = {}
        for move in moves:
            for p, update in zip(move.params, move.updates):
                kinds.setdefault((p.device, p.dtype), []).append((p, update, move.rate))
        for kind, entries in kinds.items():
            params, updates = [p for p, _, _ in entries], [update for _, update, _ in entries]
            muon = self._muons.get(kind)
            if muon is None or not muon.fits(params):
                self._muons[kind] = muon = _Muon(params, kind[1])
            foreach_copy_(muon.inputs, updates)
            muon.run()
            for rate in dict.fromkeys(rate for _, _, rate in entries):
                at = [i for i, entry in enumerate(entries) if entry[2] == rate]
                foreach_add_([params[i] for i in at], [muon.updates[i] for i in at], alpha=rate)
