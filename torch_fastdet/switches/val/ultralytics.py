"""Matches the detections of Ultralytics' validators in C++, on the host, after one copy for the batch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet._say import count
from torch_fastdet._torch import meanwhile
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet._torch.tensors import as_float
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.import_hook import top_level
from torch_fastdet.patching.protocols import Batch, ConfusionMatrix, Function, Stock, Validator
from torch_fastdet.patching.replace import around, is_code_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.suppression import rows_of_rtdetr
from torch_fastdet.switches.frameworks import ultralytics
from torch_fastdet.switches.val import average_precision, run_lengths

#: The framework creates there what it combines with the labels.
HOST = torch.device("cpu")
#: The detections of each image.
Preds: TypeAlias = list[dict[str, Tensor]]
#: The labels of each image.
Labels: TypeAlias = list[Batch]
#: The arguments of ``ConfusionMatrix.process_batch``: detections, labels, and the thresholds of confidence and IoU.
Call: TypeAlias = tuple[Batch, Batch, float, float]
#: A detection takes the label that it overlaps most, of those that no better detection has taken.
RULE = "greedy"
#: The labels of an image on the host store under these names what ``_process_batch`` and ``scale_preds`` return, and the rotated boxes'
#: overlaps (on their device) with the function for them.
MATCHED, SCALED, OVERLAPS = "torch_fastdet_matched", "torch_fastdet_scaled", "torch_fastdet_overlaps"
#: A confusion matrix stores under this name what it counts after the batch.
WAITING = "torch_fastdet_waiting"
#: A ``pred_to_json`` that takes encoded masks stores itself under this name; ``functools.wraps`` copies it to wrappers, too.
ENCODES = "torch_fastdet_encodes"
#: A ``pred_to_json`` that takes corners of rotated boxes stores the framework's function for them here, and detections the corners.
CORNERS = "torch_fastdet_corners"


def _rows(detections: dict[str, Tensor]) -> Tensor:
    """Return (n, 6): x1, y1, x2, y2, confidence, class. Of a rotated box its first four numbers, which nobody reads."""
    boxes = detections["bboxes"][:, :4]
    return as_float(torch.cat([boxes, detections["conf"][:, None], detections["cls"][:, None]], 1))


def _labels(batch: dict[str, Tensor]) -> Tensor:
    """Return (m, 5): class, x1, y1, x2, y2."""
    return torch.cat([batch["cls"].reshape(-1, 1), batch["bboxes"][:, :4]], 1)


@around
def matched(_: object, stock: Function, self: Validator, preds: dict[str, Tensor], batch: Batch) -> dict[str, object]:
    """Return the matches of :class:`MatchAll`, if there are any, from a validator's ``_process_batch``."""
    return batch[MATCHED] if MATCHED in batch else stock(self, preds, batch)


def _image_of(sizes: list[int]) -> Tensor:
    """Return the image of each row, on the host. There ``torch.repeat_interleave`` wakes all threads, which the loader's workers hold up."""
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


@around
def select(_: object, stock: Function, self: Validator, preds: Any) -> object:
    """Run ``RTDETRValidator.postprocess`` by one operator, with one copy to the host for all images of a batch."""
    batch = len(preds[0] if isinstance(preds, (list, tuple)) else preds)
    height, width = stock.__globals__["check_imgsz"](self.args.imgsz, stride=1, min_dim=2)
    found = rows_of_rtdetr(preds, [[width, height]] * batch, self.args)
    if found is None:
        return stock(self, preds)
    count("val_optim", "batches selected")
    images = found.rows(found.counts.tolist())
    return [{"bboxes": rows[:, :4], "conf": rows[:, 4], "cls": rows[:, 5]} for rows in images]


class _Table(NamedTuple):
    rows: Tensor  # (images, n, 6)
    counts: Tensor  # the rows of each image
    at: tuple[Tensor, Tensor]  # image and place of each row


def _table(rows: Tensor, sizes: list[int]) -> _Table:
    counts = torch.tensor(sizes)
    place = torch.from_numpy(np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes))
    at = _image_of(sizes).to(rows.device), place.to(rows.device)
    table = rows.new_zeros(len(sizes), max(1, *sizes), rows.shape[1])
    table[at] = rows
    return _Table(table, counts.to(rows.device), at)


