"""Compare bn_act with its definition and with BatchNorm2d followed by the activation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.launches import launched
from tests.references import bn_act as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FORMATS = [torch.contiguous_format, torch.channels_last]
# The shapes fill vectors or do not, along C and along H * W. They have one row, one column, one channel, slices of
# several widths (C / 8 = 3, 10, 12, 17) and more positions than a block takes at once.
SHAPES = [
    (2, 16, 6, 8),
    (3, 24, 5, 7),
    (1, 8, 3, 20),
    (2, 3, 5, 1),
    (5, 1, 7, 5),
    (2, 255, 1, 3),
    (4, 6, 1, 1),
    (2, 80, 9, 8),
    (2, 96, 4, 4),
    (1, 136, 8, 4),
    (3, 64, 40, 24),
]
ACTIVATIONS = {
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "hardswish": nn.Hardswish(),
    "identity": nn.Identity(),
}


def random(shape, device, dtype=torch.float32, memory_format=torch.contiguous_format):
    # The CPU's generator gives the same numbers on every device.
    return torch.randn(shape).to(device=device, dtype=dtype, memory_format=memory_format)


def make_norm(channels, device, dtype=torch.float32):
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    nn.init.uniform_(norm.running_mean, -1, 1)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def ours(x, norm, activation="silu", slope=0.1, residual=None):
    return ops.bn_act(
        x,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.num_batches_tracked,
        norm.momentum,
        norm.eps,
        activation,
        slope,
        residual,
    )


def stock(x, norm, activation="silu", residual=None):
    y = ACTIVATIONS[activation](norm(x))
    return y if residual is None else residual + y


def run(function, x, norm, grad, residual=None, **options):
    """Return the output, the gradients of x, weight and bias (and residual), and the buffers of the norm afterwards."""
    norm = copy.deepcopy(norm)
    x = x.detach().clone().requires_grad_()
    inputs = [x, norm.weight, norm.bias]
    if residual is not None:
        residual = residual.detach().clone().requires_grad_()
        inputs.append(residual)
    y = function(x, norm, residual=residual, **options)
    return y.detach(), torch.autograd.grad(y, inputs, grad), dict(norm.named_buffers())


def layout(tensor):
    """Return the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def error(value, exact):
    return (value.double() - exact).abs().max().item() if exact.numel() else 0.0


