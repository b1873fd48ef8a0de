"""Compare stem_conv2d with its definition and PyTorch's convolution."""

import pytest
import torch
import torch.nn.functional as F

from tests.references import stem_conv as reference
from torch_fastdet import ops

backward = torch.ops.torch_fastdet.stem_conv2d_backward
HALF = [torch.float16, torch.bfloat16]
OUTPUTS = [16, 32, 48, 64, 80, 96]
# Each case has N, H, W of the squares: images end within tiles of 8, 16 and 32, or have single rows and columns.
SIZES = [(2, 9, 35), (1, 2, 2), (3, 17, 8), (1, 1, 40), (1, 21, 1), (1, 33, 65)]


@pytest.fixture(autouse=True)
def _tensor_cores(request):
    on_gpu = "cuda" in request.fixturenames or "cuda" in request.node.name
    if on_gpu and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels want compute capability 8.0")


def dtypes(device):
    return HALF if device.type == "cuda" else [*HALF, torch.float32, torch.float64]


def random(shape, device, dtype, seed=0, memory_format=torch.channels_last):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype, memory_format=memory_format)


def problem(device, dtype, outputs=32, side=3, size=(2, 9, 35)):
    n, height, width = size
    less = side == 2
    return (
        random((n, 16, height, width), device, dtype, 1),
        random((outputs, 16, side, side), device, dtype, 2).requires_grad_(),
        random((n, outputs, height - less, width - less), device, dtype, 3),
    )


def run(call, squares, weight, grad):
    out = call(squares, weight)
    return out.detach(), *torch.autograd.grad(out, weight, grad)


def stock(squares, weight):
    return F.conv2d(squares, weight, padding=int(weight.shape[2] == 3))


def check(device, dtype, outputs, side, size):
    squares, weight, grad = problem(device, dtype, outputs, side, size)
    mine = run(ops.stem_conv2d, squares, weight, grad)
    exact = reference.stem_conv2d(squares, weight.detach()), reference.stem_conv2d_backward(grad, squares, side)
    for got, want in zip(mine, exact):
        assert got.dtype == dtype and got.shape == want.shape
        assert got.is_contiguous(memory_format=torch.channels_last)
        # The result is rounded once, and sums are float32.
        largest = want.abs().max().item() if want.numel() else 0
        assert torch.allclose(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5 * largest)


@pytest.mark.parametrize("side", [2, 3])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_values_and_gradients(device, outputs, side):
    for index, size in enumerate(SIZES):
        if side == 2 and 1 in size[1:]:
            size = tuple(value + (i > 0) for i, value in enumerate(size))
        check(device, dtypes(device)[index % len(dtypes(device))], outputs, side, size)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("side", [2, 3])
def test_many_tiles_for_a_block(cuda, side, dtype):
    for outputs in (16, 32, 80):
        check(cuda, dtype, outputs, side, (16, 161, 163))


@pytest.mark.sanitizer
@pytest.mark.parametrize("side", [2, 3])
def test_sanitizer_small(device, side):
    for outputs, size in ((16, (1, 9, 35)), (48, (2, 18, 3)), (96, (1, 5, 33))):
        check(device, torch.float16, outputs, side, size)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("side", [2, 3])
def test_no_farther_from_exact_than_stock(device, side, dtype):
    arguments = problem(device, dtype, 32, side, (4, 40, 44))
    exact = run(stock, *(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in arguments))
    for mine, theirs, e in zip(run(ops.stem_conv2d, *arguments), run(stock, *arguments), exact):
        assert (mine - e).abs().max() <= 1.5 * (theirs - e).abs().max() + 1e-3 * torch.finfo(dtype).eps * e.abs().max()


@pytest.mark.parametrize("side", [2, 3])
def test_empty(device, side):
    less = side == 2
    for size in ((0, 4, 4), (2, less, 4), (2, 4, less)):
        squares, weight, grad = problem(device, torch.float16, 16, side, size)
        out, grad_weight = run(ops.stem_conv2d, squares, weight, grad)
        assert out.shape == grad.shape and torch.equal(grad_weight, torch.zeros_like(weight))


