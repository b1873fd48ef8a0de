"""Compare the losses of Ultralytics' tasks, forward and backward: its own, the same compiled, and torch_fastdet's.

    python -m benchmarks.bench_v8_loss [--device cpu|cuda] [--out FOLDER]

Heads are those of a YOLOv8 or YOLO26 model at 640x640 under AMP (float16; float32 on the CPU), 80 classes. Stock needs
the package ultralytics; without it its rows are missing.
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
KEYPOINTS, MASK_CHANNELS, MASK_STRIDE = 17, 32, 4


class Model(nn.Module):
    """Provide what a criterion needs of a model: hyper-parameters, a head, a parameter on the device."""

    def __init__(self, reg_max: int, device: torch.device) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.zeros(1, device=device))
        self.args = SimpleNamespace(
            box=7.5, cls=0.5, dfl=1.5, pose=12.0, kobj=1.0, rle=1.0, angle=1.0, epochs=100, overlap_mask=True
        )
        head = SimpleNamespace(stride=torch.tensor(STRIDES, device=device), nc=CLASSES, reg_max=reg_max)
        head.flow_model = None
        self.kpt_shape = head.kpt_shape = [KEYPOINTS, 3]
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


def add_task(outputs: dict[str, Any], targets: torch.Tensor, task: str, size: int) -> dict[str, torch.Tensor]:
    """Add the task's raw outputs; return its labels. Each mask is the middle of its box, smaller ones on top."""
    device, dtype = targets.device, outputs["scores"].dtype
    batch, _, anchors = outputs["scores"].shape
    if task.startswith("pose"):
        outputs["kpts"] = (torch.randn(batch, KEYPOINTS * 3, anchors, device=device) / 4).to(dtype)
        return {"keypoints": torch.rand(len(targets), KEYPOINTS, 3, device=device).round(decimals=1)}
    if task == "obb":
        outputs["angle"] = torch.rand(batch, 1, anchors, device=device).to(dtype)
        return {"bboxes": torch.cat((targets[:, 2:], torch.rand(len(targets), 1, device=device)), 1)}
    side = size // MASK_STRIDE
    outputs["mask_coefficient"] = (torch.randn(batch, MASK_CHANNELS, anchors, device=device) / 4).to(dtype)
    outputs["proto"] = torch.randn(batch, MASK_CHANNELS, side, side, device=device).to(dtype)
    masks = torch.zeros(batch, side, side, dtype=torch.uint8)
    rows = targets.cpu()
    for image in range(batch):
        mine = rows[rows[:, 0] == image]
        for index in mine[:, 4:].prod(1).argsort(descending=True).tolist():
            x, y, w, h = (mine[index, 2:] * side).tolist()
            top, left = max(0, int(y - 0.4 * h)), max(0, int(x - 0.4 * w))
            masks[image, top : int(y + 0.4 * h) + 1, left : int(x + 0.4 * w) + 1] = index + 1
    return {"masks": masks.to(device)}


EXTRA = {"segment": ("mask_coefficient", "proto"), "pose": ("kpts",), "obb": ("angle",)}
EXTRA |= {"segment 26": EXTRA["segment"], "pose 26": EXTRA["pose"]}


def our_task(outputs: dict[str, Any], targets: torch.Tensor, labels: dict[str, torch.Tensor], task: str):
    """Run only the operators, which a graph can capture."""
    device = targets.device
    heads = [outputs[name].detach().requires_grad_() for name in ("boxes", "scores", *EXTRA[task])]
    reg_max = heads[0].shape[1] // 4
    settings = torch.tensor(ops.v8_loss_settings(), dtype=torch.float64, device=device)
    gains = torch.tensor([12.0, 1.0], dtype=torch.float64, device=device)
    sigmas = torch.full((KEYPOINTS,), 1 / KEYPOINTS, device=device)
    sizes = [side for feature in outputs["feats"] for side in feature.shape[2:]]
    turned = torch.cat((targets[:, :2], labels["bboxes"]), 1) if task == "obb" else targets
    with_angle = torch.cat((settings, settings.new_ones(1)))

    def call():
        if task == "obb":
            loss, _, _ = ops.v8_obb_loss(*heads, turned, with_angle, STRIDES, sizes)
        elif task.startswith("pose"):
            loss, _, _ = ops.v8_pose_loss(
                heads[:2], heads[2], labels["keypoints"], sigmas, targets, settings, gains, STRIDES, sizes,
                reg_max=reg_max, compare_keypoints=task.endswith("26"),
            )  # fmt: skip
        else:
            loss, _, _ = ops.v8_segmentation_loss(
                heads[:2], heads[2], heads[3], labels["masks"], targets, settings, STRIDES, sizes,
                reg_max=reg_max, compare_masks=task.endswith("26"),
            )  # fmt: skip
        torch.autograd.grad(loss.sum(), heads)

    return call


def their_task(outputs: dict[str, Any], targets: torch.Tensor, labels: dict[str, torch.Tensor], task: str):
    from ultralytics.utils import loss as stock

    kinds = {"segment": stock.v8SegmentationLoss, "pose": stock.v8PoseLoss, "obb": stock.v8OBBLoss}
    kinds |= {"segment 26": stock.SegmentLoss26, "pose 26": stock.PoseLoss26}
    criterion: Any = kinds[task](Model(outputs["boxes"].shape[1] // 4, targets.device))
    heads = {name: outputs[name].detach().requires_grad_() for name in ("boxes", "scores", *EXTRA[task])}
    batch = {"batch_idx": targets[:, 0], "cls": targets[:, 1:2], "bboxes": targets[:, 2:], **labels}

    def call():
        with torch.autocast("cuda", enabled=targets.is_cuda):
            loss, _ = criterion({**outputs, **heads}, batch)
        torch.autograd.grad(loss.sum(), list(heads.values()))

    return call


def measure_tasks(report: Report) -> None:
    device = report.device
    cuda = device.type == "cuda"
    cases = [
        ("segment", 16, 8, 640),
        ("segment", 64, 8, 640),
        ("segment", 8, 100, 1280),
        ("pose", 16, 8, 640),
        ("pose", 16, 100, 640),
        ("obb", 16, 8, 640),
        ("obb", 8, 500, 1024),
        # These leave out the semantic and RLE parts, for which torch_fastdet runs PyTorch's own operations too.
        ("segment 26", 16, 8, 640),
        ("segment 26", 8, 100, 1280),
        ("pose 26", 16, 8, 640),
    ]
    for task, batch, boxes, size in (
        cases if cuda else [("segment", 2, 8, 640), ("pose", 2, 8, 640), ("obb", 2, 8, 640)]
    ):
        reg_max = 1 if task.endswith("26") else 16
        outputs, targets = make_outputs(batch, size, reg_max, device), make_targets(batch, boxes, device)
        labels = add_task(outputs, targets, task, size)
        variants = {"torch_fastdet": our_task(outputs, targets, labels, task)}
        if has_stock():
            variants["stock"] = their_task(outputs, targets, labels, task)
        read = [outputs[name] for name in ("boxes", *EXTRA[task])]
        report.compare(
            f"{size}x{size}, {task}, batch {batch}, {boxes} boxes an image",
            variants,
            bytes=sum(2 * t.numel() * t.element_size() for t in read)
            + 3 * outputs["scores"].numel() * outputs["scores"].element_size(),
            repetitions=20 if cuda else 3,
            warmup=5 if cuda else 1,
            inner=3 if cuda else 1,
            ungraphable=("stock",),
        )


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
    measure_tasks(report)


if __name__ == "__main__":
    run("v8_loss", measure)
