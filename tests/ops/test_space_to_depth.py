"""Compare space_to_depth with its definition and PyTorch's pixel_unshuffle."""

import pytest
import torch
import torch.nn.functional as F

from tests.references import space_to_depth as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Each case has a shape and the result's channels: 16-byte vectors, single elements, several trips of a block's threads.
CASES = [
    ((2, 3, 6, 8), 16),
    ((1, 3, 2, 2), 12),
    ((2, 1, 4, 10), 5),
    ((3, 4, 8, 6), 24),
    ((1, 3, 4, 700), 16),
    ((2, 5, 2, 6), 20),
]
EMPTY = [((0, 3, 4, 4), 16), ((2, 0, 4, 4), 8), ((2, 3, 0, 4), 16), ((2, 3, 4, 0), 16), ((2, 0, 4, 4), 0)]
FORMATS = [torch.contiguous_format, torch.channels_last]
backward = torch.ops.torch_fastdet.space_to_depth_backward


def random(shape, device, dtype=torch.float32, memory_format=torch.contiguous_format):
    return torch.randn(shape).to(device=device, dtype=dtype, memory_format=memory_format)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("border", [False, True])
@pytest.mark.parametrize("shape, channels", CASES + EMPTY)
def test_values_and_gradients(device, shape, channels, border, memory_format):
    for dtype in DTYPES:
        x = random(shape, device, torch.float32, memory_format).requires_grad_()
        out = ops.space_to_depth(x, channels, border, dtype)
        expected = reference.space_to_depth(x.detach(), channels, border).to(dtype)
        assert out.dtype == dtype and torch.equal(out, expected)
        assert out.is_contiguous(memory_format=torch.channels_last)
        grad = random(out.shape, device, dtype, memory_format)
        (grad_x,) = torch.autograd.grad(out, x, grad)
        assert grad_x.dtype == torch.float32
        assert torch.equal(grad_x.double(), reference.space_to_depth_backward(grad, shape[1], border))


@pytest.mark.sanitizer
@pytest.mark.parametrize("memory_format", FORMATS)
def test_sanitizer_small(device, memory_format):
    for index, (shape, channels) in enumerate(CASES):
        test_values_and_gradients(device, shape, channels, index % 2 == 0, memory_format)


@pytest.mark.parametrize("source", DTYPES)
def test_types(device, source):
    x = random((2, 3, 4, 6), device, torch.float64).to(source)
    for target in DTYPES:
        assert torch.equal(ops.space_to_depth(x, 16, dtype=target)[:, :12], F.pixel_unshuffle(x.to(target), 2))
    assert ops.space_to_depth(x, 12).dtype == source
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert ops.space_to_depth(x, 12).dtype == source


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("border", [False, True])
def test_bytes_are_divided_by_255(device, border, memory_format):
    """The bits are those of torch's division, which multiplies on a GPU, rounded once more."""
    x = torch.arange(2 * 3 * 16 * 24, device=device).remainder(256).to(torch.uint8).view(2, 3, 16, 24)
    x = x.contiguous(memory_format=memory_format)
    for image in (x, x[:, :2, 2:8, 4:10]):
        for dtype in DTYPES:
            wanted = ops.space_to_depth(image / 255, 16, border, dtype)
            assert torch.equal(ops.space_to_depth(image, 16, border, dtype), wanted)
    with pytest.raises(RuntimeError, match="space_to_depth: dtype is uint8, but"):
        ops.space_to_depth(x, 16)


def test_any_strides(device):
    wide = random((4, 9, 12, 20), device)
    nhwc = wide.contiguous(memory_format=torch.channels_last)
    for x in (
        wide[:, 2:5, 1:7, 3:9],
        nhwc[:, 2:5, 1:7, 3:9],
        wide.transpose(2, 3),
        wide[:, :1].expand(4, 3, 12, 20),
        wide[:, :, ::2, ::5],
    ):
        channels = 4 * x.shape[1]
        assert torch.equal(ops.space_to_depth(x, channels), F.pixel_unshuffle(x, 2))
    grad = random((2, 24, 6, 10), device)
    for view in (grad[:, 4:20], grad.transpose(2, 3), grad[:, :, 1:, 2:], grad[:1, :1, :1, :1].expand(2, 16, 5, 3)):
        for border in (False, True):
            expected = reference.space_to_depth_backward(view, 3, border)
            assert torch.equal(backward(view, 3, border, None).double(), expected)


def test_gradients_of_any_order(device):
    x = random((2, 3, 4, 2), device, torch.float64).requires_grad_()
    for border in (False, True):
        call = lambda t, border=border: ops.space_to_depth(t, 13, border)  # noqa: E731
        assert torch.autograd.gradcheck(call, x) and torch.autograd.gradgradcheck(call, x)


def test_sizes_stay_free_in_an_exported_program():
    class Squares(torch.nn.Module):
        def forward(self, x):
            return ops.space_to_depth(x, 16, True)

    sizes = {0: torch.export.Dim.DYNAMIC, 2: 2 * torch.export.Dim("h", max=999), 3: 2 * torch.export.Dim("w", max=999)}
    program = torch.export.export(Squares(), (random((2, 3, 4, 6), "cpu"),), dynamic_shapes=(sizes,)).module()
    for shape in ((2, 3, 4, 6), (5, 3, 10, 2)):
        x = random(shape, "cpu")
        assert torch.equal(program(x), ops.space_to_depth(x, 16, True))


BAD = [
    (lambda x: ops.space_to_depth(x[0], 16), r"space_to_depth: x has shape \[3, 4, 6\], but four dimensions"),
    (lambda x: ops.space_to_depth(x.char(), 16), r"space_to_depth: x has dtype int8, but uint8, float16, bfloat16"),
    (lambda x: ops.space_to_depth(x.to_sparse(), 16), r"space_to_depth: x has layout Sparse, but a dense"),
    (lambda x: ops.space_to_depth(x, 11), r"space_to_depth: channels is 11, but at least 12, four times those of x"),
    (lambda x: ops.space_to_depth(x[..., 1:], 12), r"x has shape \[2, 3, 4, 5\], but an even height and width"),
    (lambda x: ops.space_to_depth(x, 12, dtype=torch.int32), r"space_to_depth: dtype is int32, but float16"),
    (lambda x: backward(x, 1, False, None), r"grad_output has shape \[2, 3, 4, 6\], but at least \(N, 4, 0, 0\)"),
]


@pytest.mark.parametrize("call, message", BAD)
def test_errors_are_sentences(device, call, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        call(random((2, 3, 4, 6), device))
    assert len(str(caught.value).splitlines()) == 1
