"""v8DetectionLoss forward and backward: Ultralytics' own, the same compiled, and torch_fastdet's.

    python -m benchmarks.bench_v8_loss [--device cpu|cuda] [--out FOLDER]

Heads as a YOLOv8 or YOLO26 model gives them at 640x640 under AMP (float16; float32 on the CPU), 80 classes. Stock needs the
package ultralytics; without it the rows of stock are missing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Report, run
from torch_fastdet import ops

STRIDES = [8.0, 16.0, 32.0]
CLASSES = 80


class Model(nn.Module):
    """What a criterion asks a model for: hyper-parameters, a head, a parameter that says the device."""

    def __init__(self, reg_max: int, device: torch.device) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.zeros(1, device=device))
        self.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, epochs=100)
        head = SimpleNamespace(stride=torch.tensor(STRIDES, device=device), nc=CLASSES, reg_max=reg_max)
        self.__dict__["model"] = [head]


def make_outputs(batch: int, size: int, reg_max: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    maps = [size // int(stride) for stride in STRIDES]
    anchors = sum(side * side for side in maps)
    boxes = torch.randn(batch, 4 * reg_max, anchors, device=device)
    return {
        "boxes": (boxes if reg_max > 1 else boxes.abs() * 4).to(dtype),
        "scores": (torch.randn(batch, CLASSES, anchors, device=device) - 5).to(dtype),  # few classes are found
        "feats": [torch.empty(batch, 1, side, side, device=device, dtype=dtype) for side in maps],
    }


def make_targets(batch: int, boxes: int, device: torch.device) -> torch.Tensor:
    count = batch * boxes
    image = torch.arange(batch).repeat_interleave(boxes).view(-1, 1).float()
    label = torch.randint(0, CLASSES, (count, 1)).float()
    return torch.cat((image, label, torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.5 + 0.02), 1).to(device)


def ours(outputs: dict[str, Any], targets: torch.Tensor, reg_max: int, topk: int, topk2: int):
    heads = [outputs[name].detach().requires_grad_() for name in ("boxes", "scores")]
    settings = torch.tensor(ops.v8_loss_settings(), dtype=torch.float64, device=targets.device)
    sizes = [side for feature in outputs["feats"] for side in feature.shape[2:]]

    def call():
        loss, _, _ = ops.v8_loss(heads, targets, settings, STRIDES, sizes, reg_max=reg_max, topk=topk, topk2=topk2)
        torch.autograd.grad(loss.sum(), heads)

    return call


def theirs(outputs: dict[str, Any], targets: torch.Tensor, reg_max: int, topk: int, topk2: int, compiled: bool):
    from ultralytics.utils.loss import v8DetectionLoss

    criterion: Any = v8DetectionLoss(Model(reg_max, targets.device), topk, topk2)
    compute = torch.compile(criterion.__call__) if compiled else criterion
    heads = {name: outputs[name].detach().requires_grad_() for name in ("boxes", "scores")}
    batch = {"batch_idx": targets[:, 0], "cls": targets[:, 1:2], "bboxes": targets[:, 2:]}

    def call():
        loss, _ = compute({**outputs, **heads}, batch)
        torch.autograd.grad(loss.sum(), list(heads.values()))

    return call


def has_stock() -> bool:
    try:
        import ultralytics.utils.loss  # noqa: F401
    except ImportError:
        return False
    return True


def measure(report: Report) -> None:
    device = report.device
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    heads = {"v8": (16, 10, 10), "26 one2many": (1, 10, 10), "26 one2one": (1, 7, 1)}
    cases = [(16, 8, "v8"), (64, 8, "v8"), (16, 300, "v8"), (16, 8, "26 one2many"), (16, 8, "26 one2one")]
    for batch, boxes, name in cases if cuda else [(4, 8, "v8"), (4, 8, "26 one2one")]:
        reg_max = heads[name][0]
        outputs, targets = make_outputs(batch, 640, reg_max, device), make_targets(batch, boxes, device)
        variants = {"torch_fastdet": ours(outputs, targets, *heads[name])}
        if has_stock():
            variants["stock"] = theirs(outputs, targets, *heads[name], compiled=False)
            if cuda and (batch, boxes) == (16, 8):
                variants["stock, torch.compile"] = theirs(outputs, targets, *heads[name], compiled=True)
        boxes_, scores = outputs["boxes"], outputs["scores"]
        report.compare(
            f"640x640, {name} head, batch {batch}, {boxes} boxes an image",
            variants,
            bytes=(2 * boxes_.numel() + 3 * scores.numel()) * scores.element_size(),
            repetitions=30 if cuda else 5,
            warmup=5 if cuda else 1,
            inner=3 if cuda else 1,
            ungraphable=("stock", "stock, torch.compile"),
        )


if __name__ == "__main__":
    run("v8_loss", measure)
