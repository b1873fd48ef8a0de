"""Implements Ultralytics' ``RTDETRDetectionLoss`` as one operator, with its constructor, call, attributes and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet._deferred import DeferredStatus
from torch_fastdet._say import count
from torch_fastdet._torch.private import Context, runs_plainly
from torch_fastdet.patching.protocols import Batch, Function, Names, Stock
from torch_fastdet.switches.loss.common import Criterion

STOCK_MODULE = "ultralytics.models.utils.loss"
PARTS = ("class", "bbox", "giou")
_MODULES = ("ultralytics.utils.loss", "ultralytics.models.utils.ops")  # of fl, vfl and matcher
#: The operator has these constants.
_ALPHA, _COST_GAMMA, _ENTROPY_GAMMA = 0.25, 2.0, 1.5


def describe_bad_targets(status: list[int], most: int) -> str | None:
    image, row = ops.rtdetr_loss_fault(status, most)
    if image < 0:
        return None
    return f"rtdetr_loss: image {image}, target {row}: its class is not one of the model's; {status[0]} targets are bad"


class Targets(NamedTuple):
    """Hold labels as :func:`torch_fastdet.ops.rtdetr_loss` takes them, on the device."""

    rows: Tensor
    counts: Tensor
    matches: Tensor | None


def padded_targets(
    classes: Tensor, boxes: Tensor, groups: Sequence[int], matched: list[tuple[Tensor, Tensor]] | None, queries: int
) -> Targets:
    """Pad the labels of a batch, of which each image has as many as ``groups`` says, to the most that an image has.

    ``matched`` has the denoising queries of each image that have a target, and the rows of their labels, on the host.
    """
    counts = torch.tensor(groups)
    images, total, most = len(groups), int(counts.sum()), max(1, *groups)
    first = counts.cumsum(0) - counts
    places = torch.arange(most).expand(images, most)
    index = torch.where(places < counts[:, None], first[:, None] + places, total)
    owners = torch.full((images, queries if matched is not None else 0), -1)
    for owner, start, (query, row) in zip(owners, first, matched or ()):
        owner[query] = row - start
    numbers = torch.cat([counts, index.flatten(), owners.flatten()])
    if boxes.is_cuda:  # which is not waited for
        numbers = numbers.pin_memory()
    numbers = numbers.to(boxes.device, non_blocking=True)
    counts, index, owners = numbers.split([images, images * most, owners.numel()])
    rows = torch.cat([classes.view(-1, 1).to(torch.float32), boxes.to(torch.float32)], 1)
    rows = torch.cat([rows, rows.new_zeros(1, 5)])[index].view(images, most, 5)
    return Targets(rows, counts, None if matched is None else owners.view(images, queries))


class _SharedGradient(torch.autograd.Function):
    """Return the terms of a loss, each of which has the gradient of their sum. It is NaN where they are not weighted alike, or, if that
    is asked (``checks``, on a GPU a host sync), an error."""

    @staticmethod
    def forward(ctx: Context, loss: Tensor, terms: Tensor, checks: bool) -> Tensor:
        ctx.checks = checks
        return terms.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        alike = (grad == grad[0]).all()
        if ctx.checks and not alike and grad.isfinite().all():
            raise RuntimeError(
                "loss_optim: the terms of RT-DETR's loss are weighted differently, but their gradient is that of their sum; leave "
                "this switch out (--no-loss_optim, or patch(fastdet=True, loss_optim=False))"
            )
        return torch.where(alike, grad[0], torch.nan), None, None


class RTDETRLoss(Criterion):
    """Compute Ultralytics' ``RTDETRDetectionLoss`` in a few launches, without host synchronisation (:func:`torch_fastdet.ops.rtdetr_loss`).

    ``loss_gain`` and ``matcher.cost_gain`` are read at each call. With other options than those of RT-DETR (``aux_loss``,
    ``use_uni_match``, other constants of the focal terms, another number of classes), and with an ``fl``, ``vfl``, ``matcher`` or method of
    your own on the criterion, the original code runs.

    The gradient is that of the sum of all terms. If terms are weighted differently, RuntimeError is raised: on a GPU in the first call,
    and in later ones the gradient is NaN.

    A class that the model does not have raises ValueError: on the CPU at once; on a GPU in a later call or in :meth:`check`, which
    waits.
    """

    # These attributes and methods are the original's.
    aux_loss: bool
    fl: Stock
    get_dn_match_indices: Function
    loss_gain: dict[str, float]
    matcher: Stock
    nc: int
    use_uni_match: bool
    vfl: Stock

    @property
    def _status(self) -> DeferredStatus:
        return vars(self).setdefault("_fastdet", DeferredStatus(describe_bad_targets))

    def takes(self, classes: int) -> bool:
        """Return False for options, and scores of as many classes, that the original code has to take."""
        parts = fl, vfl, matcher = self.fl, self.vfl, self.matcher
        return (
            self.aux_loss
            and not self.use_uni_match
            and all(type(part).__module__ in _MODULES and runs_plainly(part, type(part).forward) for part in parts)
            and not any(map(callable, vars(self).values()))
            and (float(fl.alpha), fl.gamma, vfl.alpha, vfl.gamma) == (_ALPHA, _ENTROPY_GAMMA) * 2
            and (matcher.use_fl, matcher.alpha, matcher.gamma) == (True, _ALPHA, _COST_GAMMA)
            and classes == self.nc
        )

    def forward(
        self,
        preds: tuple[Tensor, Tensor],
        batch: Batch,
        dn_bboxes: Tensor | None = None,
        dn_scores: Tensor | None = None,
        dn_meta: Names | None = None,
    ) -> dict[str, Tensor]:
        """Return the terms by their names: those of the last set, the sums of the others, and both of the denoising sets."""
        boxes, scores = preds
        if not self.takes(scores.shape[-1]):
            return super().forward(preds, batch, dn_bboxes, dn_scores, dn_meta)  # type: ignore[misc]
        denoising = None if dn_bboxes is None or dn_scores is None or dn_meta is None else (dn_bboxes, dn_scores)
        checks = not scores.is_cuda or ("_fastdet" not in vars(self) and not torch.cuda.is_current_stream_capturing())
        matched, queries = None, 0
        if denoising is not None:
            matched, queries = self.matched(dn_meta or {}), denoising[0].shape[2]
        targets = padded_targets(batch["cls"], batch["bboxes"], batch["gt_groups"], matched, queries)
        loss, terms = self.fused(boxes, scores, targets, denoising)
        main, dn = terms[: len(boxes)], terms[len(boxes) :]
        groups = main[-1:], main[:-1], dn[-1:], dn[:-1]
        shared = iter(_SharedGradient.apply(loss, torch.cat([sets.sum(0) for sets in groups if len(sets)]), checks))
        parts = [next(shared) if len(sets) else loss.new_zeros(()) for sets in groups for _ in PARTS]
        names = ["_".join(("loss", part, *of)) for of in ((), ("aux",), ("dn",), ("aux", "dn")) for part in PARTS]
        return dict(zip(names, parts, strict=True))

    def matched(self, meta: Names) -> list[tuple[Tensor, Tensor]]:
        """Return each image's denoising queries that have a target, and the labels that they have."""
        return self.get_dn_match_indices(meta["dn_pos_idx"], meta["dn_num_group"], meta["dn_gt_idx"])

    def fused(
        self, boxes: Tensor, scores: Tensor, targets: Targets, denoising: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of all terms, and the terms (sets, 3) without gradients, those of denoising sets last."""
        count("loss_optim", "losses")
        given: list[Any] = [boxes, scores, targets.rows, targets.counts, None, None, None]
        if denoising is not None:
            given[4:] = denoising[0], denoising[1].to(scores.dtype), targets.matches
        gains_and_costs = [each[part] for each in (self.loss_gain, self.matcher.cost_gain) for part in PARTS]
        loss, terms, status = ops.rtdetr_loss(*given, *gains_and_costs)
        if status.is_cuda:  # on the CPU the operator raises
            self._status.add(status, targets.rows.shape[1])
            self._status.raise_arrived(wait=not torch.is_grad_enabled())
        return loss, terms

    def check(self) -> None:
        """Wait for the losses computed so far; raise ValueError if a target of one had a bad class."""
        self._status.raise_arrived(wait=True)
