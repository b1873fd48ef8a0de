"""Compare upsample_nearest2x and upsample_nearest2x_cat with their definition, PyTorch, and each other."""

import pytest
import torch
import torch.nn.functional as F

from tests.launches import launched
from tests.references import upsample as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Vectors have 8, 4, 2 and 1 elements along W and C, with and without a remainder; some rows or columns are single.
SHAPES = [
    (2, 16, 6, 8),
    (1, 8, 3, 20),
    (2, 24, 5, 10),
    (3, 4, 4, 7),
    (2, 3, 5, 1),
    (1, 1, 7, 5),
    (2, 255, 1, 3),
    (1, 6, 1, 1),
    (65, 32, 4, 4),
]
EMPTY = [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)]
FORMATS = [torch.contiguous_format, torch.channels_last]


def random(shape, device, dtype=torch.float32, memory_format=torch.contiguous_format):
    # The CPU's generator gives the same numbers on every device.
    return torch.randn(shape).to(device=device, dtype=dtype, memory_format=memory_format)


def skip_shape(shape, channels):
    return (shape[0], channels, 2 * shape[2], 2 * shape[3])


def stock(x):
    return F.interpolate(x, scale_factor=2, mode="nearest")


def stock_stride(tensor, memory_format):
    # An empty tensor never suggests channels_last.
    return torch.empty(
        tensor.shape, memory_format=memory_format if tensor.numel() else torch.contiguous_format
    ).stride()


def views(device, dtype=torch.float32):
    """Map names to four-dimensional views whose strides are neither contiguous nor channels_last."""
    nhwc = random((3, 24, 6, 10), device, dtype, torch.channels_last)
    nchw = random((3, 24, 6, 10), device, dtype)
    return {
        "channel slice": nchw[:, 8:16],
        "odd channel slice": nchw[:, 3:10],
        "channel slice, channels_last": nhwc[:, 8:16],
        "odd channel slice, channels_last": nhwc[:, 3:10],
        "crop": nchw[:, :, 1:5, 2:8],
        "odd crop": nchw[:, :, 1:4, 3:8],
        "crop, channels_last": nhwc[:, :, 1:5, 3:8],
        "every other row": nchw[:, :, ::2],
        "every other column": nchw[:, :, :, ::2],
        "every other channel, channels_last": nhwc[:, ::2],
        "every other image": nchw[::2],
        "transposed": nchw.transpose(2, 3),
        "permuted": nchw.permute(3, 2, 0, 1),
        "expanded images": nchw[:1].expand(4, 24, 6, 10),
        "expanded columns": nchw[..., :1].expand(3, 24, 6, 5),
        "scalar expanded": nchw[0, 0, 0, 0].expand(2, 8, 4, 6),
        "misaligned": random((1 + 2 * 8 * 4 * 8,), device, dtype)[1:].view(2, 8, 4, 8),
    }


