"""Compare crop_mask with its definition and, bit for bit, with yolov5's and ultralytics' functions; check gradients."""

from __future__ import annotations

import pytest
import torch

from tests.ops.test_masks import problem
from tests.references import masks as reference
from torch_fastdet import masks, ops

SIZES = [(16, 32), (7, 33), (160, 160), (1, 1), (300, 5)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def drawn(n: int, size: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks, and boxes that cross their border, are empty, lie outside or hold NaN."""
    _, _, boxes = problem(n, 1, 1, size)
    values = torch.randn(n, *size)
    if dtype is torch.bool:
        return values > 0, boxes
    # Integers use their full width: a pixel that is kept keeps every bit.
    return (values if dtype.is_floating_point else values.double().mul(2**40).long()).to(dtype), boxes


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether the bits are equal, or both values are NaN."""
    signs = not found.is_floating_point() or bool(((found.signbit() == wanted.signbit()) | wanted.isnan()).all())
    return found.dtype == wanted.dtype and signs and torch.allclose(found, wanted, 0, 0, equal_nan=True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_is_the_definition(device, size, dtype):
    values, boxes = drawn(21, size, dtype)
    found = ops.crop_mask(values.to(device), boxes.to(device))
    assert found.is_contiguous() and torch.equal(found.cpu(), reference.crop(values, boxes, 0))
    given = values.to(device)
    assert ops.crop_mask_(given, boxes.to(device)) is None and torch.equal(given, found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_stock_in_every_bit(device, dtype):
    """Ultralytics writes into its argument; yolov5 does not."""
    theirs = pytest.importorskip("ultralytics.utils.ops").crop_mask
    general = pytest.importorskip("yolov5.utils.segment.general").crop_mask
    values, boxes = drawn(30, (40, 52), dtype)
    if dtype.is_floating_point:
        values[::3, 5] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]).repeat(13).to(dtype)
    for ours, stock in ((masks.ultralytics_crop_mask, theirs), (masks.yolov5_crop_mask, general)):
        for corners in (boxes, boxes[:1], boxes.half(), boxes.nan_to_num(0, 999, -999).long()):
            given, wanted = values.to(device), values.clone()
            found, expected = ours(given, corners.to(device)), stock(wanted, corners)
            assert same(found.cpu(), expected) and same(given.cpu(), wanted)
            assert (found is given) == (expected is wanted)


def test_boxes_may_lie_elsewhere(cuda):
    values, boxes = drawn(9, (20, 20))
    given = values.to(cuda)
    assert masks.ultralytics_crop_mask(given, boxes) is given
    assert torch.equal(given.cpu(), reference.crop(values, boxes, 0))


@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_is_stocks(device, in_place):
    theirs = pytest.importorskip("ultralytics.utils.ops").crop_mask
    values, boxes = (t.to(device) for t in drawn(12, (9, 14)))
    weights = torch.randn_like(values)
    grads = []
    for crop in (masks.ultralytics_crop_mask if in_place else masks.yolov5_crop_mask, theirs):
        leaf = values.clone().requires_grad_()
        cropped = crop(leaf * 2, boxes)
        assert cropped.requires_grad
        grads.append(torch.autograd.grad((cropped.square() * weights).sum(), leaf)[0])
    torch.testing.assert_close(*grads)
    leaf = values[:3, :2, :3].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ops.crop_mask(x, boxes[:3]), leaf)
    assert torch.autograd.gradgradcheck(lambda x: ops.crop_mask(x, boxes[:3]), leaf)


def test_in_place_is_noticed(device):
    """Autograd rejects a saved tensor that crop_mask_ wrote, and crop_mask_ rejects a leaf."""
    values, boxes = (t.to(device) for t in drawn(3, (4, 4)))
    leaf = values.clone().requires_grad_()
    saved = leaf.exp()
    squared = saved.square()
    ops.crop_mask_(saved, boxes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    with pytest.raises(RuntimeError, match="leaf"):
        ops.crop_mask_(leaf, boxes)
    with torch.inference_mode():
        ops.crop_mask_(values.clone(), boxes)


def test_any_strides(device):
    values, boxes = (t.to(device) for t in drawn(12, (10, 16)))
    wanted = ops.crop_mask(values, boxes)
    for view in (
        values.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        torch.zeros(12, 10, 17, device=device)[..., 1:],
    ):
        given = view.copy_(values)
        assert torch.equal(ops.crop_mask(given, boxes.t().contiguous().t()), wanted)
        ops.crop_mask_(given, boxes)
        assert torch.equal(given, wanted)
    empty = torch.zeros(0, 4, 4, device=device)
    assert ops.crop_mask(empty, boxes[:0]).shape == (0, 4, 4)


def test_errors_are_a_sentence(device):
    values, boxes = (t.to(device) for t in drawn(3, (4, 4)))
    for bad, message in (
        ((values[0], boxes), "masks has shape"),
        ((values, boxes[:2]), "four corners for each of 3 masks"),
        ((values.to(torch.complex64), boxes), "masks has dtype complex64"),
        ((values, boxes[0]), "boxes has shape"),
    ):
        for op in (ops.crop_mask, ops.crop_mask_):
            with pytest.raises(RuntimeError, match=message):
                op(*bad)