def assert_as_good_as_stock(values, stock_values, exact, dtype):
    """Assert an error of at most 1.5 times BatchNorm2d's, or that of rounding the exact result once to dtype (plus
    float32's own rounding of sums, which is relative to the largest value)."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
    for value, theirs, want in zip(values, stock_values, exact):
        scale = want.abs().max().item() if want.numel() else 0.0
        sums = 64 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * scale
        allowed = max(1.5 * error(theirs, want), 0.51 * unit * scale + sums) + 1e-12
        assert error(value, want) <= allowed, (error(value, want), error(theirs, want), scale)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_definition_and_stock(device, shape, dtype, memory_format):
    norm = make_norm(shape[1], device, dtype)
    x = random(shape, device, dtype, memory_format) * 2 + 0.5
    grad = random(shape, device, dtype, memory_format)
    y, grads, buffers = run(ours, x, norm, grad)
    y_stock, grads_stock, buffers_stock = run(stock, x, norm, grad)
    exact = reference.bn_act(x, norm.weight, norm.bias, grad, norm.eps)
    assert y.dtype == dtype and layout(y) == layout(y_stock)
    for mine, theirs in zip(grads, grads_stock):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert layout(grads[0]) == layout(grads_stock[0])
    assert_as_good_as_stock(
        [y, *grads], [y_stock, *grads_stock], [exact.y, exact.grad_x, exact.grad_weight, exact.grad_bias], dtype
    )
    count = shape[0] * shape[2] * shape[3]
    mean, variance = exact.running(norm.running_mean, norm.running_var, norm.momentum, count)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(buffers["running_mean"].double(), mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(buffers["running_var"].double(), variance, rtol=tolerance, atol=tolerance)
    assert buffers["num_batches_tracked"] == 1 and buffers_stock["num_batches_tracked"] == 1


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_residual(device, activation, dtype, memory_format):
    shape = (3, 24, 6, 8)
    norm = make_norm(shape[1], device, dtype)
    nn.init.uniform_(norm.weight, 1, 4)  # reaches beyond Hardswish's -3 and 3
    x, residual, grad = (random(shape, device, dtype, memory_format) for _ in range(3))
    for extra in (None, residual):
        y, grads, _ = run(ours, x, norm, grad, residual=extra, activation=activation)
        y_stock, grads_stock, _ = run(stock, x, norm, grad, residual=extra, activation=activation)
        exact = reference.bn_act(x, norm.weight, norm.bias, grad, norm.eps, activation, 0.1, extra)
        wanted = [exact.y, exact.grad_x, exact.grad_weight, exact.grad_bias]
        assert_as_good_as_stock([y, *grads[:3]], [y_stock, *grads_stock[:3]], wanted, dtype)
        if extra is not None:
            assert torch.equal(grads[3], grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(device, activation):
    norm = make_norm(3, device, torch.float64)
    x = random((2, 3, 3, 2), device, torch.float64).requires_grad_()
    residual = random((2, 3, 3, 2), device, torch.float64).requires_grad_()

    def function(x, weight, bias, residual):
        return ops.bn_act(x, weight, bias, eps=1e-3, activation=activation, slope=0.1, residual=residual)

    assert torch.autograd.gradcheck(function, (x, norm.weight, norm.bias, residual))
    y = function(x, norm.weight, norm.bias, residual)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bn_act: a second derivative was asked for, but it has a first"):
        grad.sum().backward()


def test_without_parameters_or_statistics(device):
    norm = nn.BatchNorm2d(16, affine=False, track_running_stats=False).to(device)
    x = random((2, 16, 4, 4), device, memory_format=torch.channels_last).requires_grad_()
    y, expected = ops.bn_act(x, None, None), F.silu(norm(x))
    torch.testing.assert_close(y, expected)
    grad = random(y.shape, device)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))
    assert not ops.bn_act(x.detach(), None, None).requires_grad
    (first,) = torch.autograd.grad(ops.bn_act(x, None, None).sum(), x, create_graph=True)
    assert torch.equal(first, torch.autograd.grad(ops.bn_act(x, None, None).sum(), x)[0])


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("offset, spread", [(1000.0, 0.01), (-3e4, 1.0), (1.0, 1e-3)])
def test_large_means_keep_their_variance(device, offset, spread, memory_format):
    """The variance keeps its digits; E[x^2] - E[x]^2 in float32 would have no correct digit here."""
    x = (torch.randn(4, 16, 20, 20, dtype=torch.float64) * spread + offset).float()
    x = x.to(device=device, memory_format=memory_format)
    y = ops.bn_act(x, None, None, eps=1e-12, activation="identity")
    exact = reference.bn_act(x, None, None, torch.ones_like(x), 1e-12, "identity")
    # x - mean has x's rounding in float32: up to eps * |offset| / spread of a standard deviation.
    torch.testing.assert_close(y.double(), exact.y, rtol=1e-4, atol=2e-7 * abs(offset) / spread + 1e-5)
    invstd = torch.ops.torch_fastdet.bn_act(x, None, None, eps=1e-12)[2]
    torch.testing.assert_close(invstd.double(), 1 / exact.variance.sqrt(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_stays_in_its_channel(device, value, memory_format):
    norm = make_norm(16, device)
    x = random((2, 16, 6, 4), device, memory_format=memory_format)
    grad = random(x.shape, device, memory_format=memory_format)
    clean_y, clean, clean_buffers = run(ours, x, norm, grad)
    spoilt = x.clone(memory_format=torch.preserve_format)
    spoilt[1, 5, 2, 3] = value
    y, grads, buffers = run(ours, spoilt, norm, grad)
    others = [c for c in range(16) if c != 5]
    assert torch.equal(y[:, others], clean_y[:, others]) and not y[:, 5].isfinite().any()
    assert torch.equal(grads[0][:, others], clean[0][:, others])
    for mine, theirs in zip([*grads[1:], buffers["running_var"]], [*clean[1:], clean_buffers["running_var"]]):
        assert torch.equal(mine[others], theirs[others]) and not mine[5].isfinite()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinite_gradient_reaches_the_parameters(device, activation):
    """An infinite gradient reaches the parameters; otherwise GradScaler would never lower its scale."""
    norm = make_norm(8, device)
    x = random((2, 8, 4, 4), device, torch.float16, torch.channels_last)
    grad = torch.ones_like(x)
    place = int(x[:, 3].flatten().argmax())  # where no activation is flat
    grad[place // 16, 3, place % 16 // 4, place % 4] = float("inf")
    _, grads, _ = run(ours, x, norm, grad, activation=activation)
    for mine in grads[1:]:
        assert not mine[3].isfinite() and mine[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    assert not grads[0][:, 3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_strides(device, memory_format, dtype):
    """Channel slices, crops, misaligned, expanded and transposed tensors give the results of contiguous tensors."""
    norm = make_norm(16, device)
    wide = random((2, 40, 8, 12), device, dtype, memory_format)
    flat = random((1 + 2 * 16 * 8 * 12,), device, dtype)
    assert flat[1:].data_ptr() % 16
    inputs = [wide[:, 8:24], wide[:, 3:19], wide[:, :16, 1:7, 2:9], wide[:, :16].transpose(2, 3), wide[:, ::2][:, :16]]
    inputs += [wide[:1, :16].expand(3, 16, 8, 12), flat[1:].view(2, 16, 8, 12)]
    for x in inputs:
        grads_given = [random(x.shape, device, dtype), random((1, 1, 1, 1), device, dtype).expand(x.shape)]
        grads_given += [random((*x.shape[:2], x.shape[3], x.shape[2]), device, dtype).transpose(2, 3)]
        grads_given += [random((x.shape[0], 40, *x.shape[2:]), device, dtype, memory_format)[:, 8:24]]
        for grad in grads_given:
            leaf = x.detach().requires_grad_()
            y = ops.bn_act(leaf, norm.weight, norm.bias, residual=grad)
            # BatchNorm2d gets aligned storage: cuDNN does not check its pointers (pytorch/pytorch#195186).
            assert layout(y) == layout(norm(x if x.data_ptr() % 16 == 0 else x.clone()))
            found = torch.autograd.grad(y, [leaf, norm.weight, norm.bias], grad)
            plain = x.detach().contiguous().requires_grad_()
            expected = ops.bn_act(plain, norm.weight, norm.bias, residual=grad.contiguous())
            wanted = torch.autograd.grad(expected, [plain, norm.weight, norm.bias], grad.contiguous())
            tolerance = 2e-3 if dtype == torch.float16 else 1e-5
            for mine, theirs in zip([y, *found], [expected, *wanted]):
                torch.testing.assert_close(
                    mine, theirs, rtol=tolerance, atol=tolerance * max(1, theirs.abs().max().item())
                )


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)])
def test_empty(device, shape):
    norm = make_norm(shape[1], device)
    before = copy.deepcopy(norm.state_dict())
    x = random(shape, device).requires_grad_()
    y = ours(x, norm)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and not norm.weight.grad.any() and not norm.bias.grad.any()
    assert torch.equal(norm.running_mean, before["running_mean"]) and torch.equal(
        norm.running_var, before["running_var"]
    )
    assert norm.num_batches_tracked == 1


def test_result_may_be_used_in_place_and_again(device):
    norm = make_norm(8, device)
    x = random((2, 8, 4, 4), device).requires_grad_()
    y = ours(x, norm)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    y.mul_(2)
    second = torch.autograd.grad(y.sum() + y.square().sum() * 0, x, retain_graph=True)[0]
    torch.testing.assert_close(second, 2 * first)


def test_autocast_passes_dtypes_through(device):
    norm = make_norm(8, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            x = random((2, 8, 4, 4), device, dtype)
            assert ours(x, norm).dtype == stock(x, norm).dtype == dtype


def test_parameters_of_half_precision(device):
    """model.half().train() makes everything float16, which BatchNorm2d allows too."""
    norm = make_norm(16, device).half()
    x = random((4, 16, 8, 8), device, torch.float16, torch.channels_last)
    grad = random(x.shape, device, torch.float16, torch.channels_last)
    y, grads, buffers = run(ours, x, norm, grad)
    exact = reference.bn_act(x, norm.weight, norm.bias, grad, norm.eps)
    torch.testing.assert_close(y.double(), exact.y, rtol=2e-3, atol=2e-3)
    assert [g.dtype for g in grads] == [torch.float16] * 3
    torch.testing.assert_close(grads[1].double(), exact.grad_weight, rtol=2e-3, atol=2e-2)
    mean, variance = exact.running(norm.running_mean, norm.running_var, norm.momentum, 4 * 64)
    torch.testing.assert_close(buffers["running_mean"].double(), mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(buffers["running_var"].double(), variance, rtol=1e-3, atol=1e-3)


def cat_parts(norms, parts):
    """Return the arguments of bn_act_cat up to num_batches_tracked."""
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return parts, *([getattr(norm, name) for norm in norms] for name in names)


# The channels of the parts fill vectors or do not; there are one to three parts, and a slice begins at an odd channel.
PARTS = [(16, 8), (24,), (3, 16), (8, 5, 40), (64, 64)]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", PARTS)
def test_cat_has_the_values_of_its_parts(device, channels, dtype, memory_format):
    """The parts equal bn_act, which is compared with the definition above. A GPU reads and writes a part at an odd
    place by single elements, so its sums have another order."""
    tolerance = 0.0
    if device.type == "cuda" and any(c % 8 for c in channels):
        tolerance = 64 * max(torch.finfo(dtype).eps, 2e-8 if dtype != torch.float64 else 0)

    def same(mine, theirs):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)

    norms = [make_norm(c, device, dtype) for c in channels]
    again = copy.deepcopy(norms)
    inputs = [random((2, c, 6, 5), device, dtype, memory_format).requires_grad_() for c in channels]
    residual = random((2, channels[0], 6, 5), device, dtype, memory_format).requires_grad_()
    grad = random((2, sum(channels), 6, 5), device, dtype, memory_format)
    for shortcut in (None, residual):
        y = ops.bn_act_cat(*cat_parts(norms, inputs), 0.03, 1e-3, "silu", 0.1, shortcut)
        shortcuts = [shortcut, *[None] * len(channels)]
        expected = torch.cat([ours(x, norm, residual=r) for x, norm, r in zip(inputs, again, shortcuts)], 1)
        same(y, expected)
        assert layout(y) == layout(expected)
        leaves = [*inputs, *(p for norm in norms for p in norm.parameters())]
        leaves_again = [*inputs, *(p for norm in again for p in norm.parameters())]
        if shortcut is not None:
            leaves, leaves_again = [*leaves, residual], [*leaves_again, residual]
        found, wanted = torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves_again, grad)
        for mine, theirs in zip(found, wanted):
            same(mine, theirs)
        assert [layout(g) for g in found[: len(channels)]] == [layout(x) for x in inputs]
        for mine, theirs in zip(norms, again):
            for one, other in zip(mine.buffers(), theirs.buffers()):
                same(one, other)


def test_cat_of_mixed_strides_slices_and_empty_parts(device):
    norms = [make_norm(c, device) for c in (8, 16)]
    wide = random((2, 40, 6, 5), device, memory_format=torch.channels_last)
    for inputs in (
        [wide[:, 3:11], wide[:, 8:24]],
        [wide[:, :8].contiguous(), wide[:, :16]],
        [wide[:, :8].transpose(2, 3).contiguous().transpose(2, 3), wide[:, :16].flip(3)],
        [wide[:0, :8], wide[:0, :16]],
    ):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = ops.bn_act_cat(*cat_parts(norms, leaves), 0.03, 1e-3)
        expected = torch.cat([ours(x, norm) for x, norm in zip(leaves, norms)], 1)
        torch.testing.assert_close(y, expected)
        assert layout(y) == layout(expected)
        grad = random(y.shape, device)
        for mine, theirs in zip(torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    x = wide[:, :16].detach().requires_grad_()
    y = ops.bn_act_cat([x], [norms[1].weight], [norms[1].bias], [], [], [], 0.03, 1e-3)
    torch.testing.assert_close(y, ops.bn_act(x, norms[1].weight, norms[1].bias, eps=1e-3))
    (once,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bn_act: a second derivative was asked for"):
        once.sum().backward()


def test_cat_gradcheck(device):
    norms = [make_norm(c, device, torch.float64) for c in (3, 2)]
    inputs = [random((2, c, 3, 2), device, torch.float64).requires_grad_() for c in (3, 2, 3)]

    def function(first, second, residual, *parameters):
        parts = [first, second], list(parameters[::2]), list(parameters[1::2])
        return ops.bn_act_cat(*parts, [], [], [], 0.1, 1e-3, "silu", 0.1, residual)

    parameters = [p for norm in norms for p in norm.parameters()]
    assert torch.autograd.gradcheck(function, (*inputs, *parameters))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.update(x=[]), "x is an empty list, but one tensor or more is expected"),
        (lambda p: p["weight"].pop(), "weight has 1 entries, but x has 2"),
        (lambda p: p["running_var"].pop(), "running_var has 1 entries, but x has 2"),
        (lambda p: p["x"].reverse(), r"weight has shape \[8\], but \(16,\) is expected beside x of shape"),
        (lambda p: p["x"].__setitem__(1, p["x"][1].half()), r"x\[1\] has dtype float16, but x\[0\] has float32"),
        (
            lambda p: p["x"].__setitem__(1, p["x"][1][..., :2]),
            r"x\[1\] has shape \[2, 16, 3, 2\], but x\[0\] has \[2, 8, 3",
        ),
        (lambda p: p.update(activation="gelu"), "activation is 'gelu', but 'silu'"),
        (lambda p: p.update(residual=p["x"][1]), r"residual has shape \[2, 16, 3, 4\], but x has \[2, 8, 3, 4\]"),
    ],
)
def test_cat_errors_leave_everything_as_it_was(device, change, message):
    norms = [make_norm(c, device) for c in (8, 16)]
    names = ("x", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    arguments = dict(zip(names, cat_parts(norms, [random((2, c, 3, 4), device) for c in (8, 16)])))
    change(arguments)
    before = [b.clone() for norm in norms for b in norm.buffers()]
    with pytest.raises((RuntimeError, ValueError), match=f"bn_act_cat: {message}"):
        ops.bn_act_cat(**arguments)
    assert all(map(torch.equal, before, [b for norm in norms for b in norm.buffers()]))
    with pytest.raises(TypeError, match=r"bn_act_cat: bias\[0\] is a float, but a tensor is expected"):
        ops.bn_act_cat(**{**arguments, "bias": [1.0], "x": [random((2, 8, 3, 4), device)]})


def places_of(x, sizes, before=8):
    """Return for each part of x a tensor; all but the first are the last channels of a wider one."""
    layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    wide = [before if i else 0 for i in range(len(sizes))]
    shapes = [(x.shape[0], first + size, *x.shape[2:]) for first, size in zip(wide, sizes)]
    wholes = [torch.full(shape, 7.0, dtype=x.dtype, device=x.device).to(memory_format=layout) for shape in shapes]
    return wholes, [whole[:, first:] for whole, first in zip(wholes, wide)]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(8, 16), (32, 32), (64, 128), (3, 16, 5, 40), (16,)])
def test_parts_are_norms_of_their_own(device, sizes, dtype, memory_format):
    """Values and gradients are those of bn_act of each part alone, apart from the order of the sums."""
    norms = [make_norm(c, device, dtype) for c in sizes]
    x, grad = (random((2, sum(sizes), 6, 8), device, dtype, memory_format) for _ in range(2))
    residual = random(x.shape, device, dtype, memory_format) if len(sizes) == 1 else None
    expected = [
        run(ours, part, norm, g, residual=residual)
        for part, norm, g in zip(x.split(sizes, 1), norms, grad.split(sizes, 1))
    ]
    wholes, places = places_of(x, sizes)
    lists = [[getattr(n, name).detach() for n in norms] for name in PARTS]
    statistics = torch.ops.torch_fastdet.bn_act_parts(x, places, *lists, 0.03, 1e-3, "silu", 0.1, residual)
    _, given = places_of(grad, sizes)
    for place, part in zip(given, grad.split(sizes, 1)):
        place.copy_(part)
    grads = torch.ops.torch_fastdet.bn_act_parts_backward(given, x, *lists[:2], *statistics, "silu", 0.1)
    assert layout(grads[0]) == layout(x)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert all((whole[:, : whole.shape[1] - size] == 7).all() for whole, size in zip(wholes, sizes))
    for i, (y, wanted, buffers) in enumerate(expected):
        found = [places[i], *(g.split(sizes, int(g.dim() > 1))[i] for g in grads)]
        for mine, theirs in zip(found, [y, *wanted]):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * max(1, theirs.abs().max().item()))
        for name, buffer in buffers.items():
            torch.testing.assert_close(getattr(norms[i], name), buffer, rtol=1e-5, atol=1e-5)


PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda p: p.update(x=p["x"][:0], y=[y[:0] for y in p["y"]]),
            "x has shape .0, 24, 3, 4., but at least one element",
        ),
        (lambda p: p["y"].clear(), "y has 0 entries, but 1 to 4 are expected"),
        (lambda p: [v.pop() for v in p.values() if isinstance(v, list)], "y has 8 channels in all, but x has 24"),
        (lambda p: p["weight"].pop(), "weight has 1 entries, but y has 2"),
        (lambda p: p["running_var"].pop(), "running_var has 1 entries, but y has 2"),
        (lambda p: p["y"].reverse(), r"weight has shape \[8\], but \(16,\) is expected beside x of shape"),
        (lambda p: p["y"].__setitem__(1, p["y"][1].half()), r"y\[1\] has dtype float16, but x has float32"),
        (
            lambda p: p["y"].__setitem__(1, p["y"][1].transpose(2, 3).contiguous().transpose(2, 3)),
            "y.1. has strides .*, but the lay",
        ),
        (lambda p: p.update(activation="gelu"), "activation is 'gelu', but 'silu'"),
        (
            lambda p: p.update(residual=p["y"][0]),
            "residual has shape|y has 2 entries, but one is expected beside a residual",
        ),
    ],
)
def test_errors_of_parts_leave_everything_as_it_was(device, change, message):
    norms, x = [make_norm(c, device) for c in (8, 16)], random((2, 24, 3, 4), device)
    arguments = {
        "x": x,
        "y": places_of(x, (8, 16))[0],
        **{name: [getattr(n, name).detach() for n in norms] for name in PARTS},
    }
    arguments["y"][1] = arguments["y"][1][:, 8:]
    change(arguments)
    before = [b.clone() for norm in norms for b in norm.buffers()]
    with pytest.raises((RuntimeError, ValueError), match=f"bn_act_parts: .*({message})"):
        torch.ops.torch_fastdet.bn_act_parts(**arguments)
    assert all(map(torch.equal, before, [b for norm in norms for b in norm.buffers()]))


def test_one_value_a_channel_is_stocks_error(device):
    with pytest.raises(ValueError) as expected:
        make_norm(8, device)(random((1, 8, 1, 1), device))
    with pytest.raises(ValueError) as raised:
        ours(random((1, 8, 1, 1), device), make_norm(8, device))
    assert str(raised.value).split("\n")[0].replace("[", "torch.Size([").replace("]", "])") == str(expected.value)


BAD = [
    (lambda x, v: ops.bn_act(x[0], v, v), r"bn_act: x has shape \[8, 3, 4\], but four dimensions"),
    (lambda x, v: ops.bn_act(x.int(), v, v), r"bn_act: x has dtype int32, but float16, bfloat16"),
    (lambda x, v: ops.bn_act(x.to_sparse(), v, v), r"x has layout Sparse, but a dense"),
    (lambda x, v: ops.bn_act(x, v[:4], v), r"weight has shape \[4\], but \(8,\) is expected beside x of shape"),
    (lambda x, v: ops.bn_act(x, v, v.view(8, 1)), r"bias has shape \[8, 1\], but \(C,\) is expected"),
    (lambda x, v: ops.bn_act(x, v, v, torch.zeros(16, device=x.device)[::2]), r"running_mean has stride 2, but a cont"),
    (lambda x, v: ops.bn_act(x, v, v, v, v.clone().requires_grad_()), r"running_var requires grad, but it is written"),
    (
        lambda x, v: ops.bn_act(x, v, v, v, v, v),
        r"num_batches_tracked has dtype float32 and shape \[8\], but one int64",
    ),
    (lambda x, v: ops.bn_act(x, v, v, activation="gelu"), r"bn_act: activation is 'gelu', but 'silu', 'relu'"),
    (lambda x, v: ops.bn_act(x, v, v, residual=x[:1]), r"residual has shape \[1, 8, 3, 4\], but x has \[2, 8, 3, 4\]"),
    (lambda x, v: ops.bn_act(x, v, v, residual=x.half()), r"residual has dtype float16, but x has float32"),
]


@pytest.mark.parametrize("call, message", BAD)
def test_errors(device, call, message):
    x, vector = random((2, 8, 3, 4), device), torch.ones(8, device=device)
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(x, vector)
    with pytest.raises(TypeError, match="bn_act: x is"):
        ops.bn_act([1.0], None, None)


def test_repeatable(device):
    norm = make_norm(64, device)
    for memory_format in FORMATS:
        x, grad = (random((4, 64, 40, 40), device, torch.float16, memory_format) for _ in range(2))
        first = run(ours, x, norm, grad)
        for _ in range(5):
            again = run(ours, x, norm, grad)
            for mine, theirs in zip([again[0], *again[1]], [first[0], *first[1]]):
                assert torch.equal(mine, theirs)


@pytest.mark.sanitizer
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_in_bounds(cuda, dtype, memory_format):
    """Run small cases of every type and both access widths, for compute-sanitizer."""
    for shape in ((2, 24, 5, 8), (3, 7, 5, 3), (2, 160, 9, 8)):
        norm = make_norm(shape[1], cuda, dtype)
        x, grad, residual = (random(shape, cuda, dtype, memory_format) for _ in range(3))
        _, grads, _ = run(ours, x, norm, grad, residual=residual)
        assert grads[0].isfinite().all()


@pytest.mark.sanitizer
def test_cat_kernels_in_bounds(cuda):
    for channels in ((8, 16), (3, 16, 5)):
        for memory_format in FORMATS:
            test_cat_has_the_values_of_its_parts(cuda, channels, torch.float16, memory_format)


@pytest.mark.alone
def test_launches_and_no_host_sync(cuda):
    norm = make_norm(64, cuda)
    x = random((4, 64, 20, 20), cuda, torch.float16, torch.channels_last).requires_grad_()
    grad = torch.randn_like(x)

    def step():
        torch.autograd.grad(ours(x, norm), [x, norm.weight, norm.bias], grad)

    step()
    assert len(launched(step)) == 4


def vectors(channels, device, dtype=torch.float32):
    """Return weight, bias, mean and variance."""
    return [
        v.to(device=device, dtype=dtype)
        for v in (torch.rand(channels) + 0.5, *torch.randn(2, channels), torch.rand(channels) + 0.5)
    ]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_evaluation(device, shape, dtype, memory_format):
    """The exact result is rounded once, apart from what a float32 sum loses."""
    x, residual = (random(shape, device, dtype, memory_format) for _ in range(2))
    weight, bias, mean, variance = vectors(shape[1], device)
    of_norm = {"weight": weight, "mean": mean, "variance": variance, "eps": 1e-3}
    for activation in ACTIVATIONS:
        for extra, norm in ((None, {}), (residual, {}), (None, of_norm), (residual, of_norm)):
            y = ops.bias_act(x, bias, activation, 0.1, extra, **norm)
            exact = reference.bias_act(
                x, norm.get("weight"), bias, norm.get("mean"), norm.get("variance"), 1e-3, activation, 0.1, extra
            )
            unit = torch.finfo(dtype).eps / 2 if dtype != torch.float64 else 2**-52
            within = (
                unit * exact.abs()
                + 2e-6 * (1 + (x.double() * norm.get("weight", bias)[:, None, None]).abs().amax())
                + 1e-7
            )
            assert ((y.double() - exact).abs() <= within).all()
            assert y.dtype == dtype and layout(y) == layout(x.contiguous(memory_format=memory_format))
    assert not ops.bias_act(x, bias.requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_evaluation_is_closer_to_float64_than_the_original(device, dtype):
    """The framework's layers round after the norm or the bias, after the activation and after the sum."""
    x, residual = (random((4, 32, 20, 20), device, dtype) for _ in range(2))
    weight, bias, mean, variance = vectors(32, device)
    for norm in (None, (weight, mean, variance)):
        of_norm = {} if norm is None else {"weight": weight, "mean": mean, "variance": variance, "eps": 1e-3}
        before = (
            x + bias.to(dtype)[:, None, None]
            if norm is None
            else torch.nn.functional.batch_norm(
                x, *(each.to(dtype) for each in (mean, variance, weight, bias)), eps=1e-3
            )
        )
        exact = reference.bias_act(
            x, of_norm.get("weight"), bias, of_norm.get("mean"), of_norm.get("variance"), 1e-3, "silu", 0.0, residual
        )
        stock = torch.nn.functional.silu(before) + residual
        ours = ops.bias_act(x, bias, "silu", 0.0, residual, **of_norm)
        ours_off, stock_off = ((y.double() - exact).abs() for y in (ours, stock))
        assert ours_off.mean() < stock_off.mean() and ours_off.max() <= stock_off.max()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before, channels", [(8, 24), (3, 16), (16, 7)])
