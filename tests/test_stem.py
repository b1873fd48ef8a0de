"""The stem as a convolution of squares equals the convolution that it replaces."""

import copy

import pytest
import torch
from torch import nn

from torch_fastdet.nn import stem
from torch_fastdet.ops import stem_conv2d

KERNELS = [(6, 2), (3, 1)]


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    monkeypatch.setattr(stem, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(stem, "DTYPES", (torch.float16, torch.bfloat16, torch.float64))


def make(kernel, padding, device="cpu", dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {"bias": False, **options}
    return nn.Conv2d(3, 16, kernel, 2, padding, **options).to(device, dtype, memory_format=torch.channels_last)


def images(device="cpu", dtype=torch.float64, shape=(2, 3, 16, 12)):
    torch.manual_seed(1)
    return torch.rand(shape, dtype=torch.float64).to(device, dtype, memory_format=torch.channels_last)


def run(call, conv, x, grad):
    x = x.detach().requires_grad_()
    y = call(conv, x)
    return [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], grad.to(y.dtype))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel, padding", KERNELS)
def test_values_and_gradients(device, kernel, padding, bias):
    """In float64 the sums are the same but for their order."""
    conv = make(kernel, padding, device, bias=bias)
    for shape in ((2, 3, 16, 12), (1, 3, 2, 2), (3, 3, 2, 34)):
        x = images(device, shape=shape)
        assert stem.is_stem(conv, x)
        grad = torch.randn(conv(x).shape, dtype=torch.float64, device=device)
        mine, theirs = run(stem.convolve, conv, x, grad), run(nn.Conv2d.__call__, conv, x, grad)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert mine[0].stride() == theirs[0].stride() and mine[1].stride() == theirs[1].stride()
    x = images(device, shape=(1, 3, 4, 4)).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, w: nn.functional.conv2d(
        stem.ops.space_to_depth(x, 16, kernel % 2 == 1), stem.stem_weight(w, w.dtype), padding=int(kernel % 2 == 0)
    ), (x, conv.weight))  # fmt: skip


@pytest.mark.parametrize("kernel, padding", KERNELS)
def test_no_farther_from_exact_than_stock_under_autocast(device, kernel, padding):
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    conv = make(kernel, padding, device, torch.float32)
    x = images(device, torch.float32, (4, 3, 64, 64))
    exact_conv = copy.deepcopy(conv).to(device, torch.float64)
    exact_conv.weight.data.copy_(conv.weight.to(dtype))
    exact_x = x.to(dtype).double()
    grad = torch.randn(exact_conv(exact_x).shape, device=device).to(dtype).double()
    exact = run(nn.Conv2d.__call__, exact_conv, exact_x, grad)
    with torch.autocast(device.type, dtype):
        assert stem.is_stem(conv, x)
        mine, theirs = run(stem.convolve, conv, x, grad), run(nn.Conv2d.__call__, conv, x, grad)
    for a, b, e in zip(mine, theirs, exact):
        assert a.dtype == b.dtype
        assert (a - e).abs().max() <= 1.5 * (b - e).abs().max() + 1e-3 * e.abs().max()


def called(monkeypatch, conv, x):
    """Return whether ``convolve`` calls stem_conv2d if the GPU has tensor cores."""
    seen = []
    monkeypatch.setattr(stem, "major", lambda device: 9)
    monkeypatch.setattr(stem.ops, "stem_conv2d", lambda *tensors: seen.append(tensors) or stem_conv2d(*tensors))
    assert stem.convolve(conv, x).shape == conv(x).shape
    return bool(seen)


