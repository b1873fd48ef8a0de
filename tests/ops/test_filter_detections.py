"""Compare filter_detections, which filters a model's rows without suppression, with a loop in float64."""

import pytest
import torch

from tests.references.filter_detections import filter_detections as expected
from torch_fastdet import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def make(images, count, columns, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(images, count, columns, generator=g)
    rows[..., 5] = torch.randint(7, (images, count), generator=g)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count, columns", [(300, 6), (1000, 6), (257, 38), (1, 6), (0, 6)])
@pytest.mark.parametrize("classes", [None, [0, 3, 16000, -1], []], ids=str)
def test_rows(device, dtype, count, columns, classes):
    prediction = make(3, count, columns, dtype)
    sizes = torch.tensor([[640.0, 480], [33, 65], [1, 1]])
    for most in (300, 10, 0):
        for given in (None, sizes):
            wanted = expected(prediction, 0.4, classes, most, given, False)
            found = ops.filter_detections(
                prediction.to(device), 0.4, classes, most, None if given is None else given.to(device)
            )
            torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=1e-6, atol=1e-4)
            assert torch.equal(found[1].cpu(), wanted[1]) and torch.equal(found[2].cpu(), wanted[2])
            if given is None:
                assert torch.equal(found[0].cpu(), wanted[0])


def test_no_images(device):
    found = ops.filter_detections(torch.zeros(0, 300, 6, device=device))
    assert [tuple(part.shape) for part in found] == [(0, 300, 6), (0,), (0, 300)]


def test_the_threshold_itself_is_not_above_it(device):
    for dtype in DTYPES:
        row = torch.tensor([[[0, 0, 1, 1, 0.3, 2.0]]], dtype=dtype, device=device)
        assert ops.filter_detections(row, 0.3)[1].item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(device, bad):
    prediction = make(2, 40, 6, torch.float32)
    for column in range(6):
        prediction[0, 3 + 5 * column, column] = bad
    for finite in (False, True):
        wanted = expected(prediction, 0.1, [0, 1, 2, 3, 4, 5, 6], 300, None, finite)
        found = ops.filter_detections(prediction.to(device), 0.1, [0, 1, 2, 3, 4, 5, 6], 300, None, finite)
        torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found[2].cpu(), wanted[2])


def test_any_strides(device):
    wide = make(2, 50, 12, torch.float32).to(device)
    for view in (wide[:, ::3, :6], wide.transpose(1, 2).contiguous().transpose(1, 2)[..., 2:9], wide.flip(1)[1:]):
        for mine, plain in zip(ops.filter_detections(view, 0.3), ops.filter_detections(view.contiguous(), 0.3)):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: ops.filter_detections(x[0]), r"prediction has shape \[9, 6\], but \(images, rows, 6 or more"),
        (lambda x: ops.filter_detections(x[..., :5]), "6 or more columns"),
        (lambda x: ops.filter_detections(x.int()), "prediction"),
        (lambda x: ops.filter_detections(x, 1.5), "conf_thres is 1.5, but a confidence threshold between 0 and 1"),
        (lambda x: ops.filter_detections(x, float("nan")), "conf_thres is nan"),
        (lambda x: ops.filter_detections(x, max_det=-1), "max_det is -1, but 0 or more"),
        (lambda x: ops.filter_detections(x, classes=[16384]), "classes names class 16384, but classes below 16384"),
        (lambda x: ops.filter_detections(x, sizes=x.new_ones(3, 2)), r"sizes has shape \[3, 2\], but \(2, 2\)"),
        (lambda x: ops.filter_detections(x, sizes=x.new_ones(2)), "width and height of each image"),
        (lambda x: ops.filter_detections(x, classes="0"), "classes"),
    ],
)
def test_errors(device, change, message):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=rf"^filter_detections: [^\n]*{message}[^\n]*$"):
        change(make(2, 9, 6, torch.float32).to(device))
