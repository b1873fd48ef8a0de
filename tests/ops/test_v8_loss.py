import pytest
import torch
import torch.nn.functional as F

from tests.launches import launched
from tests.references import v8_loss as reference
from torch_fastdet import ops

STRIDES = [8.0, 16.0, 32.0, 64.0]
SIZES = {1: [(5, 7)], 2: [(6, 4), (3, 2)], 3: [(8, 12), (4, 6), (2, 3)], 4: [(16, 16), (8, 8), (4, 4), (2, 2)]}
# The loss is a float32 sum of float32 terms; half-precision gradients are rounded once, by 2^-11 (bfloat16: 2^-8).
LOSS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-6, torch.bfloat16: 3e-6}
GRADIENT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make_targets(count, batch, classes, device="cpu", least=0.02):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.9 + least), 1)
    image = torch.randint(0, batch, (count, 1)).float()
    label = torch.randint(0, classes, (count, 1)).float()
    return torch.cat((image, label, box), 1).to(device)


def make_joined(batch, classes, sizes, reg_max=16, dtype=torch.float32, device="cpu"):
    anchors = sum(ny * nx for ny, nx in sizes)
    boxes = torch.randn(batch, 4 * reg_max, anchors, dtype=torch.float64) * 1.5
    if reg_max == 1:
        boxes = boxes.abs() * 2 + 0.2
    scores = torch.randn(batch, classes, anchors, dtype=torch.float64) * 1.5 - 1
    return [boxes.to(device, dtype), scores.to(device, dtype)]


def per_level(joined, sizes, layout):
    """Return the joined heads as one tensor per level, in the layout that `layout` names."""
    heads = []
    for part, (ny, nx) in zip(torch.cat(joined, 1).split([ny * nx for ny, nx in sizes], 2), sizes):
        head = part.reshape(*part.shape[:2], ny, nx).contiguous()
        if layout == "channels_last":
            head = head.contiguous(memory_format=torch.channels_last)
        elif layout == "sliced":
            head = F.pad(head, (0, 3))[..., :nx]
        heads.append(head)
    return heads


def flat(sizes):
    return [side for size in sizes for side in size]


def settings_on(device="cpu", **changes):
    return torch.tensor(ops.v8_loss_settings(**changes), dtype=torch.float64, device=device)


def join(tensors, sizes):
    """Return gradients of heads in any form as joined boxes and scores, float64 on the CPU."""
    return torch.cat([t.detach().cpu().double().reshape(*t.shape[:2], -1) for t in tensors], 1 if sizes else 2)


def compare(heads, targets, sizes, *, joined=True, settings=None, class_weights=None, scale=1.0, **options):
    """Compare loss, items and gradients with the oracle, at the dtype's tolerance; return its assignment."""
    device, dtype = heads[0].device, heads[0].dtype
    heads = [head.detach().requires_grad_() for head in heads]
    values = settings_on() if settings is None else settings
    strides = STRIDES[: len(sizes)]
    part = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    loss, items, status = ops.v8_loss(
        heads,
        targets.to(device),
        values.to(device),
        strides,
        flat(sizes) if joined else [],
        class_weights=None if class_weights is None else class_weights.to(device),
        **options,
    )
    (loss * part.to(loss)).sum().mul(scale).backward()
    assert loss.shape == items.shape == (3,) and status.tolist() == [0, 0, 0, 0]

    exact = join(heads, joined)
    reg_max = options.get("reg_max", 16)
    boxes, scores = (
        t.contiguous().requires_grad_() for t in exact.split([4 * reg_max, exact.shape[1] - 4 * reg_max], 1)
    )
    want, want_items, assigned = reference.v8_loss(
        boxes, scores, sizes, strides, targets.cpu(), values.tolist(), class_weights=class_weights, **options
    )
    (want * part).sum().mul(scale).backward()
    torch.testing.assert_close(loss.cpu().double(), want.detach(), rtol=LOSS[dtype], atol=LOSS[dtype])
    torch.testing.assert_close(items.cpu().double(), want_items, rtol=LOSS[dtype], atol=LOSS[dtype])
    got = join([head.grad for head in heads], joined)
    for mine, wanted in zip(got.split([4 * reg_max, got.shape[1] - 4 * reg_max], 1), (boxes.grad, scores.grad)):
        wanted = torch.zeros_like(mine) if wanted is None else wanted  # nothing is assigned
        # Target scores of 1e-17 lose their digits in the overlap: below 1e-9, no share of the gradient counts.
        assert (mine - wanted).abs().max() <= GRADIENT[dtype] * wanted.abs().max() + 1e-9
    for head in heads:
        assert head.grad.dtype == head.dtype and head.grad.shape == head.shape
    return assigned


