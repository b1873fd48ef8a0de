"""Compare deformable_attention with its definition in float64 and with grid_sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.launches import launched
from tests.references import deformable_attention as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
operator = torch.ops.torch_fastdet.deformable_attention
backward_operator = torch.ops.torch_fastdet.deformable_attention_backward

# Each case is batch, queries, heads, channels, points, shapes. They cover vectors and single channels, groups of 1 to
# 32 lanes with idle ones, and tiles of part of a row.
CASES = [
    (2, 5, 2, 32, 4, [(6, 7), (3, 4)]),
    (1, 1, 1, 8, 1, [(1, 1)]),
    (3, 33, 3, 17, 2, [(5, 1), (1, 9), (4, 4)]),
    (1, 40, 2, 64, 3, [(13, 11)]),
    (2, 6, 2, 24, 2, [(4, 5), (2, 2)]),
    (2, 7, 1, 264, 1, [(3, 3)]),
    (1, 3, 8, 1, 2, [(2, 3), (1, 2)]),
    (1, 30, 1, 40, 2, [(3, 900), (50, 40)]),
]


def problem(case, device="cpu", dtype=torch.float32, point_dtype=None):
    """Return value, shapes, locations (some outside) and weights, drawn with the CPU's generator."""
    batch, queries, heads, channels, points, shapes = case
    point_dtype = point_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    pixels, levels = sum(h * w for h, w in shapes), len(shapes)
    value = torch.randn(batch, pixels, heads, channels)
    locations = torch.rand(batch, queries, heads, levels, points, 2) * 1.3 - 0.15
    weights = (
        torch.randn(batch, queries, heads, levels * points).softmax(-1).view(batch, queries, heads, levels, points)
    )
    return value.to(device, dtype), shapes, locations.to(device, point_dtype), weights.to(device, point_dtype)


def gradients(function, value, shapes, locations, weights, grad):
    leaves = [tensor.detach().requires_grad_() for tensor in (value, locations, weights)]
    out = function(leaves[0], shapes, leaves[1], leaves[2])
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def exact(value, shapes, locations, weights, grad):
    leaves = [tensor.detach().cpu().double() for tensor in (value, locations, weights, grad)]
    return gradients(reference.deformable_attention, leaves[0], shapes, *leaves[1:])


def assert_near(found, wanted, dtype, arithmetic, width=20):
    """Assert errors within the rounding of the storage type, of sums and of places, relative to the largest value."""
    assert found.dtype == dtype
    found, least = found.double().cpu(), torch.finfo(dtype).smallest_normal
    most = wanted.abs().max() if wanted.numel() else 0.0
    near = torch.finfo(dtype).eps * wanted.abs() + (40 + width) * torch.finfo(arithmetic).eps * most + least
    assert ((found - wanted).abs() <= near).all(), ((found - wanted).abs() - near).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_is_the_definition(device, case, dtype):
    value, shapes, locations, weights = problem(case, device, dtype)
    grad = torch.randn(case[0], case[1], case[2] * case[3]).to(device, dtype)
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    wanted = exact(value, shapes, locations, weights, grad)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    assert found[0].is_contiguous()
    for ours, theirs, source in zip(found, wanted, (value, value, locations, weights)):
        assert_near(ours, theirs, source.dtype, arithmetic, max(width for _, width in shapes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_points_of_another_type(device, dtype):
    """Points are read in the arithmetic type, and their gradients have their own type."""
    value, shapes, locations, weights = problem(CASES[0], device, torch.float32, dtype)
    grad = torch.randn(2, 5, 64, device=device)
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    wanted = gradients(ops.deformable_attention, value, shapes, locations.float(), weights.float(), grad)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.float32, dtype, dtype]
    for ours, theirs in zip(found, wanted):
        assert torch.equal(ours, theirs.to(ours.dtype))


def sampled(value, shapes, locations, weights):
    """Return the result of an implementation with grid_sample."""
    batch, _, heads, channels = value.shape
    queries, levels, points = locations.shape[1], len(shapes), locations.shape[4]
    maps = value.permute(0, 2, 3, 1).flatten(0, 1).split([h * w for h, w in shapes], 2)
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)  # (batch * heads, queries, levels, points, 2)
    samples = [
        F.grid_sample(m.unflatten(2, shape), grids[:, :, i], "bilinear", "zeros", align_corners=False)
        for i, (m, shape) in enumerate(zip(maps, shapes))
    ]
    factors = weights.transpose(1, 2).reshape(batch * heads, 1, queries, levels * points)
    out = (torch.stack(samples, 3).flatten(3) * factors).sum(3)
    return out.view(batch, heads * channels, queries).transpose(1, 2)


