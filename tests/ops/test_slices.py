"""Compare sum_slices, bit for bit, with torch's additions and copies; pad_and_sum and sum_rows within rounding."""

import pytest
import torch

FORMATS = [torch.channels_last, torch.contiguous_format]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
sum_slices = torch.ops.torch_fastdet.sum_slices
pad_and_sum = torch.ops.torch_fastdet.pad_and_sum
sum_rows = torch.ops.torch_fastdet.sum_rows


def slices(count, shape, device, dtype, memory_format, before=(0, 8, 16, 3)):
    """Return slices of tensors that have other channels before and behind them."""
    n, c, *size = shape
    wholes = [torch.randn(n, first + c + 8, *size, dtype=torch.float64) for first in before[:count]]
    wholes = [whole.to(device, dtype).contiguous(memory_format=memory_format) for whole in wholes]
    return [whole[:, first : first + c] for whole, first in zip(wholes, before)]


def added(x):
    total = x[0].clone()
    for each in x[1:]:
        total = total + each
    return total


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 32, 6, 5), (3, 5, 4, 3), (1, 8, 1, 1), (2, 16, 1, 7), (4, 1, 3, 2), (1, 24, 5, 1)]
)
def test_sums_have_the_bits_of_torchs(device, shape, dtype, memory_format):
    for count in (1, 2, 3, 4):
        x = slices(count, shape, device, dtype, memory_format)
        room = torch.full((shape[0], shape[1] + 16, *shape[2:]), 7.0, dtype=dtype, device=device)
        room = room.contiguous(memory_format=memory_format)
        sum_slices(x, room[:, 8:-8])
        assert torch.equal(room[:, 8:-8], added(x))
        assert (room[:, :8] == 7).all() and (room[:, -8:] == 7).all()


def test_operands_of_other_strides_and_empty_ones(device):
    x = torch.randn(2, 8, 6, 6, device=device)
    strange = [
        x.transpose(2, 3),
        x[:, :1].expand(2, 8, 6, 6),
        x.contiguous(memory_format=torch.channels_last),
        x[:, ::1],
    ]
    for out in (torch.empty_like(x), torch.empty_like(strange[2])):
        sum_slices(strange, out)
        assert torch.equal(out, added(strange))
    for shape in ((0, 8, 6, 6), (2, 0, 6, 6), (2, 8, 0, 6)):
        sum_slices([torch.empty(shape, device=device)], torch.empty(shape, device=device))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, out: ([], out), "x has 0 entries, but 1 to 4 are expected"),
        (lambda x, out: (x * 3, out), "x has 6 entries, but 1 to 4 are expected"),
        (lambda x, out: ([x[0].half()], out), "x has dtype float16, but out has float32"),
        (lambda x, out: ([x[0][:, 1:]], out), r"x has shape \[2, 7, 4, 3\], but out has \[2, 8, 4, 3\]"),
        (lambda x, out: ([x[0][0]], out), "x has shape .*, but four dimensions"),
        (lambda x, out: (x, out.long()), "out has dtype int64"),
        (
            lambda x, out: ([x[0][:, :, :3]], out.transpose(2, 3)[:, :, :, :3].transpose(1, 2)),
            "x has shape|out has strides",
        ),
        (lambda x, out: ([x[0].transpose(2, 3)], out.transpose(2, 3)), "out has strides"),
    ],
)
def test_errors_are_one_line_and_write_nothing(device, change, message):
    x, out = change([torch.ones(2, 8, 4, 3, device=device)] * 2, torch.zeros(2, 8, 4, 3, device=device))
    with pytest.raises(RuntimeError, match=f"sum_slices: {message}") as error:
        sum_slices(x, out)
    assert len(str(error.value).splitlines()) == 1 and not out.any()


def test_large_slices(cuda):
    """The slices have more rows than the blocks of a launch take at once."""
    x = slices(3, (16, 48, 160, 160), cuda, torch.float16, torch.channels_last)
    out = torch.empty_like(x[0])
    sum_slices(x, out)
    assert torch.equal(out, added(x))


