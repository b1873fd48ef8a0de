"""Provide the suppression tests' predictions: trained-like and adversarial, small enough for the oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def clustered(images: int, anchors: int, classes: int, nm: int = 0, size: float = 640.0, seed: int = 0) -> Tensor:
    """Return float32 boxes in clusters around a few objects, with falling scores, as a trained YOLOv5 gives them."""
    g = torch.Generator().manual_seed(seed)
    objects = max(1, anchors // 12)
    which = torch.randint(objects, (images, anchors), generator=g)
    center = torch.rand(images, objects, 2, generator=g) * size
    side = torch.rand(images, objects, 2, generator=g) * size / 4 + 4
    kind = torch.randint(max(classes, 1), (images, objects), generator=g)
    take = which[..., None].expand(-1, -1, 2)
    prediction = torch.empty(images, anchors, 5 + classes + nm)
    jitter = torch.randn(images, anchors, 4, generator=g) * 0.08
    prediction[..., :2] = center.gather(1, take) + jitter[..., :2] * side.gather(1, take)
    prediction[..., 2:4] = side.gather(1, take) * jitter[..., 2:].exp()
    prediction[..., 4] = torch.rand(images, anchors, generator=g) ** 2
    prediction[..., 5 : 5 + classes] = torch.rand(images, anchors, classes, generator=g) ** 4
    if classes:
        best = kind.gather(1, which)[..., None]
        prediction[..., 5 : 5 + classes].scatter_(2, best, torch.rand(images, anchors, 1, generator=g) * 0.5 + 0.5)
    prediction[..., 5 + classes :] = torch.randn(images, anchors, nm, generator=g)
    return prediction


def rotated(images: int, anchors: int, classes: int, size: float = 640.0, seed: int = 0) -> Tensor:
    """Return rotated boxes in clusters, (images, 4 + classes + 1, anchors), angles last. Confidences are distinct."""
    g = torch.Generator().manual_seed(seed)
    upright = clustered(images, anchors, classes, 1, size, seed)
    order = torch.stack([torch.randperm(anchors * classes, generator=g) for _ in range(images)])
    upright[..., 5:-1] = ((order + 1) / (anchors * classes + 1)).view(images, anchors, classes) ** 3
    upright[..., 3] *= 0.2 + torch.rand(images, anchors, generator=g)
    upright[..., -1] = torch.rand(images, anchors, generator=g) * 3.2 - 0.8
    return torch.cat((upright[..., :4], upright[..., 5:]), -1).transpose(1, 2).contiguous()


def of_boxes(boxes: Tensor, confidence: Tensor, classes: int = 1, kind: Tensor | None = None) -> Tensor:
    """Return one image of the given boxes (x, y, width, height), objectness 1 and the given class confidence."""
    prediction = torch.zeros(1, len(boxes), 5 + classes)
    prediction[0, :, :4] = boxes
    prediction[0, :, 4] = 1
    kind = torch.zeros(len(boxes), dtype=torch.long) if kind is None else kind
    prediction[0, torch.arange(len(boxes)), 5 + kind] = confidence
    return prediction


def _grid(count: int, step: float, side: float) -> Tensor:
    i = torch.arange(count)
    across = int(count**0.5) + 1
    return torch.stack((i % across * step + 50, i // across * step + 50, i * 0 + side, i * 0 + side), 1).float()


def adversarial() -> dict[str, Tensor]:
    """Return a dict that maps names to single images (1, N, 5 + classes)."""
    g = torch.Generator().manual_seed(1)
    falling = torch.linspace(0.99, 0.3, 700)
    cases = {
        "all tied": of_boxes(_grid(700, 9, 12), torch.full((700,), 0.5)),
        "all overlapping": of_boxes(torch.tensor([[100.0, 100, 50, 50]]).repeat(700, 1), falling),
        "none overlapping": of_boxes(_grid(700, 20, 10), falling[torch.randperm(700, generator=g)]),
        "tied in pairs": of_boxes(_grid(700, 9, 12), (torch.arange(700) // 2 * 0.001 + 0.2)),
        "alternating classes": of_boxes(
            torch.tensor([[100.0, 100, 50, 50]]).repeat(700, 1), falling, 3, torch.arange(700) % 3
        ),
    }
    # The IoU is exactly one half: 10 x 10 against 10 x 5 inside it. It is suppressed only below that threshold.
    half = torch.tensor([[20.0, 20, 10, 10], [20, 17.5, 10, 5], [100, 100, 10, 10], [100, 97.5, 10, 5]])
    cases["IoU at the threshold"] = of_boxes(half, torch.tensor([0.9, 0.8, 0.7, 0.6]))
    # The IoU, 6 / 10, rounds to float32(0.6).
    exact = torch.tensor([[20.0, 20, 10, 10], [20, 18, 10, 6]])
    cases["IoU at 0.6"] = of_boxes(exact, torch.tensor([0.9, 0.8]))
    cases["score at the threshold"] = of_boxes(_grid(64, 20, 10), torch.tensor([0.25, 0.250001, 0.5, 0.2499999] * 16))
    flat = torch.tensor(
        [[10.0, 10, 0, 0], [10, 10, 0, 5], [10, 10, -6, 4], [10, 10, -6, -4], [10, 10, 6, 4], [10, 10, 0, 0]]
    )
    cases["degenerate boxes"] = of_boxes(flat, torch.tensor([0.9, 0.85, 0.8, 0.75, 0.7, 0.65]))
    huge = torch.tensor(
        [
            [0.0, 0, 1e20, 1e20],
            [1e30, 0, 1e30, 5],
            [300, 300, 6e4, 6e4],
            [300, 300, 6e4, 6e4],
            [10, 10, 5, 5],
            [-9000, 10, 5, 5],
        ]
    )
    cases["huge boxes"] = of_boxes(huge, torch.tensor([0.9, 0.85, 0.8, 0.75, 0.7, 0.65]), 2, torch.arange(6) % 2)
    cases["beyond max_wh"] = of_boxes(
        torch.tensor([[7690.0, 7690, 20, 20], [10, 10, 20, 20]]), torch.tensor([0.9, 0.8]), 2, torch.tensor([0, 1])
    )
    bad = clustered(1, 60, 3, seed=5)
    bad[0, 0, 4] = float("nan")
    bad[0, 1, 4] = float("inf")
    bad[0, 2, 5] = float("nan")
    bad[0, 3, 6] = float("inf")
    bad[0, 4, 0] = float("nan")
    bad[0, 5, 2] = float("inf")
    bad[0, 6, 1] = -float("inf")
    bad[0, 7, 4] = -float("inf")
    cases["NaN and Inf"] = bad
    return cases
