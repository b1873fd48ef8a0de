"""Does what val.py does with the detections of an image, without host syncs: matching, confusion matrix, scaled boxes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet._say import count
from torch_fastdet._torch.tensors import as_float
from torch_fastdet.patching.by_name import filed_as
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import in_place_of, with_names
from torch_fastdet.switches.val import average_precision


def process_batch(detections: Tensor, labels: Tensor, iouv: Tensor, *, iou: Tensor | None = None) -> Tensor:
    """Return the correct detections (n, t) of one image at each IoU threshold, on iouv's device, as val.py's ``process_batch``.

    YOLOv5 leaves labels of equal IoU to an unstable sort; the later one counts here. ``iou`` are other overlaps (m, n) than those of the boxes.
    """
    count("val_optim", "images matched")
    thresholds = as_float(iouv).to(detections.device)
    return ops.match_detections(as_float(detections), labels, thresholds, iou=iou).to(iouv.device)


def process_batch_of_masks(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``process_batch`` of YOLOv5's segment/val.py, which matches by boxes or by masks: the original code makes the masks' overlaps."""

    @in_place_of(stock)
    def process_batch_of_masks(
        detections: Tensor,
        labels: Tensor,
        iouv: Tensor,
        pred_masks: Any = None,
        gt_masks: Any = None,
        overlap: bool = False,
        masks: bool = False,
    ) -> Tensor:
        iou = None
        if masks:
            iou = _mask_overlaps(stock, detections, labels, iouv, pred_masks.float(), gt_masks.float(), overlap)
        return process_batch(detections, labels, iouv, iou=iou)

    return process_batch_of_masks


def _mask_overlaps(stock: Function, detections: Tensor, labels: Tensor, iouv: Tensor, *masks: object) -> Tensor:
    """Return (m, n): what the original code finds by ``mask_iou``. It gets no thresholds, so that it matches nothing and waits for nothing."""
    found: list[Tensor] = []

    def mask_iou(*args: object, **kwargs: object) -> Tensor:
        found.append(stock.__globals__["mask_iou"](*args, **kwargs))
        return found[-1]

    with_names(stock, mask_iou=mask_iou)(detections, labels, iouv[:0], *masks, masks=True)
    return found[0]


def scale_boxes(img1_shape: Sequence[int], boxes: Any, img0_shape: Sequence[int], ratio_pad: Any = None) -> object:
    """Return boxes of a letterboxed image in pixels of the original one, in place, as YOLOv5's ``scale_boxes``: the same bits."""
    gain = min(map(operator.truediv, img1_shape[:2], img0_shape)) if ratio_pad is None else ratio_pad[0][0]
    for axis, (outer, inner) in enumerate(((img1_shape[1], img0_shape[1]), (img1_shape[0], img0_shape[0]))):
        border = (outer - inner * gain) / 2 if ratio_pad is None else ratio_pad[1][axis]
        # A slice, because a list of columns becomes an index tensor on the GPU, a copy from the host each time.
        sides = boxes[..., axis:4:2]
        sides -= border
        sides /= gain
        if isinstance(sides, Tensor):
            sides.clamp_(0, inner)
        else:
            sides.clip(0, inner, out=sides)
    return boxes


def plotted(stock: Function, given: Any, result: average_precision.Curves) -> tuple[object, ...]:
    """Return what ``ap_per_class`` of utils.metrics returns behind the numbers, once its plots are drawn: nothing."""
    if given.plot:
        shown = dict(enumerate(name for number, name in given.names.items() if number in result.classes))
        by_recall = [values for values in result.precision_by_recall() if values is not None]
        average_precision.plot(stock, given, result, by_recall, shown)
    return ()


def confusion_matrix_class(stock: type, on_use: Callable[[], object] = lambda: None) -> type:
    """Return a class that derives from the original's ``ConfusionMatrix``; ``on_use`` is called with each new one.

    Counts stay on the device until ``matrix`` is read. A copy is of the original's class, and so is what is pickled.
    """

    class ConfusionMatrix(stock):
        _counts: Tensor | None = None

        def __init__(self, nc: int, conf: float = 0.25, iou_thres: float = 0.45) -> None:
            on_use()
            super().__init__(nc, conf, iou_thres)

        @property
        def matrix(self) -> object:
            """Return (nc + 1, nc + 1) array of counts by [predicted, true]. Reading it waits for the device."""
            if self._counts is not None:
                self.__dict__["matrix"] += self._counts.cpu().numpy()
                self._counts = None
            return self.__dict__["matrix"]

        @matrix.setter
        def matrix(self, value: object) -> None:
            self._counts, self.__dict__["matrix"] = None, value

        def process_batch(self, detections: Tensor | None, labels: Tensor) -> None:
            """Add the detections (n, 6), or None, and the labels (m, 5) of one image; a class beyond nc is not counted."""
            conf, iou_thres = self.conf, self.iou_thres
            if not (isinstance(conf, Real) and isinstance(iou_thres, Real)):  # stock says what is wrong
                super().process_batch(detections, labels)
                return
            if detections is None:  # stock passes the classes alone
                labels = torch.nn.functional.pad(labels[:, None].float(), (0, 4))
                detections = labels.new_zeros(0, 6)
            if self._counts is None or self._counts.device != labels.device:
                self.matrix  # noqa: B018  what another device has counted
                with torch.inference_mode(False):  # made in validation, and good for any later use
                    self._counts = torch.zeros(self.nc + 1, self.nc + 1, dtype=torch.int64, device=labels.device)
            ops.confusion_matrix_(self._counts, as_float(detections), labels, None, float(conf), float(iou_thres))

        def __getstate__(self) -> dict[str, object]:
            state = vars(self) | {"matrix": self.matrix}
            state.pop("_counts", None)
            return state

        def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
            return filed_as(stock, self.__getstate__())

        def __copy__(self) -> object:
            copied: Any = object.__new__(stock)
            vars(copied).update(self.__getstate__())
            return copied

        def __deepcopy__(self, memo: dict[int, object]) -> object:
            return copy.deepcopy(copy.copy(self), memo)

    ConfusionMatrix.__module__, ConfusionMatrix.__qualname__ = __name__, "ConfusionMatrix"
    return ConfusionMatrix
