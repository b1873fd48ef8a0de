"""Measure what bn_act_optim puts into a model against PyTorch's layers, forward and backward.

Against bn_act stand BatchNorm2d and SiLU, eager and under torch.compile. A GPU also runs two of them side by side, the
stem under autocast with its weights' gradient, SPPF's poolings, and bias_act. The shapes are YOLOv5s' at batch 64 and
16, 640x640. Those below 60 MB can stay in an H200's L2 between the passes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness, work
from torch_fastdet import ops
from torch_fastdet.nn import stem

FORMATS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}
GPU_SHAPES = [
    (64, 32, 320, 320),
    (64, 64, 160, 160),
    (64, 128, 80, 80),
    (64, 256, 40, 40),
    (16, 64, 160, 160),
    (16, 128, 80, 80),
    (16, 256, 40, 40),
]
# In NCHW stock takes a tenth of a second for the first of these.
NHWC_ALONE = [(64, 32, 320, 320), (64, 128, 80, 80), (16, 128, 80, 80)]
CPU_SHAPES = [(4, 64, 40, 40)]


def stock(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    return F.silu(norm(x))


def ours(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    return ops.bn_act(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, 0.03, norm.eps
    )


def forward_and_backward(function, norm, x, grad):
    inputs = [x, norm.weight, norm.bias]
    return lambda: torch.autograd.grad(function(norm, x), inputs, grad)


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    for shape in GPU_SHAPES if cuda else CPU_SHAPES:
        for name, memory_format in FORMATS.items():
            if name == "NCHW" and shape in NHWC_ALONE:
                continue
            torch._dynamo.reset()
            norm = nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.03).to(report.device)
            x = torch.randn(shape, device=report.device, dtype=dtype).contiguous(memory_format=memory_format)
            grad = torch.randn_like(x)
            x.requires_grad_()
            functions = {"torch_fastdet": ours, "eager": stock}
            if cuda:
                functions["torch.compile"] = torch.compile(stock)
            case = f"{name} {'fp16' if cuda else 'fp32'} {shape}".replace(" ", "")
            report.compare(
                f"forward+backward {case}",
                {key: forward_and_backward(function, norm, x, grad) for key, function in functions.items()},
                bytes=work.batch_norm_silu(x.numel(), x.element_size()).bytes,
                repetitions=30,
                inner=5 if cuda else 1,
                # torch.compile's backward runs on the stream of compilation.
                ungraphable=("torch.compile",),
            )
            del x, grad, norm
    if cuda:
        measure_concatenation(report)
        measure_stem(report)
        measure_pools(report)
        measure_evaluation(report)


def arguments_of(norms: list[nn.BatchNorm2d], inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return inputs, *([getattr(norm, name) for norm in norms] for name in names), 0.03, norms[0].eps


def measure_concatenation(report: harness.Report) -> None:
    """Measure the norms and activations of C3, two side by side."""
    for shape in ((64, 32, 160, 160), (16, 128, 40, 40)):
        norms = [nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.03).to(report.device) for _ in range(2)]
        inputs = []
        for _ in norms:
            x = torch.randn(shape, device=report.device, dtype=torch.float16)
            inputs.append(x.contiguous(memory_format=torch.channels_last).requires_grad_())
        leaves = [*inputs, *(parameter for norm in norms for parameter in norm.parameters())]
        functions = {
            "torch_fastdet": lambda n=norms, x=inputs: ops.bn_act_cat(*arguments_of(n, x)),
            "torch_fastdet bn_act, torch.cat": lambda n=norms, x=inputs: torch.cat(list(map(ours, n, x)), 1),
            "eager": lambda n=norms, x=inputs: torch.cat(list(map(stock, n, x)), 1),
        }
        grad = torch.randn_like(functions["eager"]())
        moved = 2 * work.batch_norm_silu(inputs[0].numel(), inputs[0].element_size()).bytes
        report.compare(
            f"concatenation of two {shape}".replace(", ", ","),
            {name: partial(cat_step, function, leaves, grad) for name, function in functions.items()},
            bytes=moved,
            repetitions=30,
            inner=5,
        )


def cat_step(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor) -> Any:
    return torch.autograd.grad(function(), leaves, grad)


def biased_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(x + bias[:, None, None])


def measure_evaluation(report: harness.Report) -> None:
    """Measure what follows a convolution with a fused norm: its bias and the activation."""
    for shape in ((16, 64, 160, 160), (16, 256, 20, 20), (1, 256, 20, 20)):
        x = torch.randn(shape, device=report.device, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        bias, out = torch.randn(shape[1], device=report.device, dtype=torch.float16), torch.empty_like(x)
        report.compare(
            f"evaluation {shape}".replace(", ", ","),
            {
                "torch_fastdet": partial(ops.bias_act, x, bias, out=out),
                "eager": partial(biased_silu, x, bias),
            },
            bytes=2 * x.numel() * x.element_size(),
            repetitions=30,
            inner=5,
        )


def measure_stem(report: harness.Report) -> None:
    for batch, kernel, outputs in ((64, 6, 32), (16, 6, 32), (64, 3, 32), (16, 3, 16)):
        conv = nn.Conv2d(3, outputs, kernel, 2, 2 if kernel == 6 else 1, bias=False)
        conv.to(report.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.rand(batch, 3, 640, 640, device=report.device).contiguous(memory_format=torch.channels_last)
        grad = torch.randn(batch, outputs, 320, 320, device=report.device, dtype=torch.float16)
        grad = grad.contiguous(memory_format=torch.channels_last)
        report.compare(
            f"stem {kernel}x{kernel}, {outputs} outputs, batch {batch}",
            {
                "torch_fastdet": partial(stem_step, stem.convolve, conv, x, grad),
                "eager": partial(stem_step, nn.Conv2d.__call__, conv, x, grad),
            },
            bytes=work.stem(batch, kernel, outputs).bytes,
            repetitions=30,
            inner=5,
        )


def stem_step(convolve: Callable[..., torch.Tensor], conv: nn.Conv2d, x: torch.Tensor, grad: torch.Tensor) -> Any:
    with torch.autocast("cuda", cache_enabled=False):
        y = convolve(conv, x)
    return torch.autograd.grad(y, conv.weight, grad)


def pools_step(function: Callable[..., torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.autograd.grad(function(x), x, grad)


def stock_pools(x: torch.Tensor) -> torch.Tensor:
    parts = [x]
    for _ in range(3):
        parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
    return torch.cat(parts, 1)


def measure_pools(report: harness.Report) -> None:
    for shape in ((64, 256, 20, 20), (16, 256, 20, 20)):
        x = torch.randn(shape, device=report.device, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        grad = torch.randn_like(stock_pools(x.detach()))
        functions: dict[str, Callable[..., torch.Tensor]] = {"torch_fastdet": ops.max_pools_cat, "eager": stock_pools}
        torch._dynamo.reset()
        functions["torch.compile"] = torch.compile(stock_pools)
        report.compare(
            f"SPPF poolings {shape}".replace(", ", ","),
            {name: partial(pools_step, function, x, grad) for name, function in functions.items()},
            bytes=work.max_pools_cat(x.numel(), 3, x.element_size()).bytes,
            repetitions=30,
            inner=5,
            ungraphable=("torch.compile",),
        )


if __name__ == "__main__":
    harness.run("bn_act", measure)