def test_in_evaluation_into_slices_and_in_place(device, before, channels, dtype, memory_format):
    x = random((2, channels, 6, 5), device, dtype, memory_format)
    wide = random((2, channels + 11, 6, 5), device, dtype, memory_format)
    residual, (_, bias, *_) = wide[:, 3 : 3 + channels], vectors(channels, device)
    want = ops.bias_act(x, bias, residual=residual)
    for count in (min(8, channels), 5, channels):
        room = torch.full((2, before + channels + 8, 6, 5), 7.0, dtype=dtype, device=device).contiguous(
            memory_format=memory_format
        )
        place, last = room[:, before : before + channels], torch.empty_like(x[:, :count], memory_format=memory_format)
        torch.ops.torch_fastdet.bias_act(x, place, None, bias, residual=residual, last=last)
        assert torch.equal(place, want) and torch.equal(last, want[:, channels - count :])
        assert (room[:, :before] == 7).all() and (room[:, before + channels :] == 7).all()
    assert ops.bias_act(x, bias, residual=residual, out=room[:, :channels]).data_ptr() == room.data_ptr()
    torch.ops.torch_fastdet.bias_act(x, place, None, bias, residual=residual, last=x)
    assert torch.equal(x, want) and torch.equal(place, want)
    with torch.inference_mode():
        x = x.clone()
        assert ops.bias_act(x, bias, out=x) is x


