"""Compare ComputeLoss forward and backward: YOLOv5's own, the same compiled, and torch_fastdet's.

    python -m benchmarks.bench_loss [--device cpu|cuda] [--out FOLDER]

Heads are those of a YOLOv5 model at 640x640 under AMP (float16; float32 on the CPU), with 80 classes and 8 boxes per
image. Stock needs the package yolov5; without it stock's rows are missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks import stock, work
from benchmarks.harness import Report, run
from benchmarks.work import ANCHORS, STRIDES
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss

HYP = {
    "box": 0.05,
    "cls": 0.5,
    "cls_pw": 1.0,
    "obj": 1.0,
    "obj_pw": 1.0,
    "anchor_t": 4.0,
    "fl_gamma": 0.0,
    "label_smoothing": 0.0,
}
CLASSES, CHANNELS = 80, 32


class Model(nn.Module):
    """Provide what ComputeLoss needs of a model: hyper-parameters, a Detect at the end, a parameter on the device."""

    def __init__(self, device: torch.device):
        super().__init__()
        stride = torch.tensor(STRIDES, device=device).float()
        detect: Any = nn.Module()
        detect.na, detect.nc, detect.nl, detect.nm, detect.stride = 3, CLASSES, 3, CHANNELS, stride
        detect.anchors = torch.tensor(ANCHORS, device=device).float().view(3, 3, 2) / stride.view(3, 1, 1)
        self.model = nn.ModuleList([detect])
        self.where = nn.Parameter(torch.zeros(1, device=device))
        self.hyp = dict(HYP)


def make_heads(batch: int, size: int, device: torch.device, channels_last: bool, extra: int = 0) -> list[torch.Tensor]:
    """Make heads as after the last convolution, with low objectness as in training; channels_last is a view."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    heads = []
    for stride in STRIDES:
        cells = size // stride
        outputs = CLASSES + 5 + extra
        shape = (batch, cells, cells, 3, outputs) if channels_last else (batch, 3, cells, cells, outputs)
        head = torch.randn(shape, device=device)
        head[..., 4] -= 4
        head = head.to(dtype)
        heads.append((head.permute(0, 3, 1, 2, 4) if channels_last else head).requires_grad_())
    return heads


def make_targets(batch: int, boxes: int, device: torch.device) -> torch.Tensor:
    count = batch * boxes
    image = torch.arange(batch).repeat_interleave(boxes).view(-1, 1).float()
    label = torch.randint(0, CLASSES, (count, 1)).float()
    return torch.cat((image, label, torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.5 + 0.02), 1).to(device)


def leaves(heads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same memory for one variant alone: a failed one may leave a graph, which keeps its leaves' streams."""
    return [head.detach().requires_grad_() for head in heads]


def step(compute, heads: list[torch.Tensor], targets: torch.Tensor):
    device = targets.device.type

    def call():
        with torch.autocast(device, enabled=device == "cuda"):  # as train.py has it
            loss, _ = compute(heads, targets)
        for head in heads:
            head.grad = None
        loss.backward()

    return call


def measure_segmentation(report: Report) -> None:
    device = report.device
    cuda = device.type == "cuda"
    model = Model(device)
    theirs = stock.yolov5_segmentation_loss(model)
    for batch, boxes in ((16, 8), (64, 8)) if cuda else ((2, 8),):
        targets, heads = make_targets(batch, boxes, device), make_heads(batch, 640, device, False, CHANNELS)
        protos = torch.randn(batch, CHANNELS, 160, 160, device=device).to(heads[0].dtype)
        masks = torch.randint(0, boxes + 1, (batch, 160, 160), device=device).float()

        def variant(compute, heads=heads, protos=protos, masks=masks, targets=targets):
            mine = leaves([*heads, protos])
            return step(lambda all_, rows: compute((all_[:-1], all_[-1]), rows, masks), mine, targets)

        variants = {"torch_fastdet": variant(SegmentationLoss(model, overlap=True))}
        if theirs:
            variants["stock"] = variant(theirs)
        read = [*heads, protos]
        report.compare(
            f"segmentation, 640x640, batch {batch}, {boxes} boxes an image",
            variants,
            bytes=sum(2 * t.numel() * t.element_size() for t in read),
            repetitions=20 if cuda else 3,
            warmup=5 if cuda else 1,
            inner=3 if cuda else 1,
            ungraphable=("stock",),
        )


def measure(report: Report) -> None:
    device = report.device
    torch.manual_seed(0)
    model = Model(device)
    ours, theirs = ComputeLoss(model), stock.yolov5_loss(model)
    cases = ((16, 8), (64, 8), (16, 40)) if device.type == "cuda" else ((4, 8),)
    for batch, boxes in cases:
        targets = make_targets(batch, boxes, device)
        heads = make_heads(batch, 640, device, False)
        nhwc = make_heads(batch, 640, device, True)
        variants = {
            "torch_fastdet": step(ours, leaves(heads), targets),
            "torch_fastdet, channels_last": step(ours, leaves(nhwc), targets),
        }
        if theirs:
            variants["stock"] = step(theirs, leaves(heads), targets)
            if device.type == "cuda":
                variants["stock, torch.compile"] = step(torch.compile(theirs.__call__), leaves(heads), targets)
                if (batch, boxes) == cases[0]:
                    overhead = torch.compile(theirs.__call__, mode="reduce-overhead")
                    variants["stock, torch.compile, reduce-overhead"] = step(overhead, leaves(heads), targets)
        report.compare(
            f"640x640, batch {batch}, {boxes} boxes an image",
            variants,
            bytes=work.yolov5_loss(batch, itemsize=heads[0].element_size()).bytes,
            repetitions=30 if device.type == "cuda" else 5,
            warmup=5 if device.type == "cuda" else 1,
            inner=3 if device.type == "cuda" else 1,
            ungraphable=("stock", "stock, torch.compile", "stock, torch.compile, reduce-overhead"),
        )
    measure_segmentation(report)
    # Measure what autograd itself takes: a forward and backward pass with hardly any arithmetic.
    alone = [torch.zeros(1, device=device, requires_grad=True) for _ in range(3)]
    report.compare(
        "autograd's own share: sum() of three numbers forward+backward",
        {"sum()": step(lambda heads, _: (torch.cat(heads).sum(), None), alone, targets)},
        views=("call",),
        repetitions=30,
        inner=3,
    )


if __name__ == "__main__":
    run("loss", measure)