HEADS = [
    pytest.param({}, id="v8"),
    pytest.param({"topk": 7, "topk2": 1}, id="one2one"),
    pytest.param({"reg_max": 1}, id="26_one2many"),
    pytest.param({"reg_max": 1, "topk": 7, "topk2": 1}, id="26_one2one"),
    pytest.param({"topk": 40, "topk2": 40}, id="longer_than_a_warp"),
    pytest.param({"topk": 10, "topk2": 3, "reg_max": 4}, id="topk2"),
]


@pytest.mark.parametrize("options", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_oracle(device, dtype, options):
    heads = make_joined(2, 4, SIZES[3], options.get("reg_max", 16), dtype, device)
    # The scale stands for GradScaler's; without it half-precision gradients underflow.
    assigned = compare(heads, make_targets(13, 2, 4), SIZES[3], scale=1024.0, **options)
    assert sum(map(len, assigned)) > 3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_one_tensor_a_level(device, dtype, layout, weighted):
    heads = per_level(make_joined(2, 8, SIZES[3], 16, dtype), SIZES[3], layout)
    heads = [head.to(device) for head in heads]
    weights = torch.rand(8) + 0.5 if weighted else None
    compare(heads, make_targets(9, 2, 8), SIZES[3], joined=False, scale=1024.0, class_weights=weights)


def test_gradients_lie_as_the_heads_do(device):
    heads = per_level(make_joined(2, 8, SIZES[2]), SIZES[2], "channels_last")
    heads = [head.to(device).requires_grad_() for head in heads]
    ops.v8_loss(heads, make_targets(3, 2, 8, device), settings_on(device), STRIDES[:2], [])[0].sum().backward()
    assert all(head.grad.stride() == head.stride() for head in heads)
    boxes, scores = (t.to(device) for t in make_joined(2, 8, SIZES[2]))
    rows = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (boxes, scores)]
    ops.v8_loss(rows, make_targets(3, 2, 8, device), settings_on(device), STRIDES[:2], flat(SIZES[2]))[
        0
    ].sum().backward()
    assert all(head.grad.stride() == head.stride() for head in rows)


@pytest.mark.parametrize("classes", [1, 2, 3, 80, 131])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_numbers_of_classes_and_levels(device, classes, levels):
    compare(make_joined(1, classes, SIZES[levels], device=device), make_targets(6, 1, classes), SIZES[levels])


@pytest.mark.parametrize("sizes", [[(8, 12), (4, 6)], [(12, 8), (6, 4)]], ids=["64x96", "96x64"])
def test_height_and_width_are_not_confused(device, sizes):
    compare(make_joined(1, 3, sizes, 1, device=device), make_targets(6, 1, 3), sizes, reg_max=1)


@pytest.mark.parametrize("count", [0, 1, 33, 260])
def test_numbers_of_targets(device, count):
    heads = make_joined(3, 2, SIZES[2], dtype=torch.float64, device=device)
    assigned = compare(heads, make_targets(count, 3, 2), SIZES[2])
    assert count == 0 or any(assigned)


@pytest.mark.parametrize(
    "changes", [{"alpha": 1.0, "beta": 2.0}, {"least_side": 40.0}, {"weight": 0.3, "box": 1.0}, {"eps": 0.1}]
)
def test_settings(device, changes):
    heads = make_joined(2, 3, SIZES[3], dtype=torch.float64, device=device)
    compare(heads, make_targets(12, 2, 3, least=0.001), SIZES[3], settings=settings_on(**changes))


def test_least_side_follows_its_setting():
    heads = make_joined(1, 2, SIZES[3], dtype=torch.float64)
    tiny = torch.tensor([[0, 1, 0.52, 0.52, 0.01, 0.01]])
    few = compare(heads, tiny, SIZES[3], settings=settings_on(least_side=1.0))
    more = compare(heads, tiny, SIZES[3], settings=settings_on(least_side=64.0))
    assert len(few[0]) < len(more[0])


def test_rows_in_any_order_give_the_same(device):
    heads = make_joined(3, 4, SIZES[3], device=device)
    targets = make_targets(40, 3, 4, device)
    targets = targets[targets[:, 0].sort(stable=True)[1]]
    mixed = torch.cat([targets[targets[:, 0] == image] for image in (2, 0, 1)])
    args = (settings_on(device), STRIDES[:3], flat(SIZES[3]))
    torch.testing.assert_close(
        ops.v8_loss(heads, mixed, *args)[1], ops.v8_loss(heads, targets, *args)[1], rtol=1e-6, atol=0
    )


