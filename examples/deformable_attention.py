"""Run the deformable attention of DETR-like models with torch_fastdet: a module with the usual arguments.

    python -m examples.deformable_attention
    python -m examples.deformable_attention --device cuda --batch 16 --queries 500

This makes a multi-scale deformable attention layer, whose ``ms_deform_attn`` takes (value, spatial_shapes,
level_start_index, sampling_locations, attention_weights) as in Deformable DETR. It runs the layer forward and backward,
with torch_fastdet's operator and with grid_sample, and prints the results' distance and times.

To use it in your own model, replace the model's function of that kind with ``ms_deform_attn``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import devices, positive, run, usable_device
from torch_fastdet import ops

Shapes = list[tuple[int, int]]
Attention = Callable[[Tensor, Shapes, Tensor, Tensor, Tensor], Tensor]


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Shapes | Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Turn (batch, pixels, heads, channels) into (batch, queries, heads * channels). Levels follow each other, so that
    ``level_start_index`` adds nothing. Shapes in a tensor work too, but reading them waits for a GPU and cannot be
    captured in a CUDA graph: give numbers if the model has them."""
    sides = spatial_shapes.tolist() if isinstance(spatial_shapes, Tensor) else spatial_shapes
    return ops.deformable_attention(value, sides, sampling_locations, attention_weights)


def ms_deform_attn_pytorch(
    value: Tensor,
    spatial_shapes: Shapes,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Do the same in PyTorch alone: sample each level as an image of its own, head by head."""
    total = value.new_zeros(value.shape[0], sampling_locations.shape[1], *value.shape[2:])
    levels = value.split([height * width for height, width in spatial_shapes], dim=1)
    for level, (pixels, shape) in enumerate(zip(levels, spatial_shapes)):
        for head in range(value.shape[2]):
            image = pixels[:, :, head].transpose(1, 2).unflatten(2, shape)
            points = sampling_locations[:, :, head, level] * 2 - 1  # grid_sample's corners are -1 and 1
            found = F.grid_sample(image, points, mode="bilinear", padding_mode="zeros", align_corners=False)
            total[:, :, head] += torch.einsum("bcqp,bqp->bqc", found, attention_weights[:, :, head, level])
    return total.flatten(2)


class DeformableAttention(nn.Module):
    """Let queries look at a few points near their reference points, in each level and head."""

    def __init__(
        self, attention: Attention, width: int = 256, levels: int = 3, heads: int = 8, points: int = 4
    ) -> None:
        super().__init__()
        self.attention, self.shape = attention, (heads, levels, points)
        count = heads * levels * points
        self.offsets, self.scores = nn.Linear(width, count * 2), nn.Linear(width, count)
        self.values, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, query: Tensor, reference: Tensor, pixels: Tensor, shapes: Shapes, level_start_index: Tensor
    ) -> Tensor:
        """Take query (batch, queries, width), reference (batch, queries, levels, 2) as shares of the image, and pixels
        (batch, pixels of all levels, width)."""
        heads, levels, points = self.shape
        value = self.values(pixels).unflatten(2, (heads, -1))
        offsets = self.offsets(query).unflatten(2, (heads, levels, points, 2))
        sides = offsets.new_tensor([[width, height] for height, width in shapes])
        locations = reference[:, :, None, :, None] + offsets / sides[:, None]
        weights = self.scores(query).unflatten(2, (heads, levels * points)).softmax(-1).unflatten(3, (levels, points))
        return self.out(self.attention(value, shapes, level_start_index, locations, weights))


def forward_and_backward(layer: nn.Module, inputs: list[Tensor], shapes: Shapes) -> list[Tensor]:
    """Return the result and the gradients of the inputs and of the layer's parameters."""
    query, reference, pixels = (tensor.detach().requires_grad_() for tensor in inputs)
    starts = torch.tensor([0, *(height * width for height, width in shapes[:-1])]).cumsum(0)
    out = layer(query, reference, pixels, shapes, starts)
    leaves = [query, reference, pixels, *layer.parameters()]
    return [out, *torch.autograd.grad(out.square().mean(), leaves)]


def milliseconds(call: Callable[[], object], device: torch.device, times: int = 5) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    call()
    start = now()
    for _ in range(times):
        call()
    return (now() - start) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=usable_device, default="cuda" if "cuda" in devices() else "cpu")
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--queries", type=positive, default=300)
    parser.add_argument(
        "--size", type=positive, default=320, help="pixels of the image's sides; levels have strides 8, 16 and 32"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(options.device)
    shapes = [(-(-options.size // stride),) * 2 for stride in (8, 16, 32)]
    layers = [DeformableAttention(function).to(device) for function in (ms_deform_attn, ms_deform_attn_pytorch)]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = [
        torch.randn(options.batch, options.queries, 256, device=device),
        torch.rand(options.batch, options.queries, 1, 2, device=device).expand(-1, -1, 3, -1).contiguous(),
        torch.randn(options.batch, sum(height * width for height, width in shapes), 256, device=device),
    ]
    names = ["out", "query", "reference", "pixels", *(name for name, _ in layers[0].named_parameters())]
    results = [forward_and_backward(layer, inputs, shapes) for layer in layers]
    for name, ours, theirs in zip(names, *results):
        away = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        what = "result" if name == "out" else f"gradient of {name}"
        print(f"{what}: differs by at most {away:.1e} of its largest value")
    for layer, name in zip(layers, ("torch_fastdet", "grid_sample")):
        taken = milliseconds(partial(forward_and_backward, layer, inputs, shapes), device)
        print(f"{name}: {taken:.1f} ms forward and backward, {options.batch} x {options.queries} queries on {device}")


if __name__ == "__main__":
    run(main)