def check_sums(sums, rows):
    """Check the sums of rows: additions in float32, or in float64 for float64, and one rounding."""
    exact, size = rows.double().sum(1), rows.double().abs().sum(1)
    each = torch.finfo(torch.float64 if rows.dtype == torch.float64 else torch.float32).eps
    limit = torch.finfo(rows.dtype).eps * exact.abs() + rows.shape[1] * each * size
    assert ((sums.double() - exact).abs() <= limit).all()


def check_pad_and_sum(x, channels):
    out, sums = pad_and_sum(x, channels)
    assert out.shape == (x.shape[0], channels, *x.shape[2:]) and out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out[:, : x.shape[1]], x) and not out[:, x.shape[1] :].any()
    assert sums.dtype == x.dtype and sums.shape == (channels,) and not sums[x.shape[1] :].any()
    check_sums(sums[: x.shape[1]], x.permute(1, 0, 2, 3).flatten(1))
    assert torch.equal(pad_and_sum(x, channels)[1], sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, channels",
    [
        ((2, 255, 6, 5), 256),
        ((3, 5, 4, 3), 8),
        ((1, 64, 9, 8), 64),
        ((2, 70, 1, 1), 130),
        ((4, 1, 3, 1), 1),
        ((1, 3, 1, 70), 3),
    ],
)
def test_pad_and_sum(device, shape, channels, dtype):
    n, c, h, w = shape
    torch.manual_seed(0)
    whole = torch.randn(n + 1, c + 3, h + 1, w + 2, dtype=torch.float64).to(device, dtype)
    for x in (whole, whole.contiguous(memory_format=torch.channels_last)):
        check_pad_and_sum(x[:n, :c, :h, :w].contiguous(memory_format=torch.channels_last), channels)
        check_pad_and_sum(x[:n, :c, :h, :w].contiguous(), channels)
        check_pad_and_sum(x[1:, 2 : 2 + c, 1:, 2:], channels)
    flat = torch.randn(n, c, 3 + h * w, dtype=torch.float64).to(device, dtype)
    check_pad_and_sum(flat[..., 3:].unflatten(2, (h, w)), channels)  # as a loss gives a level's gradient
    check_pad_and_sum(whole[:1, :1, :1, :1].expand(shape), channels)
    for empty in ((0, c, h, w), (n, 0, h, w), (n, c, 0, w)):
        check_pad_and_sum(torch.empty(empty, dtype=dtype, device=device), channels)


def test_pad_and_sum_of_many_positions(device):
    """There are more tiles than blocks, so each block adds up several."""
    x = torch.randn(3, 66, 120, 110).to(device, torch.float16 if device.type == "cuda" else torch.bfloat16)
    check_pad_and_sum(x, 72)
    check_pad_and_sum(x.contiguous(memory_format=torch.channels_last), 72)


def test_errors_of_pad_and_sum(device):
    x = torch.randn(2, 5, 4, 3, device=device)
    for given, channels, message in (
        (x, 4, "channels is 4, but at least those of x, 5, are expected"),
        (x[0], 8, "x has shape .*, but four dimensions"),
        (x.long(), 8, "x has dtype int64"),
    ):
        with pytest.raises(RuntimeError, match=f"pad_and_sum: {message}") as error:
            pad_and_sum(given, channels)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(5, 7, 256), (3000, 80), (1, 1), (70, 1), (64,), (4, 33, 96), (2, 40, 1032), (9000, 24)]
)
def test_sum_rows(device, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    unaligned = torch.zeros(x.numel() + 1, dtype=dtype, device=device)[1:].view(shape).copy_(x)
    for given in (x, unaligned, x.unsqueeze(0).expand(2, *shape)):
        sums = sum_rows(given)
        assert sums.dtype == dtype and sums.shape == shape[-1:]
        check_sums(sums, given.reshape(-1, shape[-1]).t())
        assert torch.equal(sum_rows(given), sums)
    for empty in ((0, *shape), (*shape[:-1], 0)):
        assert not sum_rows(x.new_empty(empty)).any()


def test_errors_of_sum_rows(device):
    for given, message in (
        (torch.ones((), device=device), r"x has shape \[\]"),
        (torch.ones(3, device=device).long(), "x has dtype int64"),
    ):
        with pytest.raises(RuntimeError, match=f"sum_rows: {message}") as error:
            sum_rows(given)
        assert len(str(error.value).splitlines()) == 1
