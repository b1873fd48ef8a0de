"""Tries the losses of Ultralytics' criteria on small batches that tell them from other losses."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Names, Stock
from torch_fastdet.switches.frameworks import REFERENCE
from torch_fastdet.switches.loss.ultralytics import drop_in

# Some constants of Ultralytics are not parameters. A version that changes them gives another loss here.
GAINS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}
TASK_GAINS = {"pose": 12.0, "kobj": 1.0, "angle": 1.0, "rle": 1.0}
# The trials of each criterion have these reg_max, topk and topk2: distributions as in one2many, distances as in one2one.
BRANCHES = ((16, 10, None), (1, 7, 5))
TRIALS = {
    "v8DetectionLoss": BRANCHES,
    "v8SegmentationLoss": BRANCHES,
    "SegmentLoss26": BRANCHES,
    "v8PoseLoss": BRANCHES[:1],
    "PoseLoss26": BRANCHES,
    "v8OBBLoss": BRANCHES,
}

# The image is small and its cells are fine: the least side of a box (the second stride) holds more anchors than any topk.
STRIDES, HEIGHT, WIDTH = (4, 32), 64, 96
CLASSES = 3
KEYPOINTS, MASK_CHANNELS, MASK_STRIDE = 5, 4, 4
# Rows are x, y, w, h in pixels. The first box of each image is below the least side; the last two compete for the same anchors.
BOXES = (
    ((22.3, 20.6, 11.7, 9.4), (31.2, 35.1, 44.9, 50.3), (56.8, 30.7, 71.6, 47.2), (58.1, 30.2, 70.3, 48.9)),
    ((70.4, 41.9, 8.9, 13.3), (61.7, 29.2, 55.3, 45.8), (36.1, 33.3, 51.4, 24.7), (37.0, 33.9, 52.5, 25.6)),
)


class _Flow(nn.Module):
    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        return -x.square().sum(1) / 2


class _Model(nn.Module):
    def __init__(self, reg_max: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.args = SimpleNamespace(**GAINS, **TASK_GAINS, epochs=1, overlap_mask=True)
        head = SimpleNamespace(stride=torch.tensor(STRIDES, dtype=torch.float32), nc=CLASSES, reg_max=reg_max)
        head.flow_model = _Flow()
        self.kpt_shape = head.kpt_shape = [KEYPOINTS, 3]
        self.__dict__["model"] = [head]


def trial(reg_max: int) -> tuple[Names, dict[str, torch.Tensor]]:
    """Return predictions and labels of a small batch whose assignment has no ties.

    ``torch.topk`` returns equal values in an order that depends on the machine. So each anchor predicts a box that covers one of
    the labels, more or less well: each label has more candidates of positive, distinct alignment than topk takes.
    """
    generator = torch.Generator().manual_seed(12)  # whose assignment compares no two numbers that are closer than 0.1%

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    centers, cells = [], []
    for stride in STRIDES:
        y, x = torch.meshgrid(torch.arange(HEIGHT // stride), torch.arange(WIDTH // stride), indexing="ij")
        centers.append((torch.stack((x, y), -1).view(-1, 2) + 0.5) * stride)
        cells.append(torch.full((x.numel(), 1), float(stride)))
    center, cell = torch.cat(centers), torch.cat(cells)
    labels = torch.tensor(BOXES)
    images, count, anchors = *labels.shape[:2], len(center)

    covered = labels[torch.arange(images).view(-1, 1), (rand(images, anchors) * count).long()]
    middle, half = covered[..., :2], covered[..., 2:] / 2
    sides = torch.cat((center - middle + half, middle + half - center), -1) / cell
    sides = sides.clamp(min=0.1) + rand(images, anchors, 4) * rand(images, anchors, 1) * 2
    if reg_max > 1:
        distance = sides.unsqueeze(-1) - torch.arange(reg_max)
        sides = (rand(images, anchors, 4, reg_max) - distance**2).flatten(2)
    preds = {
        "boxes": sides.transpose(1, 2).contiguous(),
        "scores": rand(images, CLASSES, anchors) * 6 - 4,
        "feats": [torch.zeros(images, 1, HEIGHT // stride, WIDTH // stride) for stride in STRIDES],
    }
    size = HEIGHT // MASK_STRIDE, WIDTH // MASK_STRIDE
    preds |= {
        "mask_coefficient": rand(images, MASK_CHANNELS, anchors) - 0.5,
        "proto": rand(images, MASK_CHANNELS, *size) * 4 - 2,
        "kpts": rand(images, KEYPOINTS * 3, anchors) * 2 - 1,
        "angle": rand(images, 1, anchors) * 0.6 - 0.1,
        "semantic": (torch.arange(images * CLASSES * 96.0) * 0.7).sin().view(images, CLASSES, 8, 12),
    }
    batch = {
        "masks": (rand(images, *size) * (count + 1)).floor(),
        "sem_masks": (torch.arange(images * size[0] * size[1]) % CLASSES).view(images, *size),
        "keypoints": torch.cat((rand(images * count, KEYPOINTS, 2), rand(images * count, KEYPOINTS, 1).round() * 2), 2),
        "batch_idx": torch.arange(images).repeat_interleave(count).float(),
        "cls": (torch.arange(images * count) % CLASSES).float(),
        "bboxes": labels.view(-1, 4) / torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT]),
    }
    # Keypoints are near those of the label that the anchor covers, so that OKS also exceeds 0. The later the anchor, the farther they are.
    points = batch["keypoints"].view(images, count, KEYPOINTS, 3)[..., :2] * torch.tensor([WIDTH, HEIGHT])
    number = torch.zeros(images, anchors, dtype=torch.long)
    for k in range(count):
        number[(covered == labels[:, None, k]).all(2)] = k
    near = points[torch.arange(images).view(-1, 1), number] - center[:, None]
    near += ((torch.arange(near.numel()) * 0.9).sin().view(near.shape)) * 4
    preds["near_kpts"] = torch.cat((near / cell[:, None], near[..., :1].cos()), 3).flatten(2).transpose(1, 2)
    preds["kpts_sigma"] = (torch.arange(images * KEYPOINTS * 2 * anchors) * 0.3).sin().view(images, -1, anchors)
    return preds, batch


def _losses(stock: Stock) -> tuple[list[object], list[object]]:
    found: tuple[list[object], list[object]] = ([], [])
    for reg_max, topk, topk2 in TRIALS[stock.__name__]:
        preds, batch = trial(reg_max)
        if reg_max == 1:  # as YOLO26 has it
            preds["proto"] = preds["proto"], preds["semantic"]
        if stock.__name__ == "PoseLoss26":
            preds["kpts"] = preds["near_kpts"]
        if stock.__name__ == "v8OBBLoss":
            turns = torch.linspace(-0.2, 0.7, len(batch["bboxes"])).view(-1, 1)
            batch["bboxes"] = torch.cat((batch["bboxes"], turns), 1)
        for results, kind in zip(found, (stock, drop_in(stock))):
            loss, items = kind(_Model(reg_max), topk, topk2)(dict(preds), batch)
            results += [loss, list(items)]
    return found


def _end_to_end_losses(stock: Stock) -> tuple[list[object], list[object]]:
    found: tuple[list[object], list[object]] = ([], [])
    preds, batch = trial(1)
    preds = {"one2many": preds, "one2one": {**preds, "scores": preds["scores"] / 2}}
    for results, kind in zip(found, (stock, drop_in(stock))):
        model = _Model(1)
        model.args.epochs = 3
        criterion = kind(model)
        for _ in range(2):
            loss, items = criterion(preds, batch)
            results += [loss, list(items.values())]
            criterion.update()
    return found


def rtdetr_losses(stock: Stock) -> tuple[list[object], list[object]]:
    groups, queries, classes = [3, 1], 20, 3

    def numbers(sets: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        wave = (torch.arange(sets * 2 * queries * (4 + classes)) * 0.7).sin().view(sets, 2, queries, -1)
        return wave[..., :4] * 0.2 + 0.4, wave[..., 4:] * 3 - 1

    batch = {
        "cls": torch.tensor([0, 2, 1, 2]),
        "bboxes": torch.tensor(BOXES).view(-1, 4)[: sum(groups)] / WIDTH,
        "gt_groups": groups,
    }
    places = [torch.tensor([0, 1, 2, 6, 7, 8]), torch.tensor([0, 6])]
    meta = {"dn_pos_idx": places, "dn_gt_idx": [torch.arange(3), torch.tensor([3])], "dn_num_group": 2}
    found: tuple[list[object], list[object]] = ([], [])
    for results, kind in zip(found, (stock, drop_in(stock))):
        criterion = kind(nc=classes, use_vfl=True)
        terms = [criterion(numbers(3, queries), batch), criterion(numbers(2, queries), batch, *numbers(2, 12), meta)]
        results += [list(each.items()) for each in terms]
    return found


CRITERION = Behaves("its loss", _losses, 1e-4, REFERENCE)
END_TO_END = Behaves("its loss", _end_to_end_losses, 1e-4, REFERENCE)
RTDETR_CRITERION = Behaves("its loss", rtdetr_losses, 1e-4, REFERENCE)