class MatchAll:
    """Make a validator's ``_prepare_batch``, with the matches of all images of a batch from one launch and one copy.

    The matches are of the rows that came from the model. A validator of boxes whose methods say otherwise keeps its own
    ``_prepare_batch``; for other tasks the result is then None, and so it is if masks are needed on the host, unless to be encoded.
    ``overlaps`` is what validators of a ``kind`` compare beside boxes or instead of them.
    """

    def __init__(self, active: Active, kind: Stock, overlaps: Overlaps | None) -> None:
        self._active, self._overlaps, self._names = active, overlaps, vars(sys.modules[kind.__module__])
        # A task's or a user's class may override it.
        base = importlib.import_module(ultralytics("engine.validator")[0]).BaseValidator
        self._matching, self._keeps_rows, self._own = base.match_predictions, kind._prepare_pred, kind._prepare_batch
        # What prepares all images at once, instead of this.
        self._at_once = kind.__base__._prepare_batch if overlaps is not None and overlaps.draws else self._own
        self._is_known = is_code_of(self._own, top_level(kind.__module__))

    def __call__(self, validator: Validator, preds: Preds, batch: Batch) -> Function | None:
        own, overlaps = validator._prepare_batch, self._overlaps
        if (obstacle := self._obstacle(validator, preds[0], batch)) is not None:
            one_by_one(self._active, obstacle)
            return own if overlaps is None else None
        with own_attributes([(validator, "device", HOST)]):
            if self._is_known and getattr(own, "__func__", None) is self._own:
                prepared = _prepared_at_once(validator, self._at_once, batch, len(preds))
            else:
                prepared = [own(number, batch) for number in range(len(preds))]
        sizes = [len(pred["cls"]) for pred in preds]
        rows = _rows({name: torch.cat([pred[name] for pred in preds]) for name in ("bboxes", "conf", "cls")})
        table, device = _table(rows, sizes), rows.device
        image = _image_of([len(label["cls"]) for label in prepared])
        truth = _labels({name: torch.cat([label[name] for label in prepared]) for name in ("cls", "bboxes")})
        truth = torch.cat([image.to(truth)[:, None], truth], 1).to(device)
        given = table.rows, truth, validator.iouv.to(device), table.counts, RULE
        found = {}
        if overlaps is None or overlaps.matches != "tp":
            found["tp"] = ops.match_detections(*given)
        if overlaps is not None:
            function = self._names[overlaps.function]
            iou = _of_each_image(validator, overlaps, function, prepared, preds, table.rows.shape[1])
            found[overlaps.matches] = ops.match_detections(*given, iou)
            if overlaps.matches == "tp":
                for label, part in zip(prepared, iou.split([len(label["cls"]) for label in prepared])):
                    label[OVERLAPS] = function, part
        count("val_optim", "images matched", len(prepared))
        for label in prepared:
            label[MATCHED] = {}
        for name, correct in found.items():
            for label, part in zip(prepared, correct[table.at].cpu().split(sizes)):
                label[MATCHED][name] = part.numpy()
        if (validator.args.save_json or validator.args.save_txt) and _scales_as_stock(validator):
            _scale(validator, preds, prepared)
        return lambda number, _: prepared[number]

    def _obstacle(self, validator: Validator, pred: dict[str, Tensor], batch: Batch) -> Obstacle | None:
        """Return why the images of a batch are not matched at once; None where they are."""
        name = type(validator).__name__
        if type(validator).match_predictions is not self._matching:
            return Obstacle(f"{name} has its own match_predictions.")
        if getattr(validator._prepare_pred, "__func__", None) is not self._keeps_rows:
            return Obstacle(f"{name} has its own _prepare_pred.")
        if not _all_positive(validator.iouv):
            return Obstacle(f"{name} has an IoU threshold that is not above 0.")
        if not all(batch[each].isfinite().all() for each in ("bboxes", "keypoints") if each in batch):
            return Obstacle("a label is infinite or NaN.")
        shown = _shows_masks(validator, pred)
        return Obstacle("masks are shown, or saved otherwise than as Ultralytics' own JSON.") if shown else None