VIEWS = list(views("cpu"))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_forward(device, shape, dtype, memory_format):
    x = random(shape, device, dtype, memory_format)
    out = ops.upsample_nearest2x(x)
    assert out.dtype == dtype and out.device.type == device.type
    assert torch.equal(out.double(), reference.upsample_nearest2x(x))
    assert out.stride() == stock_stride(out, memory_format)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_backward(device, shape, dtype, memory_format):
    x = random(shape, device, dtype, memory_format).requires_grad_()
    grad = random((*shape[:2], 2 * shape[2], 2 * shape[3]), device, dtype, memory_format)
    (grad_x,) = torch.autograd.grad(ops.upsample_nearest2x(x), x, grad)
    assert grad_x.stride() == stock_stride(grad_x, memory_format)
    # Float32 sums of four, rounded once, are within one unit in the last place of the exact sum.
    exact = reference.upsample_nearest2x_backward(grad)
    rounding = torch.finfo(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype).eps
    size = reference.upsample_nearest2x_backward(grad.abs())
    tolerance = exact.abs() * torch.finfo(dtype).eps + size * 2 * rounding
    assert ((grad_x.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("formats", [(a, b) for a in FORMATS for b in FORMATS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, channels", [*[(shape, 5) for shape in SHAPES], ((2, 16, 6, 8), 32), ((1, 3, 4, 4), 0)])
def test_cat(device, shape, channels, dtype, formats):
    x = random(shape, device, dtype, formats[0]).requires_grad_()
    skip = random(skip_shape(shape, channels), device, dtype, formats[1]).requires_grad_()
    out = ops.upsample_nearest2x_cat(x, skip)
    assert torch.equal(out.double(), reference.upsample_nearest2x_cat(x, skip))
    expected = torch.cat([stock(x), skip], 1)
    assert out.stride() == expected.stride()
    grad = random(out.shape, device, dtype)
    grad = grad.contiguous(memory_format=torch.channels_last) if not out.is_contiguous() else grad
    grad_x, grad_skip = torch.autograd.grad(out, [x, skip], grad)
    assert torch.equal(grad_x, torch.ops.torch_fastdet.upsample_nearest2x_backward(grad[:, : shape[1]].contiguous()))
    assert torch.equal(grad_skip, grad[:, shape[1] :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", VIEWS)
def test_any_strides(device, name, dtype):
    x = views(device, dtype)[name]
    out = ops.upsample_nearest2x(x)
    assert torch.equal(out.double(), reference.upsample_nearest2x(x))
    assert out.stride() == stock(x).stride()
    skip = random(skip_shape(x.shape, 4), device, dtype)
    assert torch.equal(ops.upsample_nearest2x_cat(x, skip).double(), reference.upsample_nearest2x_cat(x, skip))
    if x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0:  # the same view as skip, and as gradient
        small = random((x.shape[0], 3, x.shape[2] // 2, x.shape[3] // 2), device, dtype)
        assert torch.equal(ops.upsample_nearest2x_cat(small, x).double(), reference.upsample_nearest2x_cat(small, x))
        grad = torch.ops.torch_fastdet.upsample_nearest2x_backward(x)
        assert torch.equal(grad, torch.ops.torch_fastdet.upsample_nearest2x_backward(x.contiguous()))
        exact = reference.upsample_nearest2x_backward(x)
        torch.testing.assert_close(grad.double(), exact, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)


@pytest.mark.alone
def test_launches_and_allocations(cuda):
    """Each direction is one launch and one allocation, in both formats, also for slices read in place."""

    def count(call):
        call()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launches = len(launched(call))
        return launches, torch.cuda.memory_stats()["allocation.all.allocated"] - before

    backward = torch.ops.torch_fastdet.upsample_nearest2x_backward
    for memory_format in FORMATS:
        wide = random((2, 64, 8, 8), cuda, torch.float16, memory_format)
        x, skip = wide[:, :32], random((2, 32, 16, 16), cuda, torch.float16, memory_format)
        assert count(lambda x=x: ops.upsample_nearest2x(x)) == (1, 1)
        assert count(lambda x=x, skip=skip: ops.upsample_nearest2x_cat(x, skip)) == (1, 1)
        assert count(lambda wide=wide: backward(wide[:, 16:48])) == (1, 1)
        assert count(lambda wide=wide: backward(wide[:, :, 2:6, 2:6])) == (1, 1)
        x, skip = x.detach().requires_grad_(), skip.requires_grad_()
        out = ops.upsample_nearest2x_cat(x, skip)
        grad = torch.randn_like(out)
        gradients = lambda out=out, x=x, skip=skip, grad=grad: torch.autograd.grad(  # noqa: E731
            out, [x, skip], grad, retain_graph=True
        )
        assert count(gradients) == (1, 1)


def test_cat_gradient_of_one_input(device):
    x, skip = random((2, 8, 3, 4), device), random((2, 5, 6, 8), device)
    grad = random((2, 13, 6, 8), device)
    (grad_x,) = torch.autograd.grad(ops.upsample_nearest2x_cat(x.requires_grad_(), skip), x, grad)
    exact = reference.upsample_nearest2x_backward(grad[:, :8])
    torch.testing.assert_close(grad_x.double(), exact, rtol=1e-5, atol=1e-5)
    (grad_skip,) = torch.autograd.grad(ops.upsample_nearest2x_cat(x.detach(), skip.requires_grad_()), skip, grad)
    assert torch.equal(grad_skip, grad[:, 8:])


@pytest.mark.parametrize("pair", [(a, b) for a in DTYPES for b in DTYPES if a != b])
def test_cat_promotes(device, pair):
    x = random((2, 8, 3, 4), device, pair[0]).requires_grad_()
    skip = random((2, 5, 6, 8), device, pair[1]).requires_grad_()
    out, expected = ops.upsample_nearest2x_cat(x, skip), torch.cat([stock(x), skip], 1)
    assert out.dtype == expected.dtype and torch.equal(out, expected)
    grad = random(out.shape, device, out.dtype)
    for ours, theirs in zip(torch.autograd.grad(out, [x, skip], grad), torch.autograd.grad(expected, [x, skip], grad)):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    with torch.inference_mode():
        assert torch.equal(ops.upsample_nearest2x_cat(x, skip), expected)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradcheck(device, memory_format):
    x = random((2, 3, 3, 2), device, torch.float64, memory_format).requires_grad_()
    skip = random((2, 2, 6, 4), device, torch.float64, memory_format).requires_grad_()
    assert torch.autograd.gradcheck(ops.upsample_nearest2x, x)
    assert torch.autograd.gradgradcheck(ops.upsample_nearest2x, x)
    assert torch.autograd.gradcheck(ops.upsample_nearest2x_cat, (x, skip))
    assert torch.autograd.gradgradcheck(ops.upsample_nearest2x_cat, (x, skip))


def test_half_sums_do_not_overflow_early(device):
    """60000 + 60000 - 60000 - 59008 fits float16, but its partial sums do not."""
    grad = torch.tensor([[60000.0, 60000.0], [-60000.0, -59008.0]], dtype=torch.float16, device=device).view(1, 1, 2, 2)
    assert torch.ops.torch_fastdet.upsample_nearest2x_backward(grad).item() == 992


def test_nan_and_infinity_stay_in_their_square(device):
    x = random((1, 4, 3, 3), device)
    x[0, 1, 1, 1], x[0, 2, 0, 2] = float("nan"), float("inf")
    torch.testing.assert_close(ops.upsample_nearest2x(x).double(), reference.upsample_nearest2x(x), equal_nan=True)
    grad = stock(x)
    result = torch.ops.torch_fastdet.upsample_nearest2x_backward(grad)
    assert result.isnan().sum() == 1 and result.isinf().sum() == 1


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


BAD = [
    (lambda x, s: ops.upsample_nearest2x(x[0]), r"upsample_nearest2x: x has shape \[8, 3, 4\], but four dimensions"),
    (lambda x, s: ops.upsample_nearest2x(x.int()), r"upsample_nearest2x: x has dtype int32, but float16, bfloat16"),
    (lambda x, s: ops.upsample_nearest2x(x.to_sparse()), r"x has layout Sparse, but a dense"),
    (lambda x, s: ops.upsample_nearest2x(torch.nested.nested_tensor([x[0]])), r"x is a nested tensor, but a dense"),
    (lambda x, s: ops.upsample_nearest2x(quantized(x)), r"x is a quantized tensor of qint8, but float16, bfloat16"),
    (lambda x, s: ops.upsample_nearest2x_cat(x, s[0]), r"skip has shape \[5, 6, 8\], but four dimensions"),
    (lambda x, s: ops.upsample_nearest2x_cat(x, s.long()), r"skip has dtype int64"),
    (
        lambda x, s: ops.upsample_nearest2x_cat(x, s[:, :, :5]),
        r"skip has shape \[2, 5, 5, 8\], but \(2, any, 6, 8\) is expected beside x of shape \[2, 8, 3, 4\]",
    ),
    (lambda x, s: ops.upsample_nearest2x_cat(x, s[:1]), r"skip has shape \[1, 5, 6, 8\], but \(2, any, 6, 8\)"),
    (
        lambda x, s: torch.ops.torch_fastdet.upsample_nearest2x_backward(s[..., :7]),
        r"grad_output has shape \[2, 5, 6, 7\], but an even height and width are expected",
    ),
]


@pytest.mark.parametrize("call, message", BAD)
def test_errors_are_sentences(device, call, message):
    x, skip = random((2, 8, 3, 4), device), random((2, 5, 6, 8), device)
    with pytest.raises(RuntimeError, match=message) as caught:
        call(x, skip)
    assert len(str(caught.value).splitlines()) == 1


def test_inference_tensors_beside_a_gradient(device):
    """Inference tensors are accepted because nothing is saved for backward."""
    with torch.inference_mode():
        x = random((2, 8, 3, 4), device)
    skip = random((2, 5, 6, 8), device).requires_grad_()
    ops.upsample_nearest2x_cat(x, skip).sum().backward()
    assert torch.equal(skip.grad, torch.ones_like(skip))
    x, skip = x.clone().requires_grad_(), skip.detach()
    with torch.inference_mode():
        skip = skip.clone()
        assert not ops.upsample_nearest2x(x).requires_grad
    ops.upsample_nearest2x_cat(x, skip).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4))


def test_mixed_devices(cuda):
    x, skip = random((2, 8, 3, 4), cuda), random((2, 5, 6, 8), "cpu")
    with pytest.raises(RuntimeError, match="skip is on cpu, but x is on cuda:0; both must be on one device"):
        ops.upsample_nearest2x_cat(x, skip)


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    """Every kernel runs once on small shapes: vectors with tails, odd sides, both layouts, all item sizes."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        for shape in ((2, 8, 4, 8), (1, 3, 5, 7), (2, 17, 3, 1)):
            for memory_format in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(shape, device=cuda, dtype=dtype).to(memory_format=memory_format).requires_grad_()
                n, _, h, w = shape
                skip = torch.randn(n, 5, 2 * h, 2 * w, device=cuda, dtype=dtype).to(memory_format=memory_format)
                out = ops.upsample_nearest2x_cat(x, skip).sum() + ops.upsample_nearest2x(x).sum()
                out.backward()
                torch.testing.assert_close(x.grad, torch.full_like(x, 8))
