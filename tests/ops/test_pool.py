"""Compare max_pools_cat and max_pool with their definition and PyTorch's max pooling."""

import pytest
import torch
import torch.nn.functional as F

from tests.references import pool as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# The cases (shape, kernel, poolings) take vectors, single elements, small maps and several trips of a block's threads.
CASES = [
    ((2, 16, 6, 7), 5, 3),
    ((1, 3, 5, 4), 5, 3),
    ((2, 8, 3, 2), 15, 1),
    ((1, 24, 4, 9), 3, 2),
    ((2, 5, 1, 6), 5, 4),
    ((1, 8, 4, 4), 1, 2),
    ((1, 64, 2, 40), 5, 1),
    ((2, 8, 1, 1), 5, 3),
]
EMPTY = [(0, 8, 4, 4), (2, 0, 4, 4), (2, 8, 0, 4)]
FORMATS = [torch.contiguous_format, torch.channels_last]
backward = torch.ops.torch_fastdet.max_pools_cat_backward


def random(shape, device, dtype=torch.float32, memory_format=torch.contiguous_format):
    # Values come from the CPU's generator, with many ties.
    return torch.randn(shape).mul_(2).round_().div_(2).to(device=device, dtype=dtype, memory_format=memory_format)


def stock(x, kernel_size=5, pools=3):
    parts = [x]
    for _ in range(pools):
        parts.append(F.max_pool2d(parts[-1], kernel_size, 1, kernel_size // 2))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, kernel_size, pools", CASES)
def test_values_and_gradients(device, shape, kernel_size, pools, dtype, memory_format):
    x = random(shape, device, dtype, memory_format).requires_grad_()
    y = ops.max_pools_cat(x, kernel_size, pools)
    expected, sources = reference.max_pools_cat(x.detach(), kernel_size, pools)
    assert y.dtype == dtype and torch.equal(y.double(), expected)
    assert y.stride() == stock(x, kernel_size, pools).stride()
    # Halves of small numbers have exact sums in every type.
    grad = random(y.shape, device, dtype, memory_format)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    exact = reference.max_pools_cat_backward(grad, sources)
    torch.testing.assert_close(grad_x.double(), exact, rtol=torch.finfo(dtype).eps * pools, atol=0)


@pytest.mark.sanitizer
@pytest.mark.parametrize("memory_format", FORMATS)
def test_sanitizer_small(device, memory_format):
    for shape, kernel_size, pools in CASES:
        test_values_and_gradients(device, shape, kernel_size, pools, torch.float16, memory_format)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_nan_and_infinity_as_stock(device, memory_format):
    x = random((2, 8, 9, 9), device, torch.float32, memory_format)
    x[0, 1, 4, 4] = x[0, 1, 2, 3] = x[1, 2, 0, 0] = float("nan")
    x[0, 2, 3, 3], x[1, 4, 5, 5] = float("inf"), -float("inf")
    x.requires_grad_()
    ours, theirs = ops.max_pools_cat(x), stock(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    grad = random(ours.shape, device, torch.float32, memory_format)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_strides(device, dtype):
    wide = random((3, 40, 8, 12), device, dtype)
    nhwc = wide.contiguous(memory_format=torch.channels_last)
    for x in (
        wide[:, 8:16],
        nhwc[:, 8:16],
        nhwc[:, 3:11],
        nhwc[:, :, 1:6, 2:9],
        wide.transpose(2, 3),
        wide[:, :1].expand(3, 8, 8, 12),
        wide[:, ::2, :, ::3],
        wide.flatten()[1:1921].view(1, 8, 12, 20).contiguous(memory_format=torch.channels_last),
    ):
        expected = stock(x.double()).to(dtype)
        assert torch.equal(ops.max_pools_cat(x), expected)
    x = nhwc[:, :8].detach().requires_grad_()
    _, indices = torch.ops.torch_fastdet.max_pools_cat(x, 5, 3)
    big = random((3, 64, 8, 12), device, dtype, torch.channels_last)
    for grad in (big[:, 8:40], big[:, 3:35], big.contiguous()[:, :32], big[:1, :1, :1, :1].expand(3, 32, 8, 12)):
        plain = grad.contiguous(memory_format=torch.channels_last)
        assert torch.equal(backward(grad, indices, 5, 3), backward(plain, indices, 5, 3))


def test_empty(device):
    for shape in EMPTY:
        x = random(shape, device).requires_grad_()
        y = ops.max_pools_cat(x)
        assert y.shape == (shape[0], 4 * shape[1], *shape[2:])
        y.sum().backward()
        assert x.grad.shape == x.shape


def test_gradcheck(device):
    x = torch.randperm(96).view(1, 4, 4, 6).to(device, torch.float64)
    assert torch.autograd.gradcheck(ops.max_pools_cat, x.requires_grad_())


BAD = [
    (lambda x: ops.max_pools_cat(x[0]), RuntimeError, r"max_pools_cat: x has shape \[8, 4, 6\], but four dimensions"),
    (lambda x: ops.max_pools_cat(x.int()), RuntimeError, r"max_pools_cat: x has dtype int32, but float16"),
    (lambda x: ops.max_pools_cat(x.to_sparse()), RuntimeError, r"max_pools_cat: x has layout Sparse, but a dense"),
    (lambda x: ops.max_pools_cat(x, 4), ValueError, r"kernel_size is 4, but an odd number of 1 to 15 is expected"),
    (lambda x: ops.max_pools_cat(x, 17), ValueError, r"kernel_size is 17, but an odd number of 1 to 15 is expected"),
    (lambda x: ops.max_pools_cat(x, 5, 0), ValueError, r"max_pools_cat: pools is 0, but 1 or more is expected"),
    (lambda x: backward(x, x, 5, 3), RuntimeError, r"indices has dtype float32, but uint8 is expected"),
    (lambda x: backward(x, x.byte(), 5, 3), RuntimeError, r"indices has shape \[2, 8, 4, 6\] beside grad_y of shape"),
]


@pytest.mark.parametrize("call, kind, message", BAD)
def test_errors_are_sentences(device, call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(random((2, 8, 4, 6), device))
    assert len(str(caught.value).splitlines()) == 1


def test_repeatable(cuda):
    x = random((4, 64, 20, 20), cuda, torch.float16, torch.channels_last).requires_grad_()
    grad = torch.randn(4, 256, 20, 20, device=cuda).half().contiguous(memory_format=torch.channels_last)

    def step():
        y = ops.max_pools_cat(x)
        return [y, *torch.autograd.grad(y, x, grad)]

    first = step()
    for _ in range(5):
        assert all(map(torch.equal, first, step()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_poolings_behind_what_is_there(device, memory_format, dtype):
    for channels, kernel_size, pools in ((8, 5, 3), (3, 3, 2), (16, 13, 1)):
        x = random((2, channels, 9, 7), device, dtype, memory_format)
        y = torch.full((2, channels * (pools + 1), 9, 7), 7.0, device=device, dtype=dtype).contiguous(
            memory_format=memory_format
        )
        y[:, :channels] = x
        torch.ops.torch_fastdet.max_pools_(y, kernel_size, pools)
        assert torch.equal(y, ops.max_pools_cat(x, kernel_size, pools))
    torch.library.opcheck(torch.ops.torch_fastdet.max_pools_.default, (y, kernel_size, pools))
    torch.ops.torch_fastdet.max_pools_(y[:0], kernel_size, pools)
    with pytest.raises(RuntimeError, match="max_pools_: y has 31 channels, but a multiple of 2 is expected"):
        torch.ops.torch_fastdet.max_pools_(y[:, :31], 5, 1)
    with pytest.raises(ValueError, match="max_pools_: kernel_size is 4, but an odd number"):
        torch.ops.torch_fastdet.max_pools_(y, 4, 1)


@pytest.mark.sanitizer
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_windows(device, memory_format, dtype):
    for shape, kernel_size in (((2, 16, 9, 7), 2), ((1, 3, 5, 4), 3), ((2, 8, 15, 17), 15), ((1, 64, 3, 40), 1)):
        x = random(shape, device, dtype, memory_format).requires_grad_()
        y, _ = torch.ops.torch_fastdet.max_pool(x, kernel_size)
        exact = x.detach().double().requires_grad_()
        wanted = F.max_pool2d(exact, kernel_size, 1)
        assert torch.equal(y.double(), wanted) and y.is_contiguous(memory_format=memory_format)
        grad = random(y.shape, device, dtype, memory_format)
        (grad_x,), (wanted,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(wanted, exact, grad.double())
        torch.testing.assert_close(grad_x.double(), wanted, rtol=torch.finfo(dtype).eps, atol=0)


def test_whole_windows_of_nan_and_infinity(device):
    x = random((2, 8, 9, 9), device, torch.float32, torch.channels_last)
    x[0, 1, 4, 4] = x[0, 1, 4, 5] = x[1, 2, 0, 0] = float("nan")
    x[0, 2, 3, 3], x[1, 4, 5, 5] = float("inf"), -float("inf")
    x.requires_grad_()
    found, wanted = torch.ops.torch_fastdet.max_pool(x, 2)[0], F.max_pool2d(x, 2, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    grad = random(found.shape, device, torch.float32, torch.channels_last)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (found, wanted)))


def test_errors_of_whole_windows(device):
    x, max_pool = random((2, 8, 4, 6), device), torch.ops.torch_fastdet.max_pool
    with pytest.raises(ValueError, match="max_pool: kernel_size is 16, but a number of 1 to 15 is expected"):
        max_pool(x, 16)
    with pytest.raises(RuntimeError, match=r"max_pool: x has shape \[2, 8, 4, 6\], but at least 5 rows and columns"):
        max_pool(x, 5)
    _, indices = max_pool(x, 2)
    with pytest.raises(RuntimeError, match="max_pool_backward: indices has shape"):
        torch.ops.torch_fastdet.max_pool_backward(x, indices, 2)
    with pytest.raises(RuntimeError, match="max_pool: a second derivative was asked for"):
        y = max_pool(x.requires_grad_(), 2)[0]
        (grad,) = torch.autograd.grad(y, x, y.detach().requires_grad_(), create_graph=True)
        grad.sum().backward()
    assert max_pool(x[:0], 2)[0].shape == (0, 8, 3, 5)