def test_any_strides(device):
    squares, weight, grad = problem(device, torch.float16)
    expected = run(ops.stem_conv2d, squares, weight, grad)
    wide = torch.zeros(2, 18, 12, 40, dtype=torch.float16, device=device)
    wide[:, 1:17, 2:11, 3:38] = squares
    misaligned = torch.empty(squares.numel() + 1, dtype=torch.float16, device=device)[1:].view(2, 9, 35, 16)
    misaligned = misaligned.copy_(squares.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    for view in (squares.contiguous(), wide[:, 1:17, 2:11, 3:38], misaligned):
        for other in (weight, weight.detach().contiguous().requires_grad_()):
            got = run(ops.stem_conv2d, view, other, grad.contiguous())
            assert all(map(torch.equal, got, expected))
    row = random((2, 32, 1, 1), device, torch.float16)
    got = run(ops.stem_conv2d, squares, weight, row.expand(-1, -1, 9, 35))
    assert torch.equal(got[1], run(ops.stem_conv2d, squares, weight, row.expand(-1, -1, 9, 35).clone())[1])


def test_same_bits(device):
    arguments = problem(device, torch.float16, 32, 3, (3, 64, 70))
    expected = run(ops.stem_conv2d, *arguments)
    for _ in range(10 if device.type == "cuda" else 2):
        assert all(map(torch.equal, run(ops.stem_conv2d, *arguments), expected))


def test_sizes_stay_free_in_an_exported_program():
    class Stem(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(random((16, 16, 3, 3), "cpu", torch.float16))

        def forward(self, squares):
            return ops.stem_conv2d(squares, self.weight)

    model, free = Stem(), torch.export.Dim.DYNAMIC
    squares = random((2, 16, 4, 6), "cpu", torch.float16)
    program = torch.export.export(model, (squares,), dynamic_shapes=({0: free, 2: free, 3: free},)).module()
    for shape in ((2, 16, 4, 6), (3, 16, 7, 9)):
        squares = random(shape, "cpu", torch.float16)
        assert torch.equal(program(squares), model(squares))


BAD = [
    (lambda x, w, g: ops.stem_conv2d(x[0], w), r"stem_conv2d: squares has shape \[16, 9, 35\], but four dimensions"),
    (
        lambda x, w, g: ops.stem_conv2d(x[:, :12], w),
        r"squares has shape \[2, 12, 9, 35\], but \(N, 16, H, W\) is expected",
    ),
    (lambda x, w, g: ops.stem_conv2d(x.byte(), w), r"stem_conv2d: squares has dtype uint8, but float16"),
    (lambda x, w, g: ops.stem_conv2d(x.to_sparse(), w), r"stem_conv2d: squares has layout Sparse, but a dense"),
    (lambda x, w, g: ops.stem_conv2d(x, w.bfloat16()), r"weight has dtype bfloat16, but squares has float16; both"),
    (lambda x, w, g: ops.stem_conv2d(x, w[:24]), r"weight has shape \[24, 16, 3, 3\], but \(K, 16, 2, 2\) or"),
    (lambda x, w, g: ops.stem_conv2d(x, w[..., :2]), r"weight has shape \[32, 16, 3, 2\], but \(K, 16, 2, 2\) or"),
    (lambda x, w, g: ops.stem_conv2d(x, w.repeat(4, 1, 1, 1)), r"weight has shape \[128, 16, 3, 3\], but"),
    (lambda x, w, g: ops.stem_conv2d(x[:, :, :0], w[..., :2, :2]), r"squares has shape .*, H and W at least 1"),
    (
        lambda x, w, g: ops.stem_conv2d(x.requires_grad_(), w),
        r"stem_conv2d: squares requires grad, but it has a gradient",
    ),
    (lambda x, w, g: backward(g, x, 2), r"grad_output has shape \[2, 32, 9, 35\], but \(2, K, 8, 34\) is expected"),
    (lambda x, w, g: backward(g[:, :8], x, 3), r"grad_output has shape \[2, 8, 9, 35\], but 16, 32, 48, 64, 80 or 96"),
    (lambda x, w, g: backward(g.bfloat16(), x, 3), r"grad_output has dtype bfloat16, but squares has float16"),
]


@pytest.mark.parametrize("call, message", BAD)
def test_errors_are_sentences(device, call, message):
    with pytest.raises(RuntimeError, match=message) as caught:
        call(*problem(device, torch.float16))
    assert len(str(caught.value).splitlines()) == 1


def test_kernel_size_is_2_or_3(device):
    squares, _, grad = problem(device, torch.float16)
    with pytest.raises(ValueError, match="kernel_size is 4, but 2 or 3 is expected"):
        backward(grad, squares, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_takes_half_precision_alone(cuda, dtype):
    squares, weight, grad = problem(cuda, dtype)
    with pytest.raises(RuntimeError, match=r"squares has dtype float\d+, but float16 or bfloat16 is expected on a GPU"):
        ops.stem_conv2d(squares, weight)
    with pytest.raises(RuntimeError, match=r"squares has dtype float\d+, but float16 or bfloat16 is expected on a GPU"):
        backward(grad, squares, 3)