@pytest.mark.parametrize("case", CASES)
def test_is_grid_sample(device, case):
    inputs = problem(case, device, torch.float64)
    grad = torch.randn(case[0], case[1], case[2] * case[3], dtype=torch.float64, device=device)
    for ours, theirs in zip(gradients(ops.deformable_attention, *inputs, grad), gradients(sampled, *inputs, grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_points_on_pixels_have_grid_samples_slope(device):
    """Rounded to bfloat16, many points are there. The slope jumps, and is that to the right and below."""
    value, shapes, locations, weights = problem((2, 5, 2, 8, 4, [(4, 8), (2, 2)]), device, torch.float64)
    sides = locations.new_tensor([(width, height) for height, width in shapes])[:, None]
    inputs = value, shapes, ((locations * sides).round() + 0.5) / sides, weights
    grad = torch.randn(2, 5, 16, dtype=torch.float64, device=device)
    found = gradients(ops.deformable_attention, *inputs, grad)
    for wanted in (gradients(sampled, *inputs, grad), exact(*inputs, grad)):
        for ours, theirs in zip(found, wanted):
            torch.testing.assert_close(ours, theirs.to(device), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_one_pixel(device, dtype):
    """The integers of the value's gradient do not overflow where all queries meet or one gradient is far larger."""
    value, shapes, locations, weights = problem((1, 500, 1, 32, 4, [(9, 9)]), device, dtype)
    locations = torch.full_like(locations, 0.5)
    for grad in (
        torch.ones(1, 500, 32),
        -torch.ones(1, 500, 32) * 60,
        torch.randn(1, 500, 32) * torch.rand(500, 1) ** 9,
    ):
        grad = grad.to(device, dtype)
        found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
        wanted = exact(value, shapes, locations, weights, grad)
        assert_near(found[1], wanted[1], dtype, torch.float64 if dtype == torch.float64 else torch.float32)


def test_tiny_and_huge_gradients(device):
    value, shapes, locations, weights = problem(CASES[0], device)
    grad = torch.randn(2, 5, 64, device=device)
    for factor in (1e-30, 1e-12, 1e12, 1e30):
        found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad * factor)[1]
        wanted = exact(value, shapes, locations, weights, grad * factor)[1]
        torch.testing.assert_close(found.double().cpu() / factor, wanted / factor, rtol=1e-4, atol=1e-6)


def test_locations_that_are_no_numbers(device):
    """Locations that are NaN or infinite lie outside: they add nothing and get no gradient."""
    value, shapes, locations, weights = problem(CASES[0], device)
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30], device=device)
    locations[0, :, 0, 0, 0, 0] = bad
    locations[1, :, 1, 1, 2, 1] = bad
    grad = torch.randn(2, 5, 64, device=device)
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    weights[0, :, 0, 0, 0] = 0
    weights[1, :, 1, 1, 2] = 0
    wanted = exact(value, shapes, locations, weights, grad)
    for ours, theirs in zip(found[:2], wanted[:2]):
        assert_near(ours, theirs, torch.float32, torch.float32)
    assert not found[2][0, :, 0, 0, 0].any() and not found[3][0, :, 0, 0, 0].any()
    assert not found[2][1, :, 1, 1, 2].any() and found[2].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_that_is_no_number(device, dtype, bad):
    """NaN in the gradient reaches the value's gradient of its image and head, and no other."""
    value, shapes, locations, weights = problem(CASES[0], device, dtype)
    locations = locations.clamp(0.2, 0.8)
    grad = torch.randn(2, 5, 64, device=device).to(dtype)
    grad[1, 3, 40] = bad  # head 1
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)[1]
    assert not found[1, :, 1].isfinite().all()
    assert found[0].isfinite().all() and found[1, :, 0].isfinite().all()