def one_by_one(active: Active, obstacle: str) -> None:
    active.tell(f"val_optim: images are matched one by one: {obstacle}")


def _all_positive(iouv: Tensor) -> bool:
    """Return False for IoU thresholds at which pairs match that do not overlap; in the original, the classes of these may differ."""
    return bool((iouv > 0).all())


def _prepared_at_once(validator: Validator, prepare: Function, batch: Batch, images: int) -> list[Batch]:
    """Return what ``_prepare_batch`` makes of each image, by one call, and each image's masks as they came."""
    number = batch["batch_idx"].reshape(-1)
    order = number.argsort(stable=True)
    inside = torch.isin(number[order], torch.arange(images, dtype=number.dtype))
    order = order[inside]
    number = number[order]
    of_labels = {name: batch[name][order] for name in ("cls", "bboxes", "keypoints") if name in batch}
    whole = prepare(validator, 0, batch | of_labels | {"batch_idx": number * 0})
    counts = number.long().bincount(minlength=images).tolist()
    parts: dict[str, Any] = {name: whole[name].split(counts) for name in of_labels if name in whole}
    parts |= {name: batch[name] for name in whole if isinstance(batch.get(name), (list, tuple))}
    if "masks" in batch:  # a map for each image, or a mask for each label
        masks = batch["masks"]
        parts["masks"] = masks if validator.args.overlap_mask else masks[order.to(masks.device)].split(counts)
    return [{**whole, **{name: values[i] for name, values in parts.items()}} for i in range(images)]


def _scales_as_stock(validator: Validator) -> bool:
    """Return whether ``scale_preds`` reads only shapes of an image's labels, which are on the host."""
    return is_code_of(getattr(validator.scale_preds, "__func__", None), "ultralytics")


def _scale(validator: Validator, preds: Preds, labels: Labels) -> None:
    """Scale the detections of all images on their device, where results are the original's to the bit, and copy them at once."""
    images = [(pred, label) for pred, label in zip(preds, labels) if len(pred["cls"])]
    corners = getattr(validator.pred_to_json, CORNERS, None)
    scaled: list[dict[str, Tensor]] = []

    def masks() -> Iterator[Tensor]:
        for image in images:
            scaled.append(validator.scale_preds(*image))
            if corners is not None:
                scaled[-1][CORNERS] = corners(scaled[-1]["bboxes"]).flatten(1)
            if "masks" in scaled[-1]:
                yield scaled[-1].pop("masks")  # they are large

    encoded = run_lengths.encode(masks())
    for (_, label), host in zip(images, _to_host(scaled) if scaled else ()):
        label[SCALED] = host
    for (_, label), each in zip(images, encoded):
        label[SCALED]["masks"] = each


def encoding(_: object, stock: Function, kind: Stock) -> Function:
    """Return the ``pred_to_json`` of a validator of masks, of this class."""

    @functools.wraps(stock)
    def pred_to_json(self: Validator, predn: Batch, pbatch: Batch) -> None:
        masks = predn["masks"]
        encoded = run_lengths.encode([masks])[0] if isinstance(masks, Tensor) else masks
        super(kind, self).pred_to_json(predn, pbatch)
        for row, mask in zip(self.jdict[len(self.jdict) - len(encoded) :], encoded):
            row["segmentation"] = mask

    setattr(pred_to_json, ENCODES, pred_to_json)
    return pred_to_json


def with_corners(_: object, stock: Function, __: Stock) -> Function:
    """Return the ``pred_to_json`` of a validator of rotated boxes."""

    @functools.wraps(stock)
    def pred_to_json(self: Validator, predn: Batch, pbatch: Batch) -> None:
        stock(self, predn, pbatch)
        corners = predn[CORNERS].tolist() if CORNERS in predn else []
        for row, numbers in zip(self.jdict[len(self.jdict) - len(corners) :], corners):
            row["poly"] = [round(number, 3) for number in numbers]

    setattr(pred_to_json, CORNERS, stock.__globals__["ops"].xywhr2xyxyxyxy)
    return pred_to_json


