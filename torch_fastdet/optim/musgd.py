"""Implements MuSGD, the optimizer that Ultralytics takes for long trainings: orthogonalized momentum beside SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_fastdet._torch.tensors import new_state
from torch_fastdet.optim import _watch

MUON_BUFFER, SGD_BUFFER = "momentum_buffer", "momentum_buffer_SGD"
# Newton-Schulz: X <- a X + (b G + c G G) X with the Gram matrix G = X X', which drives the singular values of X towards 1. The
# polynomial and its coefficients are those of Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).
A, B, C = 3.4445, -4.7750, 2.0315
STEPS, EPS = 5, 1e-7


def _as_rows(matrix: Tensor, like: Tensor) -> Tensor:
    """Return a (rows, columns) matrix as a tensor with the shape of ``like``, whose columns follow the memory order of ``like``."""
    if not like.is_contiguous() and like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        n, c, h, w = like.shape
        return matrix.view(n, h, w, c).permute(0, 3, 1, 2)
    return matrix.view(like.shape)


class _Matrices:
    """Lay out the parameters of a type, each as a matrix: ``inputs`` are orthogonalized into ``updates``, which have their shapes."""

    def __init__(self, params: list[Tensor]) -> None:
        self.key = [self._stamp(p) for p in params]
        self.inputs: list[Tensor] = []
        self.updates: list[Tensor] = []
        self.rows = [p.size(0) for p in params]
        self.columns = [p.numel() // p.size(0) for p in params]
        self.scales = [max(1, p.size(-2) / p.size(-1)) ** 0.5 for p in params]

    @staticmethod
    def _stamp(p: Tensor) -> tuple:
        return tuple(p.shape), p.stride(), p.device, p.dtype

    def fits(self, params: list[Tensor]) -> bool:
        return len(params) == len(self.key) and all(self._stamp(p) == known for p, known in zip(params, self.key))

    def run(self) -> None:
        """Compute ``updates`` from ``inputs``."""
        raise NotImplementedError


class _Grouped(_Matrices):
    """Orthogonalize matrices of all shapes together, by 17 launches of torch_fastdet's."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params)
        kernels = torch.classes.torch_fastdet.NewtonSchulz(self.rows, self.columns, self.scales, params[0].device)
        source, result = kernels.source(), kernels.result()
        for p, place, rows, columns in zip(params, kernels.places(), self.rows, self.columns):
            read, written = (flat[place : place + p.numel()].view(rows, columns) for flat in (source, result))
            self.inputs.append(_as_rows(read, p))
            self.updates.append(_as_rows(written, p))
        self._kernels = kernels

    def run(self) -> None:
        self._kernels.run_()


