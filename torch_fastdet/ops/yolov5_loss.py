"""The whole YOLOv5 training loss: target assignment, CIoU, class and objectness entropy, and the heads' gradients."""

from __future__ import annotations

import torch

from torch_fastdet.ops._checks import check_optional_tensor, check_tensor, check_tensor_list


def yolov5_loss(
    heads: list[torch.Tensor],
    targets: torch.Tensor,
    anchors: torch.Tensor,
    balance: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    box: float = 0.05,
    obj: float = 1.0,
    cls: float = 0.5,
    cls_pw: float = 1.0,
    obj_pw: float = 1.0,
    label_smoothing: float = 0.0,
    fl_gamma: float = 0.0,
    anchor_t: float = 4.0,
    gr: float = 1.0,
    sort_obj_iou: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """YOLOv5's ComputeLoss as one operator: no host synchronisation, capturable in a CUDA graph, bitwise repeatable.

    Args:
        heads: raw outputs of the detection layers, one a level: (bs, na, ny, nx, no) or (bs, na*no, ny, nx), no = 5 +
            classes; float16, bfloat16, float32 or float64, any strides. Dense heads (contiguous, channels_last, and the
            permuted view of either) are read, and their gradients written, in their own layout, without a copy.
        targets: (nt, 6) float32: image index, class, x, y, width, height; the last four are shares of the image.
        anchors: (nl, na, 2) float32, in grid cells of their level (``Detect.anchors``).
        balance: (nl) or longer, float64: weight of each level's objectness.
        num_targets: one int64 on the heads' device: rows of ``targets`` in use, the others are padding. None: all rows.
        box: gain of the box part.
        obj: gain of the objectness part.
        cls: gain of the class part.
        cls_pw: weight of the class entropy's positive terms.
        obj_pw: weight of the objectness entropy's positive terms.
        label_smoothing: classes aim at 1 - s/2 and s/2.
        fl_gamma: above 0, both entropies are focal losses with this gamma and alpha 0.25.
        anchor_t: a target goes to an anchor if no side is this many times longer or shorter.
        gr: objectness aims at 1 - gr + gr * CIoU.
        sort_obj_iou: of several targets in one cell the one with the greatest CIoU gives the objectness (ties: the last in
            the order below). Otherwise the last does, by offset (centre, left, up, right, down), anchor, row of targets.

    Returns:
        loss: (1), the sum of the parts times the batch size; differentiable by the heads. float32 (float64 for float64).
        items: (3), box, objectness and class part.
        level_objectness: (nl), mean objectness entropy of each level, before gains.
        status: (4) int64: how many rows of targets were ignored, the first of them (:func:`yolov5_loss_fault` reads it),
            num_targets less the rows of targets where it is negative or exceeds them (else 0), 0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit each other.
        ValueError: on the CPU, a row of targets whose image is not in the batch, whose class is below 0 or not below the number of
            classes, or whose box is not finite. On a GPU it is ignored and counted, because the host does not wait for it.
        TypeError: an argument is not a tensor where one is expected, or heads is not a list of tensors.

    Heads in any other layout are read by their strides; their gradients are contiguous.

    Behaviour: that of ComputeLoss in YOLOv5 v7.0.
    """
    if not torch.jit.is_scripting():
        check_tensor_list("yolov5_loss", "heads", heads)
        check_tensor("yolov5_loss", "targets", targets)
        check_tensor("yolov5_loss", "anchors", anchors)
        check_tensor("yolov5_loss", "balance", balance)
        check_optional_tensor("yolov5_loss", "num_targets", num_targets)
    loss, items, levels, owner, _, _, _ = torch.ops.torch_fastdet.yolov5_loss(
        heads,
        targets,
        anchors,
        balance,
        num_targets,
        box_gain=box,
        obj_gain=obj,
        cls_gain=cls,
        cls_pw=cls_pw,
        obj_pw=obj_pw,
        label_smoothing=label_smoothing,
        fl_gamma=fl_gamma,
        anchor_t=anchor_t,
        gr=gr,
        sort_obj_iou=sort_obj_iou,
    )
    return loss, items, levels[:, 0], owner[-4:]


def yolov5_loss_fault(status: list[int]) -> tuple[int, int]:
    """Which of the targets was bad, from what :func:`yolov5_loss` reports. Plain Python, on the host.

    Args:
        status: the operator's status, as a list.

    Returns:
        Row and column of the first bad row of targets, (-1, -1) if there is none.
    """
    if status[0] == 0:
        return -1, -1
    fault = (1 << 62) - status[1]
    return fault // 6, fault % 6