def confusions(
    rows: Tensor,
    labels: Tensor,
    classes: int,
    conf: float,
    iou_thres: float,
    counts: Tensor | None = None,
    iou: Tensor | None = None,
) -> Tensor:
    """Return the confusion matrix of one image, or of the images of a table, on the host."""
    matrix = torch.zeros(classes + 1, classes + 1, dtype=torch.int64, device=rows.device)
    ops.confusion_matrix_(matrix, rows, labels, counts, conf, iou_thres, RULE, iou)
    return matrix.cpu()


def plotted(stock: Function, given: Any, result: average_precision.Curves) -> tuple[object, ...]:
    """Return what ``ap_per_class`` of ultralytics.utils.metrics returns behind the numbers, once its plots are drawn."""
    rows = [np.zeros_like(result.x) if row is None else row for row in result.precision_by_recall()]
    by_recall = np.array(rows) if rows else np.zeros((1, len(result.x)))
    if given.plot:
        names = given.names
        shown = {i: names[c] for i, c in enumerate(result.classes) if c in names} if names else {}
        average_precision.plot(stock, given, result, by_recall, shown, on_plot=given.on_plot)
    return result.precision, result.recall, result.f1, result.x, by_recall


def _counts_as_stock(detections: Batch, batch: Batch, *thresholds: object) -> bool:
    """Return whether the operator takes these as the original does, which says what is wrong with other types and shapes."""
    boxes = detections["bboxes"], batch["bboxes"]
    labels = detections["cls"], batch["cls"]
    return (
        all(isinstance(threshold, Real) and not threshold < 0 for threshold in thresholds)
        and all(isinstance(value, Tensor) for value in (*detections.values(), *boxes, *labels))
        and boxes[1].shape[1:] in ((4,), (5,))
        and all(box.shape == (label.numel(), *boxes[1].shape[1:]) for box, label in zip(boxes, labels))
        and detections["cls"].shape == detections["conf"].shape == boxes[0].shape[:1]
    )


def _count_together(stock: Function, matrix: Any, calls: list[Call]) -> None:
    """Run ``ConfusionMatrix.process_batch`` of several images with the same thresholds."""
    found = {name: torch.cat([call[0][name] for call in calls]) for name in ("bboxes", "conf", "cls")}
    truth = {name: torch.cat([call[1][name] for call in calls]) for name in ("bboxes", "cls")}
    # The original has rules of its own for classes for which the matrix has no place, and for labels that are infinite or NaN.
    placed = all(bool(((each["cls"] >= 0) & (each["cls"] < matrix.nc)).all()) for each in (found, truth))
    if not placed or not truth["bboxes"].isfinite().all():
        for call in calls:
            stock(matrix, *call)
        return
    iou = _rotated_overlaps(stock.__globals__["batch_probiou"], calls) if truth["bboxes"].shape[1] == 5 else None
    rows = _rows(found) if iou is None else _rows(found).to(iou.device)
    table = _table(rows, [len(call[0]["cls"]) for call in calls])
    # Suppression sorts its results, while end-to-end heads do not.
    confidence = table.rows.new_full(table.rows.shape[:2], -torch.inf)
    confidence[table.at] = table.rows[table.at][:, 4]
    order = confidence.argsort(dim=1, descending=True, stable=True)
    rows = table.rows.gather(1, order[..., None].expand_as(table.rows))
    labels = _labels(truth)
    image = _image_of([call[1]["cls"].numel() for call in calls])
    labels = torch.cat([image.to(labels)[:, None], labels], 1).to(rows.device)
    if iou is not None:
        iou = iou.gather(1, order[image.to(order.device)])
    conf, iou_thres = calls[0][2:]
    matrix.matrix += confusions(rows, labels, matrix.nc, conf, iou_thres, table.counts, iou).numpy()