def test_padding_is_not_used(device):
    heads = [head.requires_grad_() for head in make_joined(2, 3, SIZES[3], device=device)]
    targets = make_targets(9, 2, 3, device)
    padded = torch.cat((targets, torch.full((50, 6), float("nan"), device=device)))
    args = (settings_on(device), STRIDES[:3], flat(SIZES[3]))
    loss, items, _ = ops.v8_loss(heads, targets, *args)
    loss2, items2, status = ops.v8_loss(heads, padded, *args, torch.tensor([9], device=device))
    torch.testing.assert_close(items2, items, rtol=1e-6, atol=0)
    assert status.tolist() == [0, 0, 0, 0]
    for a, b in zip(torch.autograd.grad(loss.sum(), heads), torch.autograd.grad(loss2.sum(), heads)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


OUTSIDE = [
    pytest.param([0, 1, -0.6, -0.6, 0.2, 0.2], False, id="above_left_of_the_image"),
    pytest.param([0, 1, 1.6, 1.6, 0.2, 0.2], True, id="below_right_of_the_image"),
    pytest.param([0, 1, 0.5, 0.5, 0.0, 0.0], True, id="no_area"),
    pytest.param([0, 1, 0.5, 0.5, 0.0, 0.5], True, id="no_width"),
    pytest.param([0, 1, 0.02, 0.02, 0.5, 0.5], True, id="reaches_over_the_edge"),
    pytest.param([0, 1, float("nan"), 0.5, 0.5, 0.5], False, id="nan"),
    pytest.param([0, 1, 0.5, 0.5, float("inf"), 0.5], False, id="infinite"),
]


@pytest.mark.parametrize("row, counts", OUTSIDE)
def test_boxes_outside_and_without_area(device, row, counts):
    """As in Ultralytics, rows that sum to 0 or less, or to NaN, are left out; all others get the anchors inside."""
    heads = make_joined(1, 3, SIZES[3], dtype=torch.float64, device=device)
    others = make_targets(3, 1, 3)
    targets = torch.cat((others, torch.tensor([row])))
    compare(heads, targets, SIZES[3])
    if not counts:
        args = (settings_on(device), STRIDES[:3], flat(SIZES[3]))
        torch.testing.assert_close(
            ops.v8_loss(heads, targets.to(device), *args)[1], ops.v8_loss(heads, others.to(device), *args)[1]
        )


@pytest.mark.parametrize("which", [0, 1])
def test_nan_predictions(device, which):
    """As in Ultralytics, NaN scores, or a NaN box inside a target, make every part NaN; other NaN boxes do not."""
    targets = torch.tensor([[0, 1, 0.25, 0.25, 0.3, 0.3]], device=device)
    args = (targets, settings_on(device), STRIDES[:3], flat(SIZES[3]))
    inside, outside = 2 * 12 + 2, 7 * 12 + 11
    heads = make_joined(1, 3, SIZES[3], device=device)
    clean = ops.v8_loss(heads, *args)[1]
    heads[which][0, :, outside] = float("nan")
    items = ops.v8_loss(heads, *args)[1]
    if which == 0:
        assert torch.equal(items, clean)
    else:
        assert items[1].isnan() and torch.equal(items[::2], clean[::2])
    heads[which][0, :, inside] = float("nan")
    assert ops.v8_loss(heads, *args)[1].isnan().all()


def test_anchors_that_several_targets_want(device):
    """Each anchor of identical and nested boxes goes to the one that it overlaps most, and to the first of equals."""
    heads = make_joined(1, 4, SIZES[3], dtype=torch.float64, device=device)
    row = torch.tensor([0, 1, 0.5, 0.5, 0.4, 0.5])
    targets = row.repeat(30, 1)
    targets[:, 1] = torch.arange(30) % 4
    targets[10:, 4:] *= 1 + torch.arange(20).view(-1, 1) % 5 * 0.1
    compare(heads, targets, SIZES[3])
    compare(heads, targets, SIZES[3], topk=7, topk2=1)


def test_negative_labels_are_as_in_stock(device):
    """A label of -1 looks up the last class's score and asks for class 0."""
    heads = make_joined(1, 3, SIZES[3], dtype=torch.float64, device=device)
    compare(heads, torch.tensor([[0, -1, 0.5, 0.5, 0.4, 0.5], [0, 2, 0.3, 0.3, 0.4, 0.5]]), SIZES[3])


def test_memory_does_not_grow_with_targets_times_anchors(cuda):
    heads = make_joined(2, 3, [(80, 80), (40, 40), (20, 20)], device=cuda)
    args = (settings_on(cuda), STRIDES[:3], [80, 80, 40, 40, 20, 20])
    peaks = []
    for count in (10, 2010):
        targets = make_targets(count, 2, 3, cuda)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops.v8_loss(heads, targets, *args)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] < 2000 * 1024, "a target costs less than a kilobyte, and 8,400 anchors of float32 33"


