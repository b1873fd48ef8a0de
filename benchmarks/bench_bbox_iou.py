"""Compare bbox_iou and iou_loss with PyTorch: YOLOv5's function, eager and compiled, and torchvision's.

    python -m benchmarks.bench_bbox_iou --device cuda|cpu --out FOLDER

"loss" is forward and backward with the gradient for the predicted boxes, as a training step needs it.
"""

from __future__ import annotations

import torch

from benchmarks import stock, work
from benchmarks.harness import Report, run
from torch_fastdet import ops

# These are the positives of a training step of yolov5s at batch 16 and 64, and more than any step has.
SIZES = {"cuda": (3_000, 30_000, 1_000_000), "cpu": (3_000, 300_000)}
OVERHEAD = "stock, torch.compile, reduce-overhead"


def boxes(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.rand(n, 4, device=device) * 40 + 5
    second = first + torch.randn(n, 4, device=device) * 3
    second[:, 2:].abs_().add_(1)
    return first, second


def step(loss, box1: torch.Tensor, box2: torch.Tensor):
    """Run forward and backward on an own leaf: a failed variant may leave a graph, which keeps its leaf's stream."""
    box1 = box1.detach().requires_grad_()
    return lambda: torch.autograd.grad(loss(box1, box2), box1)


def one_thread(function):
    def call():
        with torch.autograd.set_multithreading_enabled(False):
            return function()

    return call


def measure(report: Report) -> None:
    device = report.device
    bbox_iou = stock.yolov5_bbox_iou()

    def stock_iou(box1, box2):
        return bbox_iou(box1, box2, CIoU=True).squeeze(-1)

    def stock_loss(box1, box2):
        return (1 - stock_iou(box1, box2)).mean()

    compiled = torch.compile(stock_loss, dynamic=False)
    compiled_forward = torch.compile(stock_iou, dynamic=False)
    # This is for small inputs, where launches dominate. It keeps a CUDA graph of its own, which no graph can hold.
    overhead = torch.compile(stock_loss, dynamic=False, mode="reduce-overhead")
    for n in SIZES[device.type]:
        box1, box2 = boxes(n, device)
        # Time call to call, as in a training loop, long enough that the first call after other variants does not count.
        inner = 50 if n < 10_000 and device.type == "cuda" else 3
        repetitions = 50 if device.type == "cuda" else 10
        variants = {"torch_fastdet": step(ops.iou_loss, box1, box2)}
        if bbox_iou:
            variants["stock"] = step(stock_loss, box1, box2)
            variants["stock, torch.compile"] = step(compiled, box1, box2)
        if device.type == "cuda":
            # Autograd hands a GPU's backward to a thread of its own; this call does without that.
            variants["torch_fastdet, one thread"] = one_thread(variants["torch_fastdet"])
            if bbox_iou and n == SIZES["cuda"][0]:  # for small inputs; each size is compiled again
                variants[OVERHEAD] = step(overhead, box1, box2)
        try:
            from torchvision.ops import complete_box_iou_loss
        except ImportError:
            pass
        else:
            corners1 = torch.cat([box1[:, :2] - box1[:, 2:] / 2, box1[:, :2] + box1[:, 2:] / 2], 1)
            corners2 = torch.cat([box2[:, :2] - box2[:, 2:] / 2, box2[:, :2] + box2[:, 2:] / 2], 1)
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
            ungraphable=("torchvision (xyxy)", OVERHEAD),
        )
        # Measure what autograd itself takes: forward and backward of one operation with hardly any arithmetic.
        report.compare(
            f"autograd's own share: sum() forward+backward n={n}",
            {"sum()": step(lambda a, b: a.sum(), box1, box2)},
            views=("call",),
            repetitions=repetitions,
            inner=inner,
        )
        variants = {"torch_fastdet": lambda: ops.bbox_iou(box1, box2, CIoU=True)}  # noqa: B023
        if bbox_iou:
            variants["stock"] = lambda: stock_iou(box1, box2)  # noqa: B023
            variants["stock, torch.compile"] = lambda: compiled_forward(box1, box2)  # noqa: B023
        with torch.no_grad():
            report.compare(
                f"bbox_iou CIoU forward n={n}",
                variants,
                bytes=work.iou(n).bytes,
                repetitions=repetitions,
                inner=inner,
            )


if __name__ == "__main__":
    run("bbox_iou", measure)
