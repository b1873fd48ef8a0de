"""MuSGD, the optimizer that Ultralytics takes for long trainings: orthogonalised momentum beside SGD."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
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
MOST_PADDING = 16  # how many times as many rows the largest matrix of a batch may have as the smallest
STREAMS = 4


class _Batch:
    """Matrices with equally many columns, zero-padded to equally many rows, side by side in a flat buffer."""

    def __init__(self, rows: list[int], columns: int, scale: float) -> None:
        self.rows, self.columns, self.scale = rows, columns, scale
        self.shape = (len(rows), rows[0], columns)
        self.numel = math.prod(self.shape)

    @property
    def work(self) -> int:
        count, rows, columns = self.shape
        return count * min(rows, columns) * rows * columns

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
        self._batches, order = _plan(params)
        device = params[0].device
        total = sum(batch.numel for batch in self._batches)
        # Padding stays zero: only the matrices themselves are written.
        self._source = torch.zeros(total, dtype=torch.bfloat16, device=device)
        self._target = torch.empty_like(self._source)
        self._result = torch.empty(total, dtype=dtype, device=device)
        self.inputs: list[Tensor] = [torch.Tensor()] * len(params)
        self.updates: list[Tensor] = [torch.Tensor()] * len(params)
        self._places: list[tuple[_Batch, Tensor, Tensor, Tensor]] = []
        start = 0
        for batch, members in zip(self._batches, order):
            end = start + batch.numel
            source, target, result = (
                flat[start:end].view(batch.shape) for flat in (self._source, self._target, self._result)
            )
            self._places.append((batch, source, target, result))
            for slot, index in enumerate(members):
                rows = batch.rows[slot]
                self.inputs[index] = _as_rows(source[slot, :rows], params[index])
                self.updates[index] = _as_rows(result[slot, :rows], params[index])
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
        places = sorted(self._places, key=lambda place: -place[0].work)
        if self._source.is_cuda and torch.cuda.is_current_stream_capturing():
            # Small batches leave most of the GPU idle: let several run at a time.
            current = torch.cuda.current_stream(self._source.device)
            streams = [torch.cuda.Stream(self._source.device) for _ in range(STREAMS)]
            for stream in streams:
                stream.wait_stream(current)
            for turn, (batch, source, target, _) in enumerate(places):
                with torch.cuda.stream(streams[turn % STREAMS]):
                    batch.orthogonalize(source, target)
            for stream in streams:
                current.wait_stream(stream)
        else:
            for batch, source, target, _ in places:
                batch.orthogonalize(source, target)
        self._result.copy_(self._target)
        for batch, _, _, result in places:
            if batch.scale != 1.0:
                result.mul_(batch.scale)


def _plan(params: list[Tensor]) -> tuple[list[_Batch], list[list[int]]]:
    """Batches of matrices, and the indices of the parameters in each, as stock batches them: so the products are the same."""
    buckets: dict[tuple[int, float], list[int]] = {}
    for index, p in enumerate(params):
        scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
        buckets.setdefault((p.numel() // p.size(0), scale), []).append(index)
    batches, order = [], []
    for (columns, scale), members in buckets.items():
        members.sort(key=lambda index: -params[index].size(0))
        start = 0
        for end in range(1, len(members) + 1):
            most = params[members[start]].size(0)
            if end == len(members) or most > MOST_PADDING * params[members[end]].size(0):
                batches.append(_Batch([params[i].size(0) for i in members[start:end]], columns, scale))
                order.append(members[start:end])
                start = end
    return batches, order


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

    Matrices are batched as stock batches them and go through the same bfloat16 products; momentum and SGD are stock's
    arithmetic in float32. GradScaler reads its overflow flag on the host before a step, as it does with stock.
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
                self._muon_step(index, group, found)
            params += found
            owners += [index] * len(found)
            rate = group["lr"] * self.sgd if group["use_muon"] else group["lr"]
            hyper += [float(rate), float(group["momentum"]), 0.0, float(group["weight_decay"])]
            flags.append(NESTEROV * bool(group["nesterov"]) + HAS_MOMENTUM)
        if params:
            bound = self._sgd
            if bound is None or not bound.fits(params, buffers):
                self._sgd = bound = _Sgd(params, owners, buffers)
            for state in bound.states:
                state.sgd_(hyper, [], flags, None, None)
        return loss

    def _muon_step(self, index: int, group: dict[str, Any], params: list[Tensor]) -> None:
        """Momentum, its orthogonalisation, and the move along it."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in params:
            if p.dim() < 2:
                raise ValueError(
                    f"MuSGD: use_muon is True for a parameter of shape {list(p.shape)}, but two or more dimensions are wanted"
                )
            kinds.setdefault((p.device, p.dtype), []).append(p)
        beta = group["momentum"]
        for kind, members in kinds.items():
            grads: Any = [p.grad for p in members]
            momentums = [self.state[p][MUON_BUFFER] for p in members]
            foreach_mul_(momentums, beta)
            foreach_add_(momentums, grads, alpha=1 - beta)
            updates = momentums
            if group["nesterov"]:
                updates = foreach_mul(momentums, beta)
                foreach_add_(updates, grads, alpha=1 - beta)
            muon = self._muons.get((index, kind))
            if muon is None or not muon.fits(members):
                self._muons[index, kind] = muon = _Muon(members, grads[0].dtype)
            foreach_copy_(muon.inputs, updates)
            muon.run()
            foreach_add_(members, muon.updates, alpha=-(group["lr"] * self.muon))