def _rotated_overlaps(probiou: Callable[..., Tensor], calls: list[Call]) -> Tensor:
    """Return (labels of all images, most detections of an image), as :class:`MatchAll` has computed it, or by the framework's function."""
    most = max(1, *(len(call[0]["cls"]) for call in calls))
    parts = []
    for detections, label, *_ in calls:
        function, part = label.get(OVERLAPS, (None, None))
        if function is not probiou:
            part = probiou(label["bboxes"], detections["bboxes"]).float()
        parts.append(F.pad(part, (0, most - part.shape[1])))
    return torch.cat(parts)


def confuse(_: object, stock: Function, __: object) -> Function:
    """Return ``ConfusionMatrix.process_batch`` by one operator; kept matches (``visualize``) get the original."""

    @functools.wraps(stock)
    def process_batch(
        self: ConfusionMatrix, detections: dict[str, Tensor], batch: Batch, conf: float = 0.25, iou_thres: float = 0.45
    ) -> None:
        waiting = vars(self).get(WAITING)
        # Another function may have left some detections out, and look at the matrix after each image.
        if getattr(self.process_batch, "__func__", None) is not process_batch:
            batch, waiting = {name: value for name, value in batch.items() if name != OVERLAPS}, None
        call = detections, batch, conf, iou_thres
        if self.matches is not None or not _counts_as_stock(detections, batch, conf, iou_thres):
            stock(self, *call)
            return
        if waiting is None or (waiting and waiting[0][1][2:] != call[2:]):
            _count_together(stock, self, [call])
        else:
            kept = detections | {"bboxes": detections["bboxes"].clone()}  # a validator may scale them for its files
            waiting.append((stock, (kept, *call[1:])))

    return process_batch


@around
def match_predictions(
    _: object,
    stock: Function,
    self: Validator,
    pred_classes: Tensor,
    true_classes: Tensor,
    iou: Tensor,
    use_scipy: bool = False,
) -> Tensor:
    """Run ``BaseValidator.match_predictions`` in C++, by whatever overlaps a task has."""
    overlaps = as_float(iou).cpu()
    # In the original, a label of which an overlap is NaN keeps a detection from all others.
    if use_scipy or not _all_positive(self.iouv) or overlaps.isnan().any():
        return stock(self, pred_classes, true_classes, iou, use_scipy)
    count("val_optim", "images matched")
    rows, labels = torch.zeros(len(pred_classes), 6), torch.zeros(len(true_classes), 5)
    rows[:, 5], labels[:, 0] = pred_classes, true_classes
    return ops.match_detections(rows, labels, as_float(self.iouv).cpu(), rule=RULE, iou=overlaps)


def update_on_host(active: Active, stock: Function, kind: Stock, prepare_all: MatchAll | None) -> Function:
    """Return the ``update_metrics`` of a ``kind`` of validators by tensors on the host: one copy a batch instead of several syncs an image.

    A validator with its own ``_process_batch`` gets the original's. Where nobody looks between two batches, this is done while the GPU works
    on the next one.
    """
    processing = kind._process_batch

    def update_now(self: Validator, preds: Preds, batch: Batch) -> None:
        on_gpu, own = torch.device(self.device).type != "cpu", type(self)._process_batch is not processing
        if on_gpu and own:
            one_by_one(active, f"{type(self).__name__} has its own _process_batch.")
        if not on_gpu or own or not preds:
            stock(self, preds, batch)
            return
        if self.args.single_cls:  # in place, as the original does, for the plots that come later
            for pred in preds:
                pred["cls"].zero_()
        names = ["batch_idx", "cls", "bboxes", "keypoints"]
        if self.args.plots and self.args.visualize:  # matches are drawn with tensors on the image's device
            names.append("img")
        labels = batch | {name: batch[name].cpu() for name in names if name in batch}
        changes: list[tuple[object, str, object]] = [(self, "device", HOST)]
        if prepare_all is not None:
            prepare = prepare_all(self, preds, labels)
            if prepare is None:
                stock(self, preds, batch)
                return
            changes.append((self, "_prepare_batch", prepare))
            scale = self.scale_preds
            changes.append((self, "scale_preds", lambda predn, label: label.pop(SCALED, None) or scale(predn, label)))
            preds = [{name: pred[name] for name in pred if name != "masks"} for pred in preds]
        waiting: list[Any] = []
        matrix = getattr(self, "confusion_matrix", None)
        if matrix is not None:
            changes.append((matrix, WAITING, waiting))
        with own_attributes(changes):
            stock(self, _to_host(preds), labels)
        if waiting:
            _count_together(waiting[0][0], matrix, [call for _, call in waiting])

    @functools.wraps(stock)
    def update_metrics(self: Validator, preds: Preds, batch: Batch) -> None:
        meanwhile.run()
        if not (meanwhile.may_postpone() and preds and _may_wait(self)):
            update_now(self, preds, batch)
            return
        beside, validator = _beside(preds[0]["conf"]), weakref.ref(self)

        def update_later() -> None:
            if (alive := validator()) is not None:  # or it was interrupted, and another one runs
                with beside:
                    update_now(alive, preds, batch)

        meanwhile.postpone(update_later)

    return update_metrics


