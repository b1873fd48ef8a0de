"""Compare v8_obb_loss with a float64 oracle of the whole loss of oriented boxes."""

import math

import pytest
import torch

from tests.ops.test_v8_loss import GRADIENT, STRIDES, flat, make_joined
from tests.references import v8_obb as reference
from torch_fastdet import ops

SIZES = [(8, 12), (4, 6)]
ANCHORS = 120
# Near 1 probiou loses digits in float32: it is 1 - exp(-d) of a small d.
LOSS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}


def make_targets(count, batch=2, classes=4):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.7 + 0.05), 1)
    image, label = torch.randint(0, batch, (count, 1)).float(), torch.randint(0, classes, (count, 1)).float()
    return torch.cat((image, label, box, (torch.rand(count, 1) - 0.25) * math.pi), 1)


def settings_on(device="cpu", angle=1.0, **changes):
    return torch.tensor([*ops.v8_loss_settings(**changes), angle], dtype=torch.float64, device=device)


def compare(device, dtype, targets, classes=4, settings=None, class_weights=None, layout=None, **options):
    reg_max = options.get("reg_max", 16)
    boxes, scores = make_joined(2, classes, SIZES, reg_max, dtype, device)
    angles = ((torch.rand(2, 1, ANCHORS) - 0.25) * math.pi).to(device, dtype)
    if layout == "rows":
        boxes, scores, angles = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (boxes, scores, angles))
    elif layout == "sliced":
        boxes, scores, angles = (torch.cat((t, t), 2)[..., :ANCHORS] for t in (boxes, scores, angles))
    leaves = [t.detach().requires_grad_() for t in (boxes, scores, angles)]
    values = settings_on() if settings is None else settings
    parts = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    weights = None if class_weights is None else class_weights.to(device)
    loss, items, status = ops.v8_obb_loss(
        *leaves, targets.to(device), values.to(device), STRIDES[:2], flat(SIZES), class_weights=weights, **options
    )
    assert status.tolist() == [0, 0, 0, 0] and loss.shape == items.shape == (4,)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    want, want_items = reference.v8_obb_loss(
        *exact, SIZES, STRIDES[:2], targets, values.tolist(), class_weights=class_weights, **options
    )
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=LOSS[dtype], atol=LOSS[dtype])
    torch.testing.assert_close(items.cpu().double(), want_items, rtol=LOSS[dtype], atol=LOSS[dtype])
    scale = 1024.0  # GradScaler's: without it half gradients fall below the smallest number
    ours = torch.autograd.grad((loss * parts.to(loss)).sum() * scale, leaves)
    theirs = torch.autograd.grad((want * parts).sum() * scale, exact, allow_unused=True, materialize_grads=True)
    for mine, wanted in zip(ours, theirs):
        error = (mine.cpu().double() - wanted).abs().max()
        assert error <= max(GRADIENT[dtype], 5 * LOSS[dtype]) * wanted.abs().max() + 1e-7
        assert mine.dtype == dtype
    return items


HEADS = [
    pytest.param({}, id="v8"),
    pytest.param({"reg_max": 1}, id="26_one2many"),
    pytest.param({"reg_max": 1, "topk": 7, "topk2": 1}, id="26_one2one"),
    pytest.param({"topk": 10, "topk2": 3, "reg_max": 4}, id="topk2"),
]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_oracle(device, dtype, options):
    assert (compare(device, dtype, make_targets(9), **options) > 0).all()


@pytest.mark.parametrize("layout", ["rows", "sliced"])
def test_layouts_and_class_weights(device, layout):
    compare(device, torch.float32, make_targets(6), layout=layout, class_weights=torch.rand(4) + 0.5)


@pytest.mark.parametrize("count", [0, 1, 30])
def test_numbers_of_targets(device, count):
    items = compare(device, torch.float64, make_targets(count))
    assert count or items[[0, 2, 3]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("turn", [-math.pi / 4, 0.0, math.pi / 2, 3 * math.pi / 4 - 1e-6, 3.0, 50.0])
def test_angles_at_and_beyond_the_borders(device, turn):
    targets = make_targets(5)
    targets[:, 6] = turn
    compare(device, torch.float64, targets)


def test_targets_that_are_left_out(device):
    """Targets with sides below two pixels, or with numbers that sum to 0 or less, the angle included, are left out."""
    good = make_targets(4)
    left_out = torch.tensor(
        [[0, 1, 0.5, 0.5, 1.9 / 96, 0.5, 0], [1, 1, 0.5, 0.5, 0.5, 1.9 / 64, 0], [0, 2, 0.1, 0.1, 0.1, 0.1, -99]]
    )
    compare(device, torch.float64, torch.cat((good[:2], left_out, good[2:])))
    assert float(compare(device, torch.float64, left_out)[0]) == 0


@pytest.mark.parametrize(
    "changes", [{"angle": 3.0}, {"alpha": 1.0, "beta": 2.0}, {"least_side": 40.0}, {"weight": 0.3}]
)
def test_settings(device, changes):
    compare(device, torch.float64, make_targets(6), settings=settings_on(**changes))


def test_padding(device):
    boxes, scores = make_joined(2, 4, SIZES, device=device)
    angles, targets = torch.rand(2, 1, ANCHORS, device=device), make_targets(5).to(device)
    padded = torch.cat((targets, torch.full((4, 7), float("nan"), device=device)))
    used = torch.tensor([5], device=device)
    results = [
        ops.v8_obb_loss(boxes, scores, angles, rows, settings_on(device), STRIDES[:2], flat(SIZES), count)[0]
        for rows, count in ((targets, None), (padded, used))
    ]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_errors():
    boxes, scores = make_joined(2, 4, SIZES)
    good = {
        "angles": torch.zeros(2, 1, ANCHORS),
        "targets": torch.zeros(0, 7),
        "settings": settings_on(),
        "strides": STRIDES[:2],
        "sizes": flat(SIZES),
    }
    for change, message in (
        ({"targets": torch.zeros(0, 6)}, r"v8_obb_loss: targets has shape \[0, 6\], but \(n, 7\) is expected: .*angle"),
        ({"angles": torch.zeros(2, 2, ANCHORS)}, r"v8_obb_loss: angles is float32 of shape \[2, 2, 120\]"),
        ({"settings": settings_on()[:9]}, "v8_obb_loss: settings is float64 of shape .*10 float64 are expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.v8_obb_loss(boxes, scores, **(good | change))
    bad = torch.tensor([[0, 9, 0.5, 0.5, 0.5, 0.5, 0]])
    with pytest.raises(ValueError, match=r"v8_obb_loss: targets row 0, column 1 \(class\) is 9"):
        ops.v8_obb_loss(boxes, scores, **(good | {"targets": bad}))
