"""Implements Ultralytics' criteria in a few launches, with their constructors, calls, attributes and results.

The classes of this module derive from the classes of that name in the installed Ultralytics, and are made when they are first asked
for. So they have everything that the original classes have, and pickles contain an original criterion.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._say import count, warn
from torch_fastdet._torch.tensors import DeviceNumbers
from torch_fastdet.graphs.loss_items import read_early
from torch_fastdet.graphs.rows import RowGraphs
from torch_fastdet.ops.v8_loss import V8Arguments, V8Found, v8_detection, v8_obb, v8_pose, v8_segmentation
from torch_fastdet.patching.protocols import Batch, Function, Stock
from torch_fastdet.patching.replace import defined_in, stand_in
from torch_fastdet.switches.loss import rtdetr
from torch_fastdet.switches.loss.common import TARGET_COLUMNS, Checked, Criterion, TargetStatus

STOCK_MODULE = "ultralytics.utils.loss"
DETECTION_SETTINGS = len(ops.v8_loss_settings())
MOST_MASK_CHANNELS = 128  # of the operator

Outputs = Batch  # of a model's head, by name
LossItems = tuple[Tensor, Tensor]


class _State:
    """Hold the attributes that a criterion has beside the original's. They are neither copied nor pickled."""

    def __init__(self) -> None:
        self.settings = DeviceNumbers()
        self.strides: tuple[Tensor | None, list[float]] = (None, [])
        self.status = TargetStatus("v8DetectionLoss", "v8_loss")
        self.graphs: RowGraphs | None = None


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


