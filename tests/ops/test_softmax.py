"""Compare torch.ops.torch_fastdet.softmax_backward with torch's softmax: in float64, and bit for bit on a GPU."""

import pytest
import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
softmax_backward = torch.ops.torch_fastdet.softmax_backward
SHAPES = [(2, 33, 70), (1, 1, 1), (3, 5, 512), (1, 40, 513), (2, 3, 1024), (5, 64, 31)]


def make(shape, device, dtype, layout):
    """Return the result of softmax and a gradient of it in this layout."""
    n, rows, columns = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = torch.randn(shape, dtype=torch.float64).mul(3).to(device, wide).softmax(-1)
    whole = torch.randn(n + 1, rows + 2, columns + 3, dtype=torch.float64).to(device, dtype)
    if layout == "rows":
        return y, whole[:n, :rows, :columns].contiguous()
    if layout == "columns":
        return y, whole[:n, :rows, :columns].transpose(1, 2).contiguous().transpose(1, 2)
    return y, whole[1:, 2:, 3:]


@pytest.mark.parametrize("layout", ["rows", "columns", "a slice"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(device, shape, dtype, layout):
    y, grad = make(shape, device, dtype, layout)
    found = softmax_backward(grad, y)
    assert found.dtype == dtype and found.is_contiguous()
    a, g = y.double(), grad.double()
    exact = a * (g - (a * g).sum(-1, keepdim=True))
    each = torch.finfo(y.dtype).eps * (a * (g.abs() + shape[2] * (a * g).abs().sum(-1, keepdim=True)))
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 4 * each + smallest).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_torchs_on_a_gpu(cuda, shape, dtype):
    x = torch.randn(shape, device=cuda, dtype=dtype, requires_grad=True)
    for layout in ("rows", "columns"):
        _, grad = make(shape, cuda, dtype, layout)
        y = torch.softmax(x, -1, dtype=torch.float32)
        (wanted,) = torch.autograd.grad(y.to(dtype), x, grad)
        assert torch.equal(softmax_backward(grad, y.detach()), wanted)


def test_empty(device):
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        empty = torch.empty(shape, device=device)
        assert softmax_backward(empty, empty).shape == shape


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda g, y: (g.long(), y), "grad_y has dtype int64"),
        (lambda g, y: (g.half(), y.half()), "y has dtype float16, but float32 is expected beside grad_y of float16"),
        (lambda g, y: (g[0], y[0]), r"grad_y has shape \[3, 5\] and y \[3, 5\], but three dimensions"),
        (lambda g, y: (g[:, 1:], y), r"grad_y has shape \[2, 2, 5\], but y has \[2, 3, 5\]"),
        (
            lambda g, y: (g.expand(2, 3, 5).repeat(1, 1, 205), y.repeat(1, 1, 205)),
            "y has 1025 columns, but at most 1024",
        ),
    ],
)
def test_errors_are_one_line(device, change, message):
    with pytest.raises(RuntimeError, match=f"softmax_backward: {message}") as error:
        softmax_backward(*change(torch.ones(2, 3, 5, device=device), torch.ones(2, 3, 5, device=device)))
    assert len(str(error.value).splitlines()) == 1
