"""bn_act, forward and backward, against BatchNorm2d and SiLU: eager, and torch.compile of the two.

The shapes are YOLOv5s' at batch 64 and 16, 640x640. Those below 60 MB can stay in an H200's L2 between the passes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness, work
from torch_fastdet import ops

FORMATS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}
GPU_SHAPES = [(64, 32, 320, 320), (64, 64, 160, 160), (64, 256, 40, 40), (16, 64, 160, 160), (16, 256, 40, 40)]
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
            if name == "NCHW" and shape[0] == 64 and shape[1] == 32:
                continue  # stock takes a tenth of a second there
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
                # The backward of torch.compile runs on the stream of compilation.
                ungraphable=("torch.compile",),
            )
            del x, grad, norm


if __name__ == "__main__":
    harness.run("bn_act", measure)