@around
def gather_stats(_: object, stock: Function, self: Validator) -> object:
    """Update the last batch before ``gather_stats``."""
    meanwhile.run()
    return stock(self)


def _may_wait(validator: Validator) -> bool:
    """Return whether only the framework's own code sees what a validator has gathered before all batches are done."""
    events = "on_val_batch_start", "on_val_batch_end"
    called = [call for event in events for call in vars(validator).get("callbacks", {}).get(event, [None])]
    gathers = [vars(kind)["gather_stats"] for kind in type(validator).__mro__ if "gather_stats" in vars(kind)]
    return (
        top_level(type(validator).__module__) == "ultralytics"
        and any(getattr(each, "__module__", None) == __name__ for each in gathers)  # which finishes the last batch
        and all(is_code_of(each, "ultralytics") for each in called)
        and not (validator.args.plots and validator.batch_i < 3)  # these batches are drawn
    )


def _beside(tensor: Tensor) -> Any:
    """Return a context of another stream, which goes on from here."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    stream = _stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    return torch.cuda.stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # little work, for which the host waits


def _to_host(preds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the detections with their tensors on the host, after one copy for those of a name. What a user adds that is no tensor stays."""
    host = [dict(pred) for pred in preds]
    alike: dict[tuple[Any, ...], list[tuple[dict[str, Any], Tensor]]] = {}
    for image in host:
        for name, value in image.items():
            if isinstance(value, Tensor):
                alike.setdefault((name, value.shape[1:], value.dtype, value.device), []).append((image, value))
    for (name, *_), held in alike.items():
        rows = torch.cat([torch.atleast_1d(value) for _, value in held]).cpu()
        for (image, value), part in zip(held, rows.split([value.shape[:1].numel() for _, value in held])):
            image[name] = part.view(value.shape)
    return host


class Overlaps(NamedTuple):
    """Compute how far a task's detections overlap its labels, on the GPU, for several images at once."""

    function: str  #: of the host, in the module of the task's validator
    matches: str  #: what ``_process_batch`` calls the matches by them
    #: Returns the number of elements of the largest tensor for so many labels and detections like these.
    elements: Callable[[int, int, Batch, dict[str, Tensor]], int]
    #: Returns (labels, detections) overlaps by the framework's function.
    between: Callable[[Function, Validator, Labels, Preds], Tensor]
    draws: bool = False  #: The labels' masks, so that only the rest of the labels needs its ``_prepare_batch``.


def _joined(images: list[Batch], name: str, device: torch.device) -> Tensor:
    return torch.cat([image[name] for image in images]).to(device)


def _rotated(probiou: Function, _: Validator, labels: Labels, preds: Preds) -> Tensor:
    device = preds[0]["bboxes"].device
    return probiou(_joined(labels, "bboxes", device), _joined(preds, "bboxes", device))


def _similarity(kpt_iou: Function, validator: Validator, labels: Labels, preds: Preds) -> Tensor:
    """Compute object keypoint similarity. A box has 0.53 of its area where no mask says more, as in xtcocotools."""
    device = preds[0]["keypoints"].device
    boxes = _joined(labels, "bboxes", HOST)
    area = ((boxes[:, 2:] - boxes[:, :2]).prod(1) * 0.53).to(device)
    points = [_joined(images, "keypoints", device) for images in (labels, preds)]
    return kpt_iou(*points, sigma=validator.sigma, area=area)


