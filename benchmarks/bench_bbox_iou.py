"""bbox_iou and iou_loss against PyTorch: the formula as YOLOv5 and Ultralytics write it, eager and compiled, and torchvision.

    python -m benchmarks.bench_bbox_iou --device cuda|cpu --out FOLDER

"loss" is forward and backward, the gradient by the predicted boxes, as a training step needs it.
"""

from __future__ import annotations

import math

import torch

from benchmarks import work
from benchmarks.harness import Report, run
from torch_fastdet import ops

# A training step's positives: yolov5s at batch 16 and 64, and beyond any.
SIZES = {"cuda": (3_000, 30_000, 1_000_000), "cpu": (3_000, 300_000)}


def eager_ciou(box1: torch.Tensor, box2: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """CIoU of xywh boxes in some forty PyTorch operations: what users run today, without our guards."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = box1.chunk(4, -1), box2.chunk(4, -1)
    left1, right1, top1, bottom1 = x1 - w1 / 2, x1 + w1 / 2, y1 - h1 / 2, y1 + h1 / 2
    left2, right2, top2, bottom2 = x2 - w2 / 2, x2 + w2 / 2, y2 - h2 / 2, y2 + h2 / 2
    overlap = (right1.minimum(right2) - left1.maximum(left2)).clamp(0) * (
        bottom1.minimum(bottom2) - top1.maximum(top2)
    ).clamp(0)
    union = w1 * h1 + w2 * h2 - overlap + eps
    iou = overlap / union
    hull_w = right1.maximum(right2) - left1.minimum(left2)
    hull_h = bottom1.maximum(bottom2) - top1.minimum(top2)
    diagonal = hull_w**2 + hull_h**2 + eps
    distance = ((left2 + right2 - left1 - right1) ** 2 + (top2 + bottom2 - top1 - bottom1) ** 2) / 4
    v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)) ** 2
    with torch.no_grad():
        alpha = v / (1 - iou + v + eps)
    return iou - (distance / diagonal + v * alpha)


def eager_loss(box1: torch.Tensor, box2: torch.Tensor) -> torch.Tensor:
    return (1 - eager_ciou(box1, box2)).mean()


def boxes(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.rand(n, 4, device=device) * 40 + 5
    second = first + torch.randn(n, 4, device=device) * 3
    second[:, 2:].abs_().add_(1)
    return first.requires_grad_(), second


def step(loss, box1: torch.Tensor, box2: torch.Tensor):
    """Forward and backward."""
    return lambda: torch.autograd.grad(loss(box1, box2), box1)


def one_thread(function):
    def call():
        with torch.autograd.set_multithreading_enabled(False):
            return function()

    return call


def measure(report: Report) -> None:
    device = report.device
    compiled = torch.compile(eager_loss, dynamic=False)
    compiled_forward = torch.compile(eager_ciou, dynamic=False)
    # For small inputs, where launches are what costs; it keeps a CUDA graph of its own, which no graph can hold.
    overhead = torch.compile(eager_loss, dynamic=False, mode="reduce-overhead")
    for n in SIZES[device.type]:
        box1, box2 = boxes(n, device)
        # Call to call, as in a training loop: long enough that the first call after the other variants does not count.
        inner = 50 if n < 10_000 and device.type == "cuda" else 3
        repetitions = 50 if device.type == "cuda" else 10
        variants = {
            "torch_fastdet": step(ops.iou_loss, box1, box2),
            "eager": step(eager_loss, box1, box2),
            "torch.compile": step(compiled, box1, box2),
        }
        if device.type == "cuda":
            # Autograd hands a GPU's backward to a thread of its own; this is our call without that hand-over.
            variants["torch_fastdet, one thread"] = one_thread(variants["torch_fastdet"])
            variants["torch.compile, reduce-overhead"] = step(overhead, box1, box2)
        try:
            from torchvision.ops import complete_box_iou_loss
        except ImportError:
            pass
        else:
            corners1 = torch.cat([box1[:, :2] - box1[:, 2:] / 2, box1[:, :2] + box1[:, 2:] / 2], 1).detach()
            corners2 = torch.cat([box2[:, :2] - box2[:, 2:] / 2, box2[:, :2] + box2[:, 2:] / 2], 1)
            corners1.requires_grad_()
            variants["torchvision (xyxy)"] = step(
                lambda a, b: complete_box_iou_loss(a, b, reduction="mean"), corners1, corners2
            )
        report.compare(
            f"CIoU loss forward+backward n={n}",
            variants,
            bytes=work.iou_loss(n).bytes,
            repetitions=repetitions,
            inner=inner,
            # torchvision's boolean masks wait for the host.
            ungraphable=("torchvision (xyxy)", "torch.compile, reduce-overhead"),
        )
        # What autograd itself takes: the forward and backward of one operation without arithmetic to speak of.
        report.compare(
            f"autograd's own share: sum() forward+backward n={n}",
            {"sum()": step(lambda a, b: a.sum(), box1, box2)},
            views=("call",),
            repetitions=repetitions,
            inner=inner,
        )
        with torch.no_grad():
            report.compare(
                f"bbox_iou CIoU forward n={n}",
                {
                    "torch_fastdet": lambda: ops.bbox_iou(box1.detach(), box2, CIoU=True),  # noqa: B023
                    "eager": lambda: eager_ciou(box1.detach(), box2),  # noqa: B023
                    "torch.compile": lambda: compiled_forward(box1.detach(), box2),  # noqa: B023
                },
                bytes=work.iou(n).bytes,
                repetitions=repetitions,
                inner=inner,
            )


if __name__ == "__main__":
    run("bbox_iou", measure)
