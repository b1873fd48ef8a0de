"""``mask_optim`` of both hosts: whether a mask function of the installed version gives what ours gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_fastdet.hosts.engine.switch import Name, Switch


def sample() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prototypes 12 x 16, coefficients and boxes in a picture of 40 x 64, whose crop and resampling can be done in several orders."""
    g = torch.Generator().manual_seed(0)
    boxes = [[3.0, 5, 41, 33], [0, 0, 64, 40], [20.5, 10.5, 60.25, 38], [50, 30, 20, 10]]
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the user's defaults are
    return (
        torch.randn(4, 12, 16, generator=g, **kind),
        torch.randn(4, 4, generator=g, **kind),
        torch.tensor(boxes, **kind),
    )


class MaskOptim(Switch):
    name = "mask_optim"
    help = "masks of detections in one pass, without float masks at full size, in the validation, prediction and loss of segmentation"

    def refusal(self, name: Name, stock: Any) -> str | None:
        found = super().refusal(name, stock)
        if found is not None:
            return found
        if name.attribute == "crop_mask":
            agrees = same_crop(stock, name.drop_in)
        else:
            agrees = all(same_masks(stock, name.drop_in, *more) for more in arguments_of(name.attribute))
        return (
            None
            if agrees
            else f"{stock.__module__}.{stock.__name__} makes other masks than the version that it follows."
        )


def arguments_of(attribute: str) -> list[tuple[Any, ...]]:
    """What to try a function with, beside its tensors."""
    if attribute == "process_mask":
        return [((48, 64), False), ((48, 64), True)]
    return [((40, 64),)]


def same_masks(stock: Callable[..., Any], ours: Callable[..., Any], *arguments: Any) -> bool:
    tensors = sample()
    try:
        # Under a caller's autocast stock's products would be rounded.
        with torch.autocast("cpu", enabled=False):
            wanted, found = (function(*(t.clone() for t in tensors), *arguments) for function in (stock, ours))
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    except Exception:  # a version that takes or gives something else
        return False


def same_crop(stock: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether both crop alike, and both or neither of them in place."""
    protos, _, boxes = sample()
    try:
        (wanted, before), (found, after) = (
            (function(masks, boxes / 4), masks) for function in (stock, ours) for masks in (protos.clone(),)
        )
        return found.dtype == wanted.dtype and torch.equal(found, wanted) and torch.equal(before, after)
    except Exception:  # a version that takes or gives something else
        return False