@pytest.mark.parametrize("empty", ["batch", "queries", "heads", "channels", "points"])
def test_empty(device, empty):
    names = ["batch", "queries", "heads", "channels", "points"]
    case = [0 if name == empty else size for name, size in zip(names, CASES[0])]
    value, shapes, locations, weights = problem((*case, CASES[0][5]), device)
    grad = torch.ones(case[0], case[1], case[2] * case[3], device=device)
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    for ours, shape in zip(found, (grad.shape, value.shape, locations.shape, weights.shape)):
        assert ours.shape == shape and not ours.any()


def test_any_strides(device):
    value, shapes, locations, weights = problem(CASES[0], device, torch.float16)
    grad = torch.randn(2, 5, 64, device=device).half()
    wanted = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (value, locations, weights, grad)]

    def misaligned(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    shifted = [misaligned(tensor) for tensor in (value, locations, weights, grad)]
    for v, where, w, g in (turned, shifted):
        for ours, theirs in zip(gradients(ops.deformable_attention, v, shapes, where, w, g), wanted):
            assert torch.equal(ours, theirs)
    expanded = grad[:1, :1, :1].expand(2, 5, 64)
    for ours, theirs in zip(
        gradients(ops.deformable_attention, value, shapes, locations, weights, expanded),
        gradients(ops.deformable_attention, value, shapes, locations, weights, expanded.contiguous()),
    ):
        assert torch.equal(ours, theirs)


def test_gradcheck(device):
    value, shapes, locations, weights = problem((2, 3, 2, 3, 2, [(3, 4), (2, 2)]), device, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    assert torch.autograd.gradcheck(lambda v, x, w: ops.deformable_attention(v, shapes, x, w), leaves)


def test_gradient_of_one_input(device):
    value, shapes, locations, weights = problem(CASES[0], device)
    grad = torch.randn(2, 5, 64, device=device)
    wanted = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    for i, leaf in enumerate((value, locations, weights)):
        leaf.requires_grad_()
        (found,) = torch.autograd.grad(ops.deformable_attention(value, shapes, locations, weights), leaf, grad)
        leaf.requires_grad_(False)
        assert torch.equal(found, wanted[i + 1])


BAD = [
    (lambda v, s, x, w: (v[0], s, x, w), r"value has shape \[54, 2, 32\], but \(batch, pixels, heads, channels\)"),
    (lambda v, s, x, w: (v, s, x[0], w), r"locations has shape \[5, 2, 2, 4, 2\], but \(batch, queries, heads, levels"),
    (lambda v, s, x, w: (v, s, x, w[0]), r"weights has shape \[5, 2, 2, 4\], but \(batch, queries, heads, levels"),
    (lambda v, s, x, w: (v[:, 1:], s, x, w), r"value has shape \[2, 53, 2, 32\], but the levels of shapes have 54"),
    (
        lambda v, s, x, w: (v, s, x[..., :1], w),
        r"locations has shape \[2, 5, 2, 2, 4, 1\], but \(2, any, 2, 2, any, 2\) is",
    ),
    (lambda v, s, x, w: (v, s, x[:1], w), r"locations has shape \[1, 5, 2, 2, 4, 2\], but \(2, any, 2, 2, any, 2\) is"),
    (lambda v, s, x, w: (v, s, x, w[:, :4]), r"weights has shape \[2, 4, 2, 2, 4\], but one for each point of loc"),
    (lambda v, s, x, w: (v.long(), s, x, w), "value has dtype int64, but float16, bfloat16"),
    (lambda v, s, x, w: (v, s, x.int(), w), "locations has dtype int32, but float16, bfloat16"),
    (lambda v, s, x, w: (v, s, x, w.to_sparse()), "weights has layout Sparse, but a dense"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_errors_are_one_line(device, change, message):
    with pytest.raises(RuntimeError, match=f"^deformable_attention: {message}") as error:
        ops.deformable_attention(*change(*problem(CASES[0], device)))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "shapes, kind, message",
    [
        ([], ValueError, "shapes has 0 levels, but 1 to 16"),
        ([(1, 1)] * 17, ValueError, "shapes has 17 levels, but 1 to 16"),
        ([(6, 7), (0, 4)], ValueError, r"shapes\[1\] is \(0, 4\), but a height and a width of 1 or more"),
        (torch.tensor([[6, 7], [3, 4]]), TypeError, "shapes is a Tensor, but a list of lists of integers is expected"),
        ([(6, 7), 12], TypeError, r"shapes\[1\] is a int, but a list of integers is expected"),
        ([(6, 7), (3, 4, 5)], ValueError, r"shapes\[1\] is \(3, 4, 5\), but \(height, width\) is expected"),
        # The first product is 2**64 * 3 + 42.
        ([(9, 6148914691236517210), (3, 4)], ValueError, r"shapes\[0\] is \(9, 614\d+\), but value has only 54 pixels"),
    ],
)
def test_shapes_that_are_none(device, shapes, kind, message):
    value, _, locations, weights = problem(CASES[0], device)
    with pytest.raises(kind, match=f"^deformable_attention: {message}"):
        ops.deformable_attention(value, shapes, locations, weights)


def test_a_gradient_that_does_not_fit(device):
    value, _, locations, weights = problem(CASES[0], device)
    with pytest.raises(RuntimeError, match=r"grad_output has shape \[2, 5, 63\], but \(2, 5, 64\) is expected"):
        backward_operator(torch.ones(2, 5, 63, device=device), value, [6, 7, 3, 4], locations, weights)


def test_mixed_devices(cuda):
    value, shapes, locations, weights = problem(CASES[0], cuda)
    with pytest.raises(RuntimeError, match="locations is on cpu, but value is on cuda:0; both must be on one device"):
        ops.deformable_attention(value, shapes, locations.cpu(), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeatable(device, dtype):
    value, shapes, locations, weights = problem((2, 200, 2, 32, 4, [(20, 20), (10, 10)]), device, dtype)
    grad = torch.randn(2, 200, 64, device=device).to(dtype)
    first = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    for _ in range(9):
        again = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
        assert all(map(torch.equal, first, again))


@pytest.mark.alone
def test_launches(cuda):
    """With float32 points the forward pass is one launch and the backward pass two."""
    inputs = problem((2, 50, 8, 32, 4, [(20, 20), (10, 10), (5, 5)]), cuda, torch.float16)
    grad = torch.randn(2, 50, 256, device=cuda).half()
    gradients(ops.deformable_attention, *inputs, grad)
    leaves = [tensor.requires_grad_() for tensor in (inputs[0], inputs[2], inputs[3])]
    out = ops.deformable_attention(leaves[0], inputs[1], leaves[1], leaves[2])
    assert len(launched(lambda: ops.deformable_attention(leaves[0], inputs[1], leaves[1], leaves[2]))) == 1
    assert len(launched(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))) == 2


@pytest.mark.alone
def test_more_than_2_31_elements(cuda):
    """The last image of the batch gives what it gives alone."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    batch, shapes = 1030, [(80, 80), (40, 40), (20, 20)]
    value = torch.randn(1, 8400, 8, 32, device=cuda, dtype=torch.float16).expand(batch, -1, -1, -1).contiguous()
    assert value.numel() > 2**31
    value[-1].normal_()
    locations = torch.rand(batch, 3, 8, 3, 4, 2, device=cuda)
    weights = torch.rand(batch, 3, 8, 3, 4, device=cuda)
    grad = torch.randn(batch, 3, 256, device=cuda, dtype=torch.float16)
    found = gradients(ops.deformable_attention, value, shapes, locations, weights, grad)
    last = gradients(ops.deformable_attention, value[-1:], shapes, locations[-1:], weights[-1:], grad[-1:])
    for ours, theirs in zip(found, last):
        assert torch.equal(ours[-1:], theirs)


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    for case in CASES[:7]:
        for dtype in (torch.float16, torch.float32, torch.float64):
            inputs = problem(case, cuda, dtype)
            gradients(ops.deformable_attention, *inputs, torch.ones(case[0], case[1], case[2] * case[3], device=cuda))