def test_in_evaluation_no_elements_and_other_strides(device):
    x, bias = random((2, 8, 6, 6), device), vectors(8, device)[1]
    assert torch.equal(ops.bias_act(x.transpose(2, 3), bias), ops.bias_act(x, bias).transpose(2, 3))
    wide = vectors(16, device)[1]
    assert torch.equal(ops.bias_act(x, wide[::2]), ops.bias_act(x, wide[::2].contiguous()))
    assert ops.bias_act(x[:0], bias).shape == (0, 8, 6, 6)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a.update(activation="x"), "activation is 'x', but"),
        (lambda a: a.update(bias=torch.ones(7)), r"bias has shape \[7\], but \(8,\) is expected"),
        (lambda a: a.update(x=a["x"][0]), "x has shape .*, but four dimensions"),
        (lambda a: a.update(y=a["y"].half()), "y has dtype float16, but x has float32"),
        (lambda a: a.update(y=a["y"].transpose(2, 3)), "y has strides"),
        (lambda a: a.update(residual=a["x"][:, :4]), "residual has shape"),
        (
            lambda a: a.update(last=torch.zeros(2, 9, 4, 4)),
            "last has 9 channels, but at most those of x, 8, are expected",
        ),
        (lambda a: a.update(last=torch.zeros(2, 4, 4, 3)), "last has shape"),
    ],
)
def test_in_evaluation_errors_are_one_line_and_write_nothing(change, message):
    arguments = {"x": torch.ones(2, 8, 4, 4), "y": torch.zeros(2, 8, 4, 4), "weight": None, "bias": None}
    change(arguments)
    with pytest.raises((RuntimeError, ValueError), match=f"bias_act: {message}") as error:
        torch.ops.torch_fastdet.bias_act(**arguments)
    assert len(str(error.value).splitlines()) == 1 and not arguments["y"].any()