def test_repeatable_bit_for_bit(device):
    heads = [head.requires_grad_() for head in make_joined(4, 5, SIZES[3], dtype=torch.float16, device=device)]
    args = (make_targets(300, 4, 5, device), settings_on(device), STRIDES[:3], flat(SIZES[3]))

    def run():
        loss, items, _ = ops.v8_loss(heads, *args)
        return [loss.detach(), items, *torch.autograd.grad(loss.sum() * 512, heads)]

    first = run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def test_one_part_alone_has_a_gradient(device):
    heads = [head.requires_grad_() for head in make_joined(1, 3, SIZES[2], device=device)]
    args = (make_targets(4, 1, 3, device), settings_on(device), STRIDES[:2], flat(SIZES[2]))
    boxes, scores = torch.autograd.grad(ops.v8_loss(heads, *args)[0][1], heads)
    assert boxes.abs().max() == 0 and scores.abs().max() > 0


def sample_call(device, dtype=torch.float32, layout=None):
    heads = make_joined(2, 4, SIZES[2], 16, dtype, device)
    sizes = flat(SIZES[2])
    if layout is not None:
        heads, sizes = per_level(heads, SIZES[2], layout), []
    return [h.requires_grad_() for h in heads], make_targets(5, 2, 4, device), settings_on(device), STRIDES[:2], sizes


BAD_ARGUMENTS = [
    ({"targets": torch.rand(4, 5)}, "image, class, x, y, w, h"),
    ({"targets": torch.rand(4, 6).double()}, "targets is float64"),
    ({"settings": torch.ones(8)}, "settings is float32"),
    ({"settings": torch.ones(7, dtype=torch.float64)}, "but 9 float64 are expected"),
    ({"strides": []}, "strides has 0 levels"),
    ({"strides": [8.0, 0.0]}, "strides has 0, but"),
    ({"sizes": [6, 4]}, "sizes has 2 numbers, but 4 are expected"),
    ({"sizes": [6, 4, 3, 3]}, r"but \(bs, 64, 33\) and \(bs, classes, 33\) are expected"),
    ({"heads": []}, "heads is empty"),
    ({"heads": [torch.rand(1, 68, 6, 4)]}, "1 heads came for 2 strides"),
    ({"heads": [torch.rand(1, 64, 6, 4), torch.rand(1, 64, 3, 2)]}, "is expected"),
    ({"heads": [torch.rand(1, 68, 6, 4), torch.rand(1, 68, 3, 2).half()]}, "one dtype"),
    ({"heads": [torch.ones(1, 64, 30).int(), torch.ones(1, 4, 30).int()]}, "dtype int32"),
    ({"num_targets": torch.ones(2)}, "num_targets is"),
    ({"class_weights": torch.ones(3)}, "but 4 numbers are expected, one a class"),
    ({"topk": 0}, "topk is 0"),
    ({"reg_max": 0}, "reg_max is 0"),
]


@pytest.mark.parametrize("change, sentence", BAD_ARGUMENTS, ids=[sentence for _, sentence in BAD_ARGUMENTS])
def test_bad_arguments(device, change, sentence):
    heads, targets, settings, strides, sizes = sample_call(device)
    arguments = {"heads": heads, "targets": targets, "settings": settings, "strides": strides, "sizes": sizes}
    for name, value in change.items():
        if name == "heads":
            value = [head.to(device) for head in value]
        arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        ops.v8_loss(**arguments)


def test_no_sync_and_few_launches(cuda):
    args = sample_call(cuda, torch.float16)
    ops.v8_loss(*args)[0].sum().backward()

    def step():
        torch.autograd.grad(ops.v8_loss(*args, topk=7, topk2=1)[0], args[0], torch.ones(3, device=cuda))

    names = launched(step)
    assert len(names) <= 12, names


@pytest.mark.sanitizer
def test_small_case_for_the_sanitizer(cuda):
    for layout in ("contiguous", "channels_last", "sliced"):
        heads = [head.to(cuda) for head in per_level(make_joined(2, 4, SIZES[3], 16, torch.float16), SIZES[3], layout)]
        compare(heads, make_targets(40, 2, 4), SIZES[3], joined=False, scale=64.0)
    heads = make_joined(2, 4, SIZES[3], 1, torch.float16, cuda)
    compare(heads, make_targets(40, 2, 4), SIZES[3], reg_max=1, topk=7, topk2=1, scale=64.0)