def _of_masks(mask_iou: Function, _: Validator, labels: Labels, preds: Preds) -> Tensor:
    found = _joined(preds, "masks", preds[0]["masks"].device)
    truth = _drawn(labels, found.device)
    if truth.shape[1:] != found.shape[1:]:
        truth = F.interpolate(truth[None], found.shape[1:], mode="bilinear", align_corners=False)[0].gt_(0.5)
    return mask_iou(truth.flatten(1), found.flatten(1).float())


def _drawn(labels: Labels, device: torch.device) -> Tensor:
    """Return (labels, h, w): 0 or 1. An image's own are these, or one map in which the pixels of label i are i + 1."""
    labels = [label for label in labels if len(label["cls"])]  # the others' masks may have another size
    if labels[0]["masks"].dim() == 3:
        return _joined(labels, "masks", device).float()
    maps = torch.cat([label["masks"].expand(len(label["cls"]), -1, -1) for label in labels])
    numbers = torch.cat([torch.arange(1, len(label["cls"]) + 1) for label in labels]).to(device)
    return (maps == numbers[:, None, None]).float()


def _pixels(labels: int, detections: int, label: Batch, pred: dict[str, Tensor]) -> int:
    """Return the number of pixels of labels drawn in their own size, and compared in that of the detections."""
    found = pred["masks"].shape[-2:].numel()
    return labels * max(found, label["masks"].shape[-2:].numel()) + detections * found


ROTATED_BOXES = Overlaps("batch_probiou", "tp", lambda labels, detections, *_: labels * detections, _rotated)
KEYPOINTS = Overlaps("kpt_iou", "tp_p", lambda m, n, _, pred: m * n * pred["keypoints"].shape[1], _similarity)
MASKS = Overlaps("mask_iou", "tp_m", _pixels, _of_masks, draws=True)

_MOST_ELEMENTS = 1 << 25  # of a tensor for several images


def _shows_masks(validator: Validator, pred: dict[str, Tensor]) -> bool:
    args = validator.args
    function = getattr(validator.pred_to_json, "__func__", None)
    encodes = getattr(function, ENCODES, None) is function is not None and _scales_as_stock(validator)
    shown = args.save_txt or (args.plots and args.visualize) or (args.save_json and not encodes)
    return "masks" in pred and bool(shown)


def _of_each_image(
    validator: Validator, overlaps: Overlaps, function: Function, labels: Labels, preds: Preds, most: int
) -> Tensor:
    """Return (labels of all images, most): overlaps with the detections of the label's image, and after these any numbers."""
    device = preds[0]["conf"].device
    found = [torch.zeros(0, most, device=device)]
    for images in _groups(overlaps, labels, preds):
        truth, sizes = labels[images], torch.tensor([len(pred["cls"]) for pred in preds[images]])
        image = _image_of([len(label["cls"]) for label in truth])
        rows, columns = len(image), int(sizes.sum())
        if not rows or not columns:
            found.append(found[0].new_zeros(rows, most))
            continue
        first = (sizes.cumsum(0) - sizes)[image].to(device)
        own = (first[:, None] + torch.arange(most, device=device)).clamp_(max=columns - 1)
        found.append(overlaps.between(function, validator, truth, preds[images]).gather(1, own).float())
    return torch.cat(found)


def _groups(overlaps: Overlaps, labels: Labels, preds: Preds) -> Iterator[slice]:
    """Yield images, as many at once as a tensor of the largest size allows."""
    first = rows = columns = 0
    for i, (label, pred) in enumerate(zip(labels, preds)):
        m, n = len(label["cls"]), len(pred["cls"])
        rows, columns = rows + m, columns + n
        if i > first and overlaps.elements(rows, columns, label, pred) > _MOST_ELEMENTS:
            yield slice(first, i)
            first, rows, columns = i, m, n
    yield slice(first, len(preds))
