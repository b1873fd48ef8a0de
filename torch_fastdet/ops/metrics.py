"""Matches detections with labels for validation: correct detections by IoU threshold, and the confusion matrix."""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def match_detections(
    detections: Tensor,
    labels: Tensor,
    iouv: Tensor,
    counts: Tensor | None = None,
    rule: str = "best",
    iou: Tensor | None = None,
) -> Tensor:
    """Find detections that are correct at each IoU threshold, as YOLOv5's ``process_batch`` and Ultralytics do.

    A detection and a label match where their classes are equal and their IoU reaches the threshold. Each detection and
    each label matches once. A whole batch takes one launch, without a host sync, and has no gradient. Coordinates are
    float32: other types are converted first.

    Args:
        detections: (n, 6 or more) or (images, n, 6 or more), float16, bfloat16, float32 or float64: x1, y1, x2, y2,
            confidence, class; in the order of their confidence, as suppression returns them. Rows that are not dense are copied first.
        labels: (m, 5), class, x1, y1, x2, y2; with batched detections (m, 6), the image's index first. Same device, any order.
        iouv: (t,), the thresholds.
        counts: (images,), int64: the valid rows of each image. None: all rows. For batched detections.
        rule: "best" (YOLOv5): a detection claims only the label of its greatest IoU, and the first row that claims a label gets it.
            "greedy" (Ultralytics 8.4.190): in the order of the rows, a detection takes the label of greatest IoU that is left. Of two
            labels with the same IoU, "best" claims the later and "greedy" the earlier one.
        iou: (m, n), float16, bfloat16, float32 or float64, of each label with each detection of its image, such as that of masks or rotated
            boxes; it replaces the IoU of boxes. Same device; converted to float32.

    Returns:
        (n, t) or (images, n, t), bool, contiguous. False in rows past the count.

    Raises:
        RuntimeError: a wrong shape, dtype, layout or device.
        ValueError: an unknown rule, or 2**31 or more rows.

    Behavior: ``val.py`` of YOLOv5 v7.0 and ``BaseValidator.match_predictions`` of Ultralytics 8.4.190.
    """
    return torch.ops.torch_fastdet.match_detections(detections, labels, iouv, counts, rule, iou)


@checked
def confusion_matrix_(
    matrix: Tensor,
    detections: Tensor,
    labels: Tensor,
    counts: Tensor | None = None,
    conf: float = 0.25,
    iou_thres: float = 0.45,
    rule: str = "best",
    iou: Tensor | None = None,
) -> None:
    """Add the matches of detections and labels to a confusion matrix, as ``ConfusionMatrix.process_batch`` does.

    Detections above ``conf`` and labels match by IoU only, whatever their classes, where it is above ``iou_thres``. A whole batch takes one
    launch, without a host sync. The other arguments, such as other overlaps (``iou``), and the errors are those of
    :func:`match_detections`.

    Args:
        matrix: (nc + 1, nc + 1), int64, contiguous, changed in place: counts by [predicted, true]; the last row and column
            are the background. A class index outside of it is not counted.
        conf: detections at or below this confidence do not take part.
        iou_thres: the IoU that a match must exceed.
        rule: "best" (YOLOv5): a detection claims only the label of its greatest IoU, the detection of greatest IoU gets the
            label, and an image without any match adds no false positives. "greedy" (Ultralytics): in the order of the rows, a
            detection takes the label of greatest IoU that is left.

    Behavior: ``ConfusionMatrix`` of YOLOv5 v7.0 and of Ultralytics 8.4.190.
    """
    torch.ops.torch_fastdet.confusion_matrix_(matrix, detections, labels, counts, conf, iou_thres, rule, iou)
