"""upsample_nearest2x and upsample_nearest2x_cat, forward and backward, against the best a user could pick.

Baselines: stock in the same memory format, and torch.compile of stock, which fuses upsample and concat.
Bytes are the floor: each input read once, each output written once.
"""

import torch
import torch.nn.functional as F

from benchmarks import harness
from torch_fastdet import ops

FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def stock(x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


def stock_cat(x, skip):
    return torch.cat([stock(x), skip], 1)


def forward_and_backward(function, *inputs):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    # On the GPU the size and a P5 neck's of batch 16 (W = 20); smaller on the CPU, where fp32 is what trains.
    shapes = [(64, 256, 40, 40), (16, 512, 20, 20)] if cuda else [(4, 128, 40, 40), (16, 128, 20, 20)]
    repetitions, inner = (50, 10) if cuda else (30, 1)
    for shape in shapes:
        for name, memory_format in FORMATS.items():
            torch._dynamo.reset()
            n, c, h, w = shape
            case = f"{name} {'fp16' if cuda else 'fp32'} {shape}".replace(" ", "")
            x = torch.randn(shape, device=report.device, dtype=dtype).contiguous(memory_format=memory_format)
            skip = torch.randn((n, c, 2 * h, 2 * w), device=report.device, dtype=dtype)
            skip = skip.contiguous(memory_format=memory_format)
            unit = x.numel() * x.element_size()
            single = {"torch_fastdet": ops.upsample_nearest2x, "eager": stock}
            pair = {"torch_fastdet": ops.upsample_nearest2x_cat, "eager": stock_cat}
            if cuda:
                single["torch.compile"] = torch.compile(stock)
                pair["torch.compile"] = torch.compile(stock_cat)
            options = {"repetitions": repetitions, "inner": inner}

            def bind(call, functions, *inputs):
                return {key: call(function, *inputs) for key, function in functions.items()}

            def forward(function, *inputs):
                return lambda: function(*inputs)

            report.compare(f"forward {case}", bind(forward, single, x), bytes=5 * unit, **options)
            # The operators that autograd calls; stock's wants the sizes.
            backward = {
                "torch_fastdet": torch.ops.torch_fastdet.upsample_nearest2x_backward,
                "eager": lambda grad, size=shape: torch.ops.aten.upsample_nearest2d_backward(
                    grad, [2 * size[2], 2 * size[3]], list(size)
                ),
            }
            report.compare(f"backward {case}", bind(forward, backward, skip), bytes=5 * unit, **options)
            report.compare(f"cat forward {case}", bind(forward, pair, x, skip), bytes=13 * unit, **options)
            report.compare(
                f"cat forward+backward {case}",
                bind(forward_and_backward, pair, x, skip),
                bytes=18 * unit,
                ungraphable=("torch.compile",),  # its backward runs on the stream of compilation
                **options,
            )
            del x, skip, single, pair


if __name__ == "__main__":
    harness.run("upsample", measure)
