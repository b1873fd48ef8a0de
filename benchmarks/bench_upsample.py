"""Compare upsample_nearest2x and upsample_nearest2x_cat, forward and backward, with the best a user could pick.

Baselines are stock in the same memory format, the fastest eager operations that do the same (a copy of an expanded
view, a pooling sum for the gradient), and on the GPU torch.compile of stock, which fuses both, in both modes.
"""

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import harness, work
from torch_fastdet import ops

OVERHEAD = "torch.compile, reduce-overhead"
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def stock(x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


def stock_cat(x, skip):
    return torch.cat([stock(x), skip], 1)


def expanded(x):
    """Upsample by copying an expanded view, in x's memory format."""
    n, c, h, w = x.shape
    if x.is_contiguous():
        return x[:, :, :, None, :, None].expand(n, c, h, 2, w, 2).reshape(n, c, 2 * h, 2 * w)
    rows = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    return rows.expand(n, h, 2, w, 2, c).reshape(n, 2 * h, 2 * w, c).permute(0, 3, 1, 2)


def summed(grad):
    """Return the gradient of stock() as a pooling sum."""
    return F.avg_pool2d(grad, 2, divisor_override=1)


def forward_and_backward(function, *inputs):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def measure(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    # These are the size and a P5 neck's at batch 16 (W = 20); a CPU, which trains in fp32, gets smaller ones.
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
            sizes = (x.numel(), x.element_size())
            single = {"torch_fastdet": ops.upsample_nearest2x, "eager": stock, "eager, expanded copy": expanded}
            pair = {"torch_fastdet": ops.upsample_nearest2x_cat, "eager": stock_cat}
            if cuda:
                single |= {
                    "torch.compile": torch.compile(stock),
                    OVERHEAD: torch.compile(stock, mode="reduce-overhead"),
                }
                pair |= {
                    "torch.compile": torch.compile(stock_cat),
                    OVERHEAD: torch.compile(stock_cat, mode="reduce-overhead"),
                }
            options: dict[str, Any] = {"repetitions": repetitions, "inner": inner, "ungraphable": (OVERHEAD,)}

            def bind(call, functions, *inputs):
                return {key: call(function, *inputs) for key, function in functions.items()}

            def forward(function, *inputs):
                return lambda: function(*inputs)

            report.compare(f"forward {case}", bind(forward, single, x), bytes=work.upsample2x(*sizes).bytes, **options)
            # Call the operators that autograd calls; PyTorch's needs the sizes.
            backward = {
                "torch_fastdet": torch.ops.torch_fastdet.upsample_nearest2x_backward,
                "eager": lambda grad, size=shape: torch.ops.aten.upsample_nearest2d_backward(
                    grad, [2 * size[2], 2 * size[3]], list(size)
                ),
                "eager, pooling sum": summed,
            }
            report.compare(
                f"backward {case}",
                bind(forward, backward, skip),
                bytes=work.upsample2x_backward(*sizes).bytes,
                **options,
            )
            both = (x.numel(), skip.numel(), x.element_size())
            report.compare(
                f"cat forward {case}",
                bind(forward, pair, x, skip),
                bytes=work.upsample2x_cat(*both).bytes,
                **options,
            )
            report.compare(
                f"cat forward+backward {case}",
                bind(forward_and_backward, pair, x, skip),
                bytes=work.upsample2x_cat_step(*both).bytes,
                # torch.compile's backward runs on the stream of compilation.
                **options | {"ungraphable": ("torch.compile", OVERHEAD)},
            )
            del x, skip, single, pair


if __name__ == "__main__":
    harness.run("upsample", measure)
