"""Time YOLOv5s' convolutions in NCHW and NHWC by shape and precision; print a Markdown table.

    python -m benchmarks.layout_table [--batch 16]

The milliseconds are of the forward pass, the input's gradient and the weight's, in a CUDA graph. cuDNN chooses its
algorithms by heuristics, as in train.py, which leaves cudnn.benchmark off. The switch ``channels_last`` follows the
sums of this table (``torch_fastdet/switches/channels_last/layout.py``). A GPU and the package yolov5 are needed.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.bench_step import make_model

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
PRECISIONS = {
    "fp32": (torch.float32, False),
    "TF32": (torch.float32, True),
    "fp16": (torch.float16, True),
    "bf16": (torch.bfloat16, True),
}
RUNS = 7


def shapes(size: str, batch: int) -> Counter[tuple[Any, ...]]:
    """Return (input shape, outputs, kernel, stride, padding) of each convolution, and how many of the model have it."""
    found: Counter[tuple[Any, ...]] = Counter()

    def note(conv: torch.nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        shape = (batch, *inputs[0].shape[1:])
        found[shape, conv.out_channels, conv.kernel_size[0], conv.stride[0], conv.padding[0]] += 1

    model = make_model(size, False)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(2, 3, 640, 640, device="cuda"))
    return found


def passes(key: tuple[Any, ...], dtype: torch.dtype, layout: torch.memory_format) -> Callable[[], None]:
    """Run such a convolution forward and backward, without autograd."""
    shape, outputs, kernel, stride, padding = key
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    weight = torch.randn(outputs, shape[1], kernel, kernel, device="cuda").to(dtype).contiguous(memory_format=layout)
    grad = torch.randn_like(F.conv2d(x, weight, None, stride, padding))
    mask = [shape[1] > 3, True, False]  # images have no gradient

    def run() -> None:
        F.conv2d(x, weight, None, stride, padding)
        torch.ops.aten.convolution_backward(
            grad, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask
        )

    return run


def milliseconds(run: Callable[[], None]) -> float:
    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def row(key: tuple[Any, ...], count: int) -> tuple[str, dict[tuple[str, str], float]]:
    shape, outputs, kernel, stride, _ = key
    times = {}
    for precision, (dtype, tf32) in PRECISIONS.items():
        torch.backends.cudnn.allow_tf32 = tf32
        for name, layout in LAYOUTS.items():
            times[precision, name] = milliseconds(passes(key, dtype, layout))
    cells = [f"{times[precision, 'NCHW']:.3f} / {times[precision, 'NHWC']:.3f}" for precision in PRECISIONS]
    case = f"{shape} to {outputs}, {kernel}x{kernel}{f' stride {stride}' if stride > 1 else ''}"
    return f"| {case} | {count} | {' | '.join(cells)} |", times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    batch = parser.parse_args().batch
    allowed = torch.backends.cudnn.allow_tf32
    totals: Counter[tuple[str, str]] = Counter()
    found = shapes("s", batch)
    print(f"| convolution, NCHW / NHWC in ms | times | {' | '.join(PRECISIONS)} |\n|---|---|{'---|' * len(PRECISIONS)}")
    try:
        for key, count in sorted(found.items(), key=lambda item: (-item[0][0][2], item[0][0][1:])):
            line, times = row(key, count)
            print(line, flush=True)
            totals.update({place: count * value for place, value in times.items()})
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    cells = [f"**{totals[p, 'NCHW']:.2f} / {totals[p, 'NHWC']:.2f}**" for p in PRECISIONS]
    print(f"| **all** | {sum(found.values())} | {' | '.join(cells)} |")
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")


if __name__ == "__main__":
    main()
