"""Decides in which memory layout a model trains: NHWC (channels_last) where that is faster, else NCHW, as the framework has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import is_channels_last
from torch_fastdet._torch.private import in_group

#: Maps a precision to the first compute capability whose tensor cores are faster in NHWC. Measured on an H200, yolov5s at batch 16, forward
#: and backward, NCHW / NHWC: float16 12.4 / 9.3 ms, TF32 17.9 / 15.6, float32 46.2 / 47.3 (benchmarks/NOTES.md).
_FASTER_IN_NHWC = {"float16": (7, 0), "bfloat16": (8, 0), "TF32": (8, 0)}


def precision(device: torch.device) -> str:
    if torch.is_autocast_enabled(device.type):
        return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    return "TF32" if torch.backends.cudnn.allow_tf32 else "float32"


def takes_channels_last(device: torch.device) -> bool:
    """Return whether NHWC is faster on this GPU now. The ranks of a process group need one layout, whatever their GPUs are: NHWC."""
    return in_group() or is_faster_in_nhwc(precision(device), device)


def is_faster_in_nhwc(precision: str, device: torch.device) -> bool:
    least = _FASTER_IN_NHWC.get(precision)
    return least is not None and torch.cuda.get_device_capability(device) >= least


def to_channels_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def place(model: nn.Module, images: Tensor, say: Callable[[str], None]) -> Tensor:
    """Give the model's weights their layout, and return the images in it. Weights that are in NHWC stay there."""
    if not any(map(is_channels_last, model.parameters())):
        device, nhwc = images.device, takes_channels_last(images.device)
        say(f"trains in {'NHWC' if nhwc else 'NCHW'} memory ({precision(device)} on {device})")
        if not nhwc:
            return images
        to_channels_last(model)
    return images.contiguous(memory_format=torch.channels_last)
