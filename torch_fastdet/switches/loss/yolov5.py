"""Implements ComputeLoss, of detection and of segmentation, with YOLOv5's constructors, calls and results, in a few launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from torch_fastdet._say import count
from torch_fastdet._torch.tensors import DeviceNumbers, unwrap
from torch_fastdet.graphs.loss_items import read_early
from torch_fastdet.ops.yolov5_loss import Yolov5LossOptions, split_coefficients, yolov5_detection, yolov5_mask_part
from torch_fastdet.patching.by_name import filed_as
from torch_fastdet.patching.protocols import Head, Model, Names, Stock
from torch_fastdet.switches.loss.common import TARGET_COLUMNS, Checked, TargetStatus

#: A loss reads these keys of ``hyp`` when it is created.
_ENTROPY = ("cls_pw", "obj_pw", "fl_gamma", "label_smoothing")


def _not_apart(*_: object) -> NoReturn:
    raise AttributeError(
        "ComputeLoss: there is no BCEcls, BCEobj or build_targets, because one operator does their work; change hyp before the "
        "loss is made, or use YOLOv5's own ComputeLoss"
    )


class ComputeLoss(Checked):
    """Compute YOLOv5's ``utils.loss.ComputeLoss`` as one operator, with its constructor, call, results, and attributes that are data.

    ``ComputeLoss(model)(p, targets)`` returns ``(loss (1), items (3))``: the loss times the batch size, and the detached box, objectness and
    class parts. ``p`` is the list of the Detect layer's raw outputs, (bs, na, ny, nx, no) or (bs, na*no, ny, nx), of any float dtype;
    ``targets`` is (nt, 6): image, class, x, y, w, h as shares of the image. Where several targets share a cell, the objectness follows the last
    one in the original order of matches, or with ``sort_obj_iou`` the one of greatest CIoU.

    A bad row of targets, or a ``num_targets`` that does not fit them, raises ValueError: on the CPU at once; on a GPU in this or a later call
    or in :meth:`check`, which waits, as calls without gradients do. In a CUDA graph, and inside of :meth:`counting`, bad rows are ignored
    and counted in :attr:`ignored_targets`.

    Args:
        model: YOLOv5's model on its device, with ``hyp``, wrapped or not.
        autobalance: If True, the levels' weights of the objectness follow its loss, as in the original.
    """

    sort_obj_iou = False
    target_columns = len(TARGET_COLUMNS)
    nm = 0  # mask coefficients of an anchor

    def __init__(self, model: nn.Module, autobalance: bool = False) -> None:
        trained: Model = model  # DistributedDataParallel, where train.py has wrapped it and set hyp
        inner: nn.Module = unwrap(model) if isinstance(model, nn.Module) else model
        layers: Stock = getattr(inner, "model", None)
        detect: Head = layers[-1] if isinstance(layers, (nn.Sequential, nn.ModuleList, list)) and len(layers) else None
        if not hasattr(trained, "hyp") or not all(hasattr(detect, name) for name in ("na", "nc", "nl", "anchors")):
            raise TypeError(
                f"ComputeLoss: model is {type(inner).__name__}, but YOLOv5's DetectionModel is expected, with hyp and a Detect as "
                "its last layer"
            )
        self.device = next(model.parameters()).device
        self.hyp = trained.hyp
        self.na, self.nc, self.nl, self.anchors = detect.na, detect.nc, detect.nl, detect.anchors
        self.gr = 1.0
        self.autobalance = autobalance
        self.ssi = [float(stride) for stride in detect.stride].index(16.0) if autobalance else 0
        hyp = {"label_smoothing": 0.0, **self.hyp, "fl_gamma": max(self.hyp["fl_gamma"], 0.0)}
        balance = [4.0, 1.0, 0.4] if self.nl == 3 else [4.0, 1.0, 0.25, 0.06, 0.02]
        self._begin({name: float(hyp[name]) for name in _ENTROPY}, balance)

    def _begin(self, entropy: dict[str, float], balance: list[float]) -> None:
        # These are fixed when the loss is created, as in the original. The gains are read from hyp in each call.
        self._entropy, self._balance = entropy, balance
        self._on_device = DeviceNumbers()  # the balance, which autobalance writes there
        self._on_device.upload(self._balance, self.device)  # now, for a graph capture cannot bring it there
        self._status = TargetStatus("ComputeLoss", "yolov5_loss")
        self._status.prepare(self.device)

    #: The framework's class, if the loss replaces it. Pickles contain an object of that class.
    _stock: type | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        if self._stock is None:
            return super().__reduce_ex__(protocol)
        return filed_as(self._stock, self._stocks_attributes())

    def _stocks_attributes(self) -> dict[str, object]:
        """Return the attributes of the framework's loss that computes the same, as its constructor makes them."""
        detect = SimpleNamespace(na=self.na, nc=self.nc, nl=self.nl, anchors=self.anchors, stride=[], nm=self.nm)
        hyp = {**self.hyp, **self._entropy}
        made: Stock = self._stock
        made = made(SimpleNamespace(model=[detect], hyp=hyp, parameters=lambda: iter([self.anchors])))
        own = {name: value for name, value in vars(self).items() if name in vars(made)}
        return {**vars(made), **own, "balance": self.balance}

    def __setstate__(self, state: Names) -> None:
        vars(self).update(state)
        if "BCEcls" in state:  # of the framework's class
            names = "BCEcls", "BCEobj", "balance", "cp", "cn"
            of_classes, of_objects, balance, _, cn = (vars(self).pop(name) for name in names)
            weights = [float(getattr(each, "loss_fcn", each).pos_weight) for each in (of_classes, of_objects)]
            numbers = *weights, float(getattr(of_classes, "gamma", 0.0)), 2.0 * cn
            self._begin(dict(zip(_ENTROPY, numbers)), list(balance))

    BCEcls = BCEobj = build_targets = property(_not_apart, _not_apart)

    # These are the targets of a right and a wrong class.
    cp = property(lambda self: 1.0 - 0.5 * self._entropy["label_smoothing"])
    cn = property(lambda self: 0.5 * self._entropy["label_smoothing"])

    @property
    def balance(self) -> list[float]:
        """Return the weight of each level's objectness. With autobalance it is on the device, and reading it is a host sync."""
        if self.autobalance:
            self._balance = self._on_device.memory.tolist()
            self._on_device.values = list(self._balance)
        return self._balance

    @balance.setter
    def balance(self, values: list[float]) -> None:
        self._balance = list(values)
        self._on_device.values = []
        self._on_device.upload(self._balance)  # now, where graphs read it

    def graph_key(self) -> tuple:
        """Return what changes when a call that is captured now would do something else than before."""
        hyp = self.hyp
        gains = hyp["box"], hyp["obj"], hyp["cls"], hyp["anchor_t"]
        anchors = self.anchors.data_ptr(), self.anchors.dtype, self.anchors.device
        held = self._on_device.memory  # captured calls read it where it was, and with autobalance write it
        place = held.data_ptr(), held.numel()
        balance = self.ssi if self.autobalance else tuple(self._balance)
        return gains, anchors, self.gr, self.sort_obj_iou, self.autobalance, balance, place

    def __call__(self, p: list[Tensor], targets: Tensor, num_targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return loss and items; ``num_targets``, one int64 on the device, says how many rows of targets are in use."""
        self._check_heads(p)
        loss, items, _ = self._detection(p, targets, num_targets)
        return loss.float(), read_early(items.float(), beside=True)  # as the original, whose heads may be float64

    def _detection(self, p: list[Tensor], targets: Tensor, num_targets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        for name, value in {"targets": targets, "num_targets": num_targets}.items():
            if not isinstance(value, Tensor) and (value is not None or name == "targets"):
                raise TypeError(f"ComputeLoss: {name} is a {type(value).__name__}, but a tensor is expected")
        if not (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._status.checks.raise_arrived()
            count("loss_optim", "losses")
        balance = self._on_device.upload(self._balance, targets.device)
        hyp = self.hyp
        gains = {name: float(hyp[name]) for name in ("box", "obj", "cls", "anchor_t")}
        options = Yolov5LossOptions(**gains, **self._entropy, gr=float(self.gr), sort_obj_iou=self.sort_obj_iou)
        anchors = self.anchors.to(targets.device, torch.float32)
        loss, items, levels, status, matches = yolov5_detection(
            p, targets.float(), anchors, balance, num_targets, options
        )
        if self.autobalance:
            balance[: len(levels)].mul_(0.9999).add_(0.0001 / levels.double())
            balance.div_(balance[self.ssi].clone())
        self._status.note(status, targets.shape[0])
        return loss, items, matches

    def _check_heads(self, p: list[Tensor]) -> None:
        wanted = self.nc + 5 + self.nm
        outputs_of = (
            "the list of the Detect layer's outputs in training mode is expected (in eval mode it is the second of two)"
        )
        if not isinstance(p, (list, tuple)):
            raise TypeError(f"ComputeLoss: p is a {type(p).__name__}, but {outputs_of}")
        for i, head in enumerate(p):
            if not isinstance(head, Tensor):
                raise TypeError(f"ComputeLoss: p[{i}] is a {type(head).__name__}, but {outputs_of}")
            if head.dim() not in (4, 5):
                raise RuntimeError(f"ComputeLoss: p[{i}] has shape {tuple(head.shape)}, but {outputs_of}")
            outputs = head.shape[-1] if head.dim() == 5 else head.shape[1] / self.na
            if outputs != wanted:
                raise RuntimeError(
                    f"ComputeLoss: p[{i}] of shape {tuple(head.shape)} has {outputs:g} outputs an anchor, but the model has "
                    f"{self.nc} classes, so {wanted} are expected"
                )


class SegmentationLoss(ComputeLoss):
    """Compute ``ComputeLoss`` of YOLOv5's ``utils.segment.loss``, with its constructor, call and results.

    ``SegmentationLoss(model, overlap=True)((p, protos), targets, masks)`` returns ``(loss (1), items (4))``: the loss times the batch size, and
    the detached box, mask, objectness and class parts. ``p`` and ``protos`` are the Segment layer's outputs in training mode; ``masks`` is
    (bs, h, w) with ``overlap``, the place of the target that covers a pixel among its image's rows, else (nt, h, w). The rest is as in
    :class:`ComputeLoss`; there is no ``single_mask_loss``.

    Without targets, and on the CPU without matches, no gradient reaches ``protos``, as in the original. In a CUDA graph, and on a GPU if no
    target matches an anchor, the gradient is zero, and the optimizer moves the layers of the prototypes by momentum and weight decay.
    """

    single_mask_loss = property(_not_apart, _not_apart)

    def __init__(self, model: nn.Module, autobalance: bool = False, overlap: bool = False) -> None:
        super().__init__(model, autobalance)
        inner: Model = unwrap(model)
        detect: Head = inner.model[-1]
        if not hasattr(detect, "nm"):
            raise TypeError(
                f"SegmentationLoss: the model's last layer is {type(detect).__name__}, but YOLOv5's Segment is expected, with nm"
            )
        self.nm = detect.nm
        self.overlap = overlap

    def graph_key(self) -> tuple:
        return *super().graph_key(), self.overlap

    def __call__(  # type: ignore[override]
        self, preds: object, targets: Tensor, masks: Tensor, num_targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return loss and items; ``num_targets``, one int64 on the device, says how many rows of targets are in use."""
        if not isinstance(preds, (list, tuple)) or len(preds) != 2 or not isinstance(preds[1], Tensor):
            raise TypeError(
                "SegmentationLoss: preds is not a list of heads and a tensor of prototypes, the Segment layer's outputs in training mode"
            )
        if not isinstance(masks, Tensor):
            raise TypeError(f"SegmentationLoss: masks is a {type(masks).__name__}, but a tensor is expected")
        p, protos = preds
        self._check_heads(p)
        detection, coefficients, sizes = split_coefficients(p, protos)
        loss, items, matches = self._detection(detection, targets, num_targets)
        eager = num_targets is None and not matches.is_cuda  # elsewhere the question would be a host sync
        if not len(targets) or (eager and bool((matches < 0).all())):
            protos = protos.detach()
        labels = masks.to(protos.device), targets.float(), matches, sizes, num_targets
        part, item = yolov5_mask_part(coefficients, protos, *labels, float(self.hyp["box"]), self.overlap)
        items = torch.cat((items[:1], item.to(items.dtype), items[1:]))
        return (loss + part.to(loss.dtype)).float(), read_early(items.float(), beside=True)