def test_tensor_cores_take_what_they_can(monkeypatch):
    half = torch.bfloat16
    x = images(dtype=half)
    assert called(monkeypatch, make(6, 2, dtype=half), x) and called(monkeypatch, make(3, 1, dtype=half), x)
    with torch.autocast("cpu", half):
        assert called(monkeypatch, make(6, 2, dtype=torch.float32), images(dtype=torch.float32))
    assert not called(monkeypatch, make(6, 2, dtype=half, bias=True), x)
    assert not called(monkeypatch, make(6, 2, dtype=half), x.clone().requires_grad_())
    assert not called(monkeypatch, make(6, 2), images())
    for outputs in (8, 24, 112):
        conv = nn.Conv2d(3, outputs, 3, 2, 1, bias=False).to(half, memory_format=torch.channels_last)
        assert not called(monkeypatch, conv, x)
    conv = make(6, 2, dtype=half)
    for size, fits in (((127, 16, 4096, 4096), True), ((128, 16, 4096, 4096), False), ((1, 16, 16384, 16384), False)):
        assert stem._has_kernel(conv, torch.empty(size, dtype=half, device="meta")) == fits


@pytest.mark.parametrize("kernel, padding", KERNELS)
def test_tensor_cores_are_no_farther_from_exact_than_stock(device, monkeypatch, kernel, padding):
    """As in training, the images have no gradient. On the CPU the operator's own form runs."""
    if device.type == "cpu":
        monkeypatch.setattr(stem, "major", lambda device: 9)
    dtype = torch.bfloat16
    conv, x = make(kernel, padding, device, torch.float32), images(device, torch.float32, (4, 3, 64, 64))
    exact_conv = copy.deepcopy(conv).double()
    exact_conv.weight.data.copy_(conv.weight.to(dtype))
    grad = torch.randn(conv(x).shape, device=device).to(dtype)

    def run(call, conv, x):
        y = call(conv, x)
        return [y.detach(), *torch.autograd.grad(y, conv.weight, grad.to(y.dtype))]

    exact = run(nn.Conv2d.__call__, exact_conv, x.to(dtype).double())
    with torch.autocast(device.type, dtype):
        mine, theirs = run(stem.convolve, conv, x), run(nn.Conv2d.__call__, conv, x)
    assert mine[0].stride() == theirs[0].stride()
    for a, b, e in zip(mine, theirs, exact):
        assert a.dtype == b.dtype
        assert (a - e).abs().max() <= 1.5 * (b - e).abs().max() + 1e-3 * e.abs().max()


def test_in_programs(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(stem, "major", lambda device: 9)
    conv, x = make(6, 2, device, torch.bfloat16), images(device, torch.bfloat16)

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return stem.convolve(self.conv, x)

    torch._dynamo.reset()
    for program in (
        torch.compile(Stem(), fullgraph=True, backend="aot_eager"),
        torch.export.export(Stem(), (x,)).module(),
    ):
        assert torch.equal(program(x), stem.convolve(conv, x))


def hooked(conv):
    conv.register_forward_hook(lambda *_: None)
    return conv


class OtherConv(nn.Conv2d):
    pass


def with_forward(conv):
    conv.forward = lambda x: x
    return conv


def other(conv):
    conv.__class__ = OtherConv
    return conv


@pytest.mark.parametrize(
    "conv",
    [
        hooked(make(6, 2)),
        with_forward(make(6, 2)),
        other(make(6, 2)),
        make(6, 1),
        make(5, 2),
        make(3, 1, dilation=2),
        make(3, 1, padding_mode="reflect"),
        make(6, 2).to(memory_format=torch.contiguous_format),
        make(6, 2, dtype=torch.float32),
        nn.Conv2d(3, 16, 6, 1, 2).double().to(memory_format=torch.channels_last),
        nn.Conv2d(4, 16, 6, 2, 2).double().to(memory_format=torch.channels_last),
        nn.Identity(),
    ],
)
def test_other_convolutions_are_stocks(conv):
    assert not stem.is_stem(conv, images())


def test_other_inputs_are_stocks():
    conv = make(6, 2)
    x = images()
    assert stem.is_stem(conv, x)
    for bad in (x[..., 1:], x[:, :, 1:], x[0], x[:0], x.byte(), x.float(), x[:, :2], nn.Parameter(x), None):
        assert not stem.is_stem(conv, bad)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 2 channels"):
        stem.convolve(conv, x[:, :2])
    assert torch.equal(stem.convolve(conv, x[..., 1:]), conv(x[..., 1:]))
    with torch.autocast("cpu", torch.bfloat16):
        assert not stem.is_stem(conv, x), "autocast leaves float64 alone"