class _Batched(_Matrices):
    """Orthogonalize matrices of one shape as a batch, by torch's products: the original arithmetic."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params)
        self.inputs, self.updates = [torch.Tensor()] * len(params), [torch.Tensor()] * len(params)
        self._batches: list[tuple[Tensor, Tensor, float]] = []
        alike: dict[tuple[int, int, float], list[int]] = {}
        for index, shape in enumerate(zip(self.rows, self.columns, self.scales)):
            alike.setdefault(shape, []).append(index)
        for (rows, columns, scale), members in alike.items():
            source = torch.zeros(len(members), rows, columns, dtype=torch.bfloat16, device=params[0].device)
            result = torch.empty_like(source, dtype=params[0].dtype)
            for slot, index in enumerate(members):
                self.inputs[index] = _as_rows(source[slot], params[index])
                self.updates[index] = _as_rows(result[slot], params[index])
            self._batches.append((source, result, scale))

    def run(self) -> None:
        for source, result, scale in self._batches:
            result.copy_(_orthogonalized(source))
            if scale != 1.0:
                result.mul_(scale)


def _orthogonalized(matrices: Tensor) -> Tensor:
    """Return Newton-Schulz of a batch (n, rows, columns), in bfloat16."""
    unit = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + EPS)  # no singular value is above 1
    wide = unit.size(1) <= unit.size(2)  # by way of the smaller Gram matrix
    x = unit if wide else unit.mT
    for _ in range(STEPS):  # each line is a product, rounded once
        gram = x @ x.mT
        polynomial = gram.baddbmm(gram, gram, beta=B, alpha=C)
        x = x.baddbmm(polynomial, x, beta=A)
    return x if wide else x.mT


def _matrices(params: list[Tensor]) -> _Matrices:
    p = params[0]
    grouped = p.is_cuda and p.dtype == torch.float32 and torch.cuda.get_device_capability(p.device) >= (8, 0)
    return _Grouped(params) if grouped else _Batched(params)


class MusgdBinding(_watch.Binding):
    """Hold two MultiTensorStates: of all parameters, for SGD, and of those with ``use_muon``, for Muon's momentum."""

    name = "MuSGD"
    buffer_names = (MUON_BUFFER, SGD_BUFFER)

    @staticmethod
    def tensors_of(group: _watch.Group) -> tuple[float | Tensor, ...]:
        return group["lr"], group["momentum"], group["weight_decay"]

    @classmethod
    def numbers_of(cls, optimizer: Any, group: _watch.Group) -> tuple[list[float | Tensor], int]:
        lr, along = group["lr"], 0.0
        if group["use_muon"]:
            lr, along = lr * optimizer.sgd, -(lr * optimizer.muon)
        flags = _watch.NESTEROV * bool(group["nesterov"]) + _watch.HAS_MOMENTUM
        return [lr, group["momentum"], 0.0, group["weight_decay"], along], flags

    def __init__(self, optimizer: torch.optim.Optimizer, make_state: _watch.MakeState) -> None:
        self.matrices: list[int] = []  # by their place among the parameters
        self.muons: dict[torch.dtype, _Matrices] = {}
        self.muon_state: Any = None
        self.sharing = False  # whether the two states share what the reduction found
        place = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                if group["use_muon"] and p.dim() < 2:
                    raise ValueError(
                        f"MuSGD: use_muon is True for a parameter of shape {list(p.shape)}, but two or more dimensions are expected"
                    )
                if group["use_muon"] and p.numel():
                    self.matrices.append(place)
                place += 1
        self.own_groups = [bool(group["use_muon"]) for group in optimizer.param_groups]
        super().__init__(optimizer, make_state)

    def is_current(self) -> bool:
        if [bool(group["use_muon"]) for group in self.optimizer.param_groups] != self.own_groups:
            return False
        return super().is_current() and all(
            muon.fits([self.params[i] for i in self._of_type(dtype)]) for dtype, muon in self.muons.items()
        )

    def _of_type(self, dtype: torch.dtype) -> list[int]:
        return [i for i in self.matrices if self.params[i].dtype == dtype]

    def _new_buffers(self, p: Tensor, group: dict[str, object]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name in (MUON_BUFFER, *([SGD_BUFFER] if group["use_muon"] else []))}

    def _hand_over(self) -> None:
        inputs: dict[int, Tensor] = {}
        along: dict[int, Tensor] = {}
        params = [self.params[i] for i in self.matrices]
        for dtype in dict.fromkeys(p.dtype for p in params):
            mine = self._of_type(dtype)
            if dtype not in self.muons:
                self.muons[dtype] = _matrices([self.params[i] for i in mine])
            inputs.update(zip(mine, self.muons[dtype].inputs))
            along.update(zip(mine, self.muons[dtype].updates))
        if params:
            if self.muon_state is None:
                self.muon_state = new_state("MuSGD", params, [self.owner[i] for i in self.matrices], self.matrices)
            found = self._found(MUON_BUFFER, params)
            self.muon_state.set_buffers(_watch.MUON, found, [inputs[i] for i in self.matrices], [])
        own = [SGD_BUFFER if self.own_groups[group] else MUON_BUFFER for group in self.owner]
        buffers = [self._found(name, [p])[0] for name, p in zip(own, self.params)]
        self.tensors.set_buffers(_watch.MOVED_SGD, buffers, [along.get(i) for i in range(len(self.params))], [])

    def before_update(self, numbers: _watch.Numbers, scaling: _watch.Scaling, reduced: bool) -> None:
        if self.muon_state is None:
            return
        if reduced and not self.sharing:
            self.sharing = True
            self.muon_state.set_workspace(self.tensors.workspace())
        self.muon_state.step_(numbers, *scaling, reduced)
        for muon in self.muons.values():
            muon.run()


class MuSGD(_watch.BoundOptimizer):
    """Implement ``ultralytics.optim.MuSGD`` with few launches: momentum and SGD of all groups are one each, Newton-Schulz 17.

    Arguments, results and state_dict (both ways) are those of Ultralytics' class. In a group with ``use_muon`` each parameter moves by its
    orthogonalized momentum times ``lr * muon``, then by SGD with ``lr * sgd``; the other groups have SGD with ``lr``.

    Newton-Schulz has bfloat16 products, rounded where the original's are. On the CPU, for other types than float32, and before compute
    capability 8.0, matrices of one shape are a batch of torch's products. With GradScaler, a skipped step writes nothing, and no step waits for
    the GPU. lr, momentum and weight_decay may be one-element tensors on the parameters' device. Take one step before a CUDA graph capture.

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

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "muon": self.muon, "sgd": self.sgd}
