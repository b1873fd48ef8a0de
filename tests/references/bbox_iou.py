"""Define IoU, GIoU, DIoU and CIoU of box pairs in plain PyTorch; autograd gives the gradients.

The functions compute in the given dtype (float64 for an oracle). Their subgradients are those of the original functions
under torch 2.11, for any torch: equal corners share half and half, and boxes that touch without overlap (an extent of
exactly 0, the bound of clamp(0)) keep the gradient of the extent. torch 2.15's own clamp gives 0 there.
"""

import math

import torch


def _corners(box: torch.Tensor, xywh: bool, eps: float):
    """Return x1, y1, x2, y2, width, height."""
    c0, c1, c2, c3 = box.unbind(-1)
    if xywh:
        return c0 - c2 / 2, c1 - c3 / 2, c0 + c2 / 2, c1 + c3 / 2, c2, c3
    return c0, c1, c2, c3, c2 - c0, c3 - c1 + eps


def _aspect_angle(width: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
    """Return atan(width / height), with its limit at height 0; a point (0, 0) has angle 0 and no gradient."""
    flip = (width < 0) != (height < 0)
    width = torch.where(width < 0, -width, width)  # not abs(), whose gradient at 0 is 0
    height = torch.where(height < 0, -height, height)
    point = (width == 0) & (height == 0)
    angle = torch.atan2(width, torch.where(point, torch.ones_like(height), height))
    angle = torch.where(point, torch.zeros_like(angle), angle)
    return torch.where(flip, -angle, angle)


def at_least_zero(x: torch.Tensor) -> torch.Tensor:
    """Return clamp(min=0) with a gradient of 1 at 0."""
    return torch.where(x < 0, torch.zeros_like(x), x)


def bbox_iou(box1, box2, xywh=True, GIoU=False, DIoU=False, CIoU=False, eps=1e-7):
    ax1, ay1, ax2, ay2, aw, ah = _corners(box1, xywh, eps)
    bx1, by1, bx2, by2, bw, bh = _corners(box2, xywh, eps)
    overlap_w = at_least_zero(torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1))
    overlap_h = at_least_zero(torch.minimum(ay2, by2) - torch.maximum(ay1, by1))
    overlap = overlap_w * overlap_h
    union = aw * ah + bw * bh - overlap + eps
    iou = overlap / union
    hull_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    if DIoU or CIoU:
        diagonal = hull_w**2 + hull_h**2 + eps
        distance = ((bx1 + bx2 - ax1 - ax2) / 2) ** 2 + ((by1 + by2 - ay1 - ay2) / 2) ** 2
        penalty = distance / diagonal
        if CIoU:
            v = 4 / math.pi**2 * (_aspect_angle(bw, bh) - _aspect_angle(aw, ah)) ** 2
            with torch.no_grad():
                alpha = torch.where(v == 0, 0.0, v / ((1 - iou).clamp(min=0) + v + eps))
            penalty = penalty + alpha * v
        iou = iou - penalty
    elif GIoU:
        hull = hull_w * hull_h + eps
        iou = iou - (hull - union) / hull
    return iou.unsqueeze(-1)


def iou_loss(box1, box2, kind="ciou", xywh=True, reduction="mean", eps=1e-7):
    flags = {"iou": {}, "giou": {"GIoU": True}, "diou": {"DIoU": True}, "ciou": {"CIoU": True}}[kind]
    loss = 1 - bbox_iou(box1, box2, xywh=xywh, eps=eps, **flags)
    return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]