class _DetectionLoss(Checked, Criterion):
    """Compute Ultralytics' ``v8DetectionLoss`` as one operator: no host synchronisation, a few launches, capturable.

    These attributes are read at each call, as in the original: ``hyp.box``, ``hyp.cls``, ``hyp.dfl``, ``class_weights``, and of
    ``assigner`` ``topk``, ``topk2``, ``alpha``, ``beta``, ``eps`` and ``stride_val``. The operator stands for all other parts and
    methods: replace your own before ``patch()``, which then keeps the original class, or derive a class. A class that derives from
    this one derives from the original and runs its code.

    A class index that the model does not have raises ValueError with its row: on the CPU at once; on a GPU in this or a later call or in
    :meth:`check`, which waits. Calls without gradients (validation) wait as well, and so does :meth:`update`, which the trainer calls
    at the end of each epoch. In a CUDA graph such rows are ignored and counted in :attr:`ignored_targets`.

    For :class:`torch_fastdet.graphs.TrainStep`, ``batch`` may be a tensor (n, 6) of image, class, x, y, w, h, of which the first
    ``num_targets`` rows are in use; the items come as a tensor then. Labels that are no rows (:attr:`labels`) come by name. A captured
    graph follows the gains and the assigner's numbers, but for ``topk`` and ``topk2``: :meth:`graph_key` writes them into device memory.
    """

    # These attributes and methods are the original's.
    assigner: Stock
    class_weights: Tensor | None
    hyp: Stock
    loss_names: tuple[str, ...]
    parse_output: Function
    reg_max: int
    stride: Tensor

    operator_settings: ClassVar[int] = DETECTION_SETTINGS  # number of settings that its operator takes
    target_columns = len(TARGET_COLUMNS)
    gains: ClassVar[tuple[str, ...]] = ()  # of ``hyp``, the settings behind these
    #: The names of the labels that must accompany a tensor of targets.
    labels: ClassVar[tuple[str, ...]] = ()

    @property
    def _state(self) -> _State:
        state = vars(self).get("_fastdet")
        if state is None:
            state = vars(self)["_fastdet"] = _State()
        return state

    @property
    def _status(self) -> TargetStatus:  # type: ignore[override]
        return self._state.status

    def __call__(self, preds: object, batch: object, num_targets: Tensor | None = None, **labels: Tensor) -> object:
        """Return the loss (3) times the batch size, and the items by their names."""
        if isinstance(batch, Tensor):
            targets, others = self.unpacked(batch, labels)
            return self.fused(self.parse_output(preds), targets, num_targets, batch=others)
        return super().__call__(preds, batch)  # type: ignore[misc]

    def loss(self, preds: Outputs, batch: Batch) -> object:
        """Return the loss and the items of the raw outputs ``preds``."""
        if not self.takes(preds, batch):
            return super().loss(preds, batch)  # type: ignore[misc]
        count("loss_optim", "losses")
        loss, items = self.fused(preds, packed_targets(batch, preds["scores"].device), batch=batch)
        return loss, self.named(items)

    def named(self, items: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.loss_names, read_early(items, beside=False).unbind()))

    def takes(self, preds: Outputs, batch: object) -> bool:
        """Return False for raw outputs and labels that the original code has to take."""
        return True

    def unpacked(self, targets: Tensor, labels: Batch) -> tuple[Tensor, Batch | None]:
        """Return the boxes in a tensor of targets, and the other labels, of which ``labels`` came beside it."""
        if set(self.labels) - set(labels) or (labels and not self.labels):
            raise TypeError(
                f"{type(self).__name__}: {' and '.join(labels) or 'nothing'} came beside a tensor of targets, but "
                f"{' and '.join(self.labels) or 'nothing'} is expected"
            )
        return targets, labels or None

    def fused(
        self,
        preds: Outputs,
        targets: Tensor,
        num_targets: Tensor | None = None,
        weight: float = 1.0,
        batch: Batch | None = None,
        noted: bool = False,
    ) -> LossItems:
        """Return the loss, times batch size and ``weight``, and the items. ``batch`` has the labels that are not in ``targets``.

        Bad rows that another branch has ``noted`` are not noted again.
        """
        boxes, scores = _alike(preds["boxes"], preds["scores"])
        settings = self._state.settings.upload(self.settings(weight), scores.device)
        targets = targets.to(device=scores.device, dtype=torch.float32)
        sizes = [side for feature in preds["feats"] for side in feature.shape[2:]]
        assigner = self.assigner
        numbers = num_targets, self.class_weights, self.reg_max, assigner.topk, assigner.topk2
        given = V8Arguments(targets, settings[: self.operator_settings], self.strides(), sizes, *numbers)
        found = self.found(preds, batch or {}, [boxes, scores], given, settings[self.operator_settings :])
        if not noted:
            self._status.note(found.status, targets.shape[0])
        return found.loss.float(), found.items.float()

    def found(self, preds: Outputs, batch: Batch, heads: list[Tensor], given: V8Arguments, gains: Tensor) -> V8Found:
        """Return what the operators of the task find; ``gains`` are the settings behind those of the first operator."""
        return v8_detection(heads, given)

    def settings(self, weight: float = 1.0) -> tuple[float, ...]:
        """Return the numbers that the operator reads from device memory."""
        hyp, assigner = self.hyp, self.assigner
        values = ops.v8_loss_settings(
            hyp.box, hyp.cls, hyp.dfl, weight, assigner.alpha, assigner.beta, assigner.eps, assigner.stride_val
        )
        return tuple(map(float, (*values, *(getattr(hyp, gain) for gain in self.gains))))

    def strides(self) -> list[float]:
        state = self._state
        if state.strides[0] is not self.stride:
            state.strides = self.stride, [float(stride) for stride in self.stride]
        return state.strides[1]

    # For torch_fastdet.graphs ----------------------------------------------------------------------------------------

    def graph_key(self) -> tuple[object, ...]:
        """Return what asks for another capture when it changes. Write the other settings to where captured calls read them."""
        return self._key(1.0)

    def _key(self, weight: float) -> tuple[object, ...]:
        if self._state.settings.values:
            self._state.settings.upload(self.settings(weight))
        weights = None if self.class_weights is None else self.class_weights.data_ptr()
        return self.assigner.topk, self.assigner.topk2, self.reg_max, weights, tuple(self.strides())


def _with_last(found: V8Found, part: Tensor | None = None, weight: Tensor | float = 1.0) -> V8Found:
    """Return ``found`` with one more part, or 0; in the loss it is multiplied by ``weight``, which has the batch size."""
    item = found.items.new_zeros(1) if part is None else part.detach().view(1).to(found.items.dtype)
    last = item if part is None else (part * weight).view(1)
    loss = torch.cat((found.loss, last.to(found.loss.dtype)))
    return found._replace(loss=loss, items=torch.cat((found.items, item)))


class _SegmentationLoss(_DetectionLoss):
    """Compute Ultralytics' ``v8SegmentationLoss`` by :func:`torch_fastdet.ops.v8_segmentation_loss`: as :class:`v8DetectionLoss`, and masks.

    The part of YOLO26's semantic logits runs the criterion's own ``bcedice_loss``, and needs ``batch["sem_masks"]``. For
    :class:`torch_fastdet.graphs.TrainStep`, ``masks`` stands beside the tensor of targets, with ``overlap_mask`` only. With more than 128
    mask coefficients the original code runs.
    """

    labels: ClassVar[tuple[str, ...]] = ("masks",)
    compares: ClassVar[bool] = False
    bcedice_loss: Callable[[Tensor, Tensor], Tensor]
    overlap: bool

    def takes(self, preds: Outputs, batch: object) -> bool:
        return self.prototypes(preds).shape[1] <= MOST_MASK_CHANNELS

    def unpacked(self, targets: Tensor, labels: Batch) -> tuple[Tensor, Batch | None]:
        if not self.overlap:
            raise ValueError(
                f"{type(self).__name__}: overlap_mask is False, but True is expected with a tensor of targets"
            )
        return super().unpacked(targets, labels)

    def _key(self, weight: float) -> tuple[object, ...]:
        return *super()._key(weight), self.overlap

    def prototypes(self, preds: Outputs) -> Tensor:
        return preds["proto"][0] if isinstance(preds["proto"], tuple) else preds["proto"]

    def found(self, preds: Outputs, batch: Batch, heads: list[Tensor], given: V8Arguments, gains: Tensor) -> V8Found:
        *heads, coefficients, protos = _alike(*heads, preds["mask_coefficient"], self.prototypes(preds))
        masks = batch["masks"].to(protos.device)
        found = v8_segmentation(heads, coefficients, protos, masks, given, self.overlap, self.compares)
        if not isinstance(preds["proto"], tuple):
            return _with_last(found)
        part = self._semantic(preds["proto"][1].float(), batch) * given.settings[0].float()
        part = torch.where((found.slot_anchor >= 0).any(), part, 0)  # the gain is that of the boxes
        return _with_last(found, part, len(protos) * given.settings[3].float())

    def _semantic(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the semantic part of (bs, classes, height, width) logits, before the gain."""
        classes, masks = batch["sem_masks"].to(logits.device), batch["masks"].to(logits.device).float()
        if not self.overlap:  # one mask a row of labels: add up those of an image
            image = batch["batch_idx"].to(logits.device).flatten().long()
            masks = masks.new_zeros(len(logits), *masks.shape[1:]).index_add_(0, image, masks)
        covered = F.interpolate(masks[:, None], logits.shape[2:], mode="nearest") != 0
        classes = F.interpolate(classes[:, None].float(), logits.shape[2:], mode="nearest")
        number = torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
        wanted = ((classes == number) & covered).float()
        return self.bcedice_loss(logits, wanted)


class _SegmentLoss26(_SegmentationLoss):
    """Compute Ultralytics' ``SegmentLoss26``: as :class:`v8SegmentationLoss`, with an assignment that compares masks too."""

    labels = ("masks", "sem_masks")
    compares = True


class _PoseLoss(_DetectionLoss):
    """Compute Ultralytics' ``v8PoseLoss`` by :func:`torch_fastdet.ops.v8_pose_loss`: as :class:`v8DetectionLoss`, and keypoints.

    ``hyp.pose`` and ``hyp.kobj`` are read at each call. For :class:`torch_fastdet.graphs.TrainStep`, x, y and visibility of each keypoint
    stand in a row behind the box: (n, 6 + 3 * keypoints).
    """

    kpt_shape: Sequence[int]
    keypoint_loss: Stock
    centered: ClassVar[bool] = False
    gains: ClassVar[tuple[str, ...]] = ("pose", "kobj")

    @property
    def target_columns(self) -> int:  # type: ignore[override]
        return len(TARGET_COLUMNS) + 3 * self.kpt_shape[0]

    def unpacked(self, targets: Tensor, labels: Batch) -> tuple[Tensor, Batch | None]:
        targets, _ = super().unpacked(targets, labels)
        boxes, keypoints = targets.split((len(TARGET_COLUMNS), 3 * self.kpt_shape[0]), 1)
        return boxes, {"keypoints": keypoints.unflatten(1, (-1, 3))}

    def found(self, preds: Outputs, batch: Batch, heads: list[Tensor], given: V8Arguments, gains: Tensor) -> V8Found:
        labels, sigmas = (
            each.to(device=gains.device, dtype=torch.float32)
            for each in (batch["keypoints"], self.keypoint_loss.sigmas)
        )
        *heads, predictions = _alike(*heads, preds["kpts"])
        return v8_pose(heads, predictions, labels, sigmas, gains[:2], given, self.centered)


class _PoseLoss26(_PoseLoss):
    """Compute Ultralytics' ``PoseLoss26``: as :class:`v8PoseLoss` with ``compare_keypoints``, and the part of residual log-likelihood (RLE).

    The RLE part runs the head's own ``flow_model`` and the criterion's own ``rle_loss`` over all slots of the assignment, in some 350
    launches, or as a CUDA graph with the switch ``cuda_graph``. ``hyp.rle`` is read at each call.
    """

    centered = True
    gains = ("pose", "kobj", "rle")
    #: The switch ``cuda_graph`` sets this.
    new_graphs: ClassVar[Callable[..., RowGraphs] | None] = None
    flow_model: Stock
    rle_loss: Stock
    target_weights: Tensor

    def found(self, preds: Outputs, batch: Batch, heads: list[Tensor], given: V8Arguments, gains: Tensor) -> V8Found:
        found = super().found(preds, batch, heads, given, gains)
        if preds.get("kpts_sigma") is None:  # in validation
            return _with_last(found)
        part = self._likelihood(preds, batch, found, given.sizes) * gains[2].float()
        return _with_last(found, part, len(heads[0]) * given.settings[3].float())

    def _likelihood(self, preds: Outputs, batch: Batch, found: V8Found, sizes: list[int]) -> Tensor:
        """Return the mean over the visible keypoints of the anchors in slots. Empty slots do not count."""
        kpts, sigmas = preds["kpts"], preds["kpts_sigma"]
        labels = batch["keypoints"].to(device=kpts.device, dtype=torch.float32)
        index = found.slot_anchor.flatten().clamp(min=0)
        image, anchor = index // kpts.shape[2], index % kpts.shape[2]
        wanted, used = labels[found.slot_row.flatten().clamp(min=0)], found.slot_anchor.flatten() >= 0
        rows = kpts[image, :, anchor], sigmas[image, :, anchor], wanted, anchor, used
        weights = self.target_weights.to(kpts.device)
        mean = functools.partial(self._mean_likelihood, weights=weights, sizes=sizes)
        if self.new_graphs is None:
            return mean(*rows)
        state = self._state
        if state.graphs is None:
            state.graphs = self.new_graphs()
        key = weights, tuple(sizes), tuple(self.strides()), self.rle_loss, self.rle_loss.residual
        return state.graphs(mean, self.flow_model, rows, key)

    def _mean_likelihood(
        self,
        kpts: Tensor,
        sigmas: Tensor,
        wanted: Tensor,
        anchor: Tensor,
        used: Tensor,
        weights: Tensor,
        sizes: list[int],
    ) -> Tensor:
        """Return the mean of rows, one a slot: predictions and labels of its keypoints, its anchor, and whether it has one."""
        count = wanted.shape[1]
        # Compute the position of each anchor, and the size of the image in its cells.
        first, stride, width = 0, torch.zeros_like(anchor, dtype=torch.float32), torch.ones_like(anchor)
        start = torch.zeros_like(anchor)
        for i, each in enumerate(self.strides()):
            later = anchor >= first
            stride = torch.where(later, each, stride)
            width = torch.where(later, sizes[2 * i + 1], width)
            start = torch.where(later, first, start)
            first += sizes[2 * i] * sizes[2 * i + 1]
        center = torch.stack(((anchor - start) % width, (anchor - start) // width), 1) + 0.5
        height, length = (side * self.strides()[0] for side in sizes[:2])
        size = torch.stack((length / stride, height / stride), 1)

        place = kpts.view(len(kpts), count, kpts.shape[1] // count)[..., :2].float() + center[:, None]
        sigma = sigmas.view(len(sigmas), count, 2).float().sigmoid()
        sigma = sigma.clamp(min=torch.finfo(sigmas.dtype).tiny)
        error = (place - wanted[..., :2] * size[:, None]) / (sigma + 1e-9)
        keep = used[:, None] & error.isfinite().all(2)
        if wanted.shape[2] == 3:
            keep = keep & (wanted[..., 2] != 0)
        error = torch.where(keep[..., None], error, 0).clamp(-100, 100).view(-1, 2)
        sigma = torch.where(keep[..., None], sigma, 1).view(-1, 2)  # no NaN where the weight is zero
        log_phi = self.flow_model.log_prob(error).flatten().float()
        # The mean over all slots becomes the mean over the keypoints that count.
        mean = self.rle_loss(sigma, log_phi, error, (keep * weights).flatten())
        return (mean * (keep.numel() / keep.sum().clamp(min=1))).clamp(min=0)


class _OBBLoss(_DetectionLoss):
    """Compute Ultralytics' ``v8OBBLoss`` in one operator (:func:`torch_fastdet.ops.v8_obb_loss`): as :class:`v8DetectionLoss`, with targets (n, 7)
    that have an angle. ``hyp.angle`` is also read at each call. The labels of another task raise the original's error.
    """

    operator_settings = DETECTION_SETTINGS + 1
    target_columns = len(TARGET_COLUMNS) + 1
    gains = ("angle",)

    def takes(self, preds: Outputs, batch: Stock) -> bool:
        return isinstance(batch, Tensor) or batch["bboxes"].shape[-1] == self.target_columns - 2

    def found(self, preds: Outputs, batch: Batch, heads: list[Tensor], given: V8Arguments, gains: Tensor) -> V8Found:
        boxes, scores, angles = _alike(*heads, preds["angle"])
        return v8_obb(boxes, scores, angles, given)


class _E2ELoss(Checked, Criterion):
    """Compute Ultralytics' ``E2ELoss``: two branches of :class:`v8DetectionLoss`, whose weights live on the device.

    A captured graph follows ``update()``, which changes the weights ``o2m`` and ``o2o`` once an epoch. With a ``loss_fn`` that is not
    a class of this module, an original E2ELoss is made.
    """

    one2many: _DetectionLoss
    one2one: _DetectionLoss
    o2m: float
    o2o: float

    @property
    def target_columns(self) -> int:
        return self.one2many.target_columns

    def __call__(self, preds: object, batch: Stock, num_targets: Tensor | None = None, **labels: Tensor) -> object:
        """Return the weighted sum of both branches (3), and the items of the one-to-one branch by their names."""
        outputs = self.one2many.parse_output(preds)
        many, one = outputs["one2many"], outputs["one2one"]
        if not (self.one2many.takes(many, batch) and self.one2one.takes(one, batch)):
            return super().__call__(preds, batch)  # type: ignore[misc]
        count("loss_optim", "losses")
        packed = isinstance(batch, Tensor)
        if packed:
            targets, others = self.one2many.unpacked(batch, labels)
        else:
            targets, others = packed_targets(batch, many["scores"].device), batch
        loss, _ = self.one2many.fused(many, targets, num_targets, self.o2m, others)
        second, items = self.one2one.fused(one, targets, num_targets, self.o2o, others, noted=True)
        return loss + second, items if packed else self.one2one.named(items)

    def graph_key(self) -> tuple[object, ...]:
        """Return the keys of both branches. Write their settings and weights to where captured calls read them."""
        return self.one2many._key(self.o2m), self.one2one._key(self.o2o)

    @property
    def _status(self) -> TargetStatus:  # type: ignore[override]
        return self.one2many._status


def packed_targets(batch: Batch, device: torch.device) -> Tensor:
    """Return a batch's labels as (n, 6) float32 on the device: image, class, x, y, w, h. The batch is not changed."""
    rows = torch.column_stack((batch["batch_idx"].flatten(), batch["cls"].flatten(), batch["bboxes"]))
    return rows.to(device=device, dtype=torch.float32)


KINDS: dict[str, type] = {
    "v8DetectionLoss": _DetectionLoss,
    "v8SegmentationLoss": _SegmentationLoss,
    "SegmentLoss26": _SegmentLoss26,
    "v8PoseLoss": _PoseLoss,
    "PoseLoss26": _PoseLoss26,
    "v8OBBLoss": _OBBLoss,
    "E2ELoss": _E2ELoss,
    "RTDETRDetectionLoss": rtdetr.RTDETRLoss,
}


@functools.cache
def drop_in(stock: type) -> object:
    """Return the class that replaces Ultralytics' class ``stock``."""
    ours = KINDS[stock.__name__]
    made = type(stock.__name__, (ours, stock), {"stock": stock, "__module__": __name__, "__doc__": ours.__doc__})
    return stand_in("loss_optim", stock, made, _of_branches(stock, made) if ours is _E2ELoss else None)


def _of_branches(stock: type, ours: type) -> Callable[..., object]:
    def make(model: nn.Module, loss_fn: Stock = None) -> object:
        branch: Stock = loss_fn or drop_in(inspect.signature(stock).parameters["loss_fn"].default)
        if isinstance(branch, type) and issubclass(branch, _DetectionLoss):
            return ours(model, branch)
        warn(f"loss_optim: E2ELoss of {branch.__qualname__} runs Ultralytics' own code")
        return stock(model, branch)

    return make


def __getattr__(name: str) -> object:
    if name in KINDS:
        module = rtdetr.STOCK_MODULE if KINDS[name] is rtdetr.RTDETRLoss else STOCK_MODULE
        importlib.import_module(module)
        if (stock := defined_in(module, name)) is not None:
            return drop_in(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
