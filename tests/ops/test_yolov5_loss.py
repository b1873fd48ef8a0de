import pytest
import torch
import torch.nn.functional as F

from tests.launches import launched
from tests.references import yolov5_loss as reference
from torch_fastdet import ops

ANCHORS = torch.tensor(
    [
        [[10, 13], [16, 30], [33, 23]],
        [[30, 61], [62, 45], [59, 119]],
        [[116, 90], [156, 198], [373, 326]],
        [[436, 615], [739, 380], [925, 792]],
    ]
) / torch.tensor([8.0, 16.0, 32.0, 64.0]).view(4, 1, 1)
BALANCE = torch.tensor([4.0, 1.0, 0.25, 0.06], dtype=torch.float64)
# Loss and items are float32 sums of float32 terms, so they agree with float64 to a few units of 2^-23 times the growth
# of the terms. A half-precision gradient is rounded once, by 2^-11 (bfloat16: 2^-8) of itself.
LOSS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}
GRADIENT = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make_targets(count, batch, classes, device="cpu"):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.8 + 0.02), 1)
    image = torch.randint(0, batch, (count, 1)).float()
    label = torch.randint(0, classes, (count, 1)).float()
    return torch.cat((image, label, box), 1).to(device)


def make_heads(batch, classes, sizes, device="cpu", dtype=torch.float32, layout="anchor_rows"):
    """Return random leaf heads; `layout` names their memory layout and number of dimensions."""
    heads = []
    no = 5 + classes
    for ny, nx in sizes:
        head = torch.randn(batch, 3, ny, nx, no, device=device, dtype=torch.float64).mul(1.5).to(dtype)
        if layout == "cell_rows":  # the 5-D view of a channels_last head
            head = head.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        elif layout == "planes":  # the 5-D view of a contiguous head
            head = head.permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2)
        elif layout in ("4d", "4d_channels_last"):
            head = head.permute(0, 1, 4, 2, 3).reshape(batch, 3 * no, ny, nx)
            if layout == "4d_channels_last":
                head = head.contiguous(memory_format=torch.channels_last)
        elif layout == "longer_cell_rows":  # the 5-D view of a channels_last head with channels behind its own
            rows = head.permute(0, 2, 3, 1, 4).reshape(batch, ny, nx, 3 * no)
            rows = F.pad(rows, (0, 5))[..., : 3 * no]
            head = rows.view(batch, ny, nx, 3, no).permute(0, 3, 1, 2, 4)
        elif layout == "4d_of_more_channels":
            rows = head.permute(0, 2, 3, 1, 4).reshape(batch, ny, nx, 3 * no)
            head = F.pad(rows, (0, 5))[..., : 3 * no].permute(0, 3, 1, 2)
        elif layout == "sliced":
            head = F.pad(head, (0, 3))[..., :no]
        elif layout == "odd_permutation":
            head = head.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
        heads.append(head.detach().requires_grad_())
    return heads


def five_dimensional(tensor):
    if tensor.dim() == 5:
        return tensor
    batch, channels, ny, nx = tensor.shape
    return tensor.reshape(batch, 3, channels // 3, ny, nx).permute(0, 1, 3, 4, 2)


SIZES = {1: [(5, 7)], 3: [(16, 12), (8, 6), (4, 3)], 4: [(16, 16), (8, 8), (4, 4), (2, 2)]}
OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"fl_gamma": 1.5}, id="focal"),
    pytest.param({"fl_gamma": 0.5, "label_smoothing": 0.1, "cls_pw": 1.4, "obj_pw": 0.6}, id="focal_weights_smoothing"),
    pytest.param({"label_smoothing": 0.1, "cls_pw": 2.0, "obj_pw": 3.0}, id="weights_smoothing"),
    pytest.param({"gr": 0.3, "sort_obj_iou": True}, id="gr_sorted"),
    pytest.param({"box": 0.1, "obj": 0.7, "cls": 0.2, "anchor_t": 2.0}, id="gains"),
]


def compare(heads, targets, options=None, scale=1.0, anchors=ANCHORS):
    """Compare loss, items and gradients with the oracle, at the dtype's tolerance."""
    options = options or {}
    levels = len(heads)
    device, dtype = heads[0].device, heads[0].dtype
    anchors = anchors[:levels]
    loss, items, objectness, status = ops.yolov5_loss(heads, targets, anchors.to(device), BALANCE.to(device), **options)
    (loss * scale).backward()

    exact = [five_dimensional(head.detach().cpu()).double().requires_grad_() for head in heads]
    want_loss, want_items, want_objectness = reference.yolov5_loss(
        exact, targets.cpu(), anchors, BALANCE[:levels], **options
    )
    (want_loss * scale).backward()
    assert loss.shape == (1,) and items.shape == (3,) and objectness.shape == (levels,)
    assert status.tolist() == [0, 0, 0, 0]
    tolerance = LOSS[dtype]
    torch.testing.assert_close(loss.cpu().double(), want_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(items.cpu().double(), want_items, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(objectness.cpu().double(), want_objectness, rtol=tolerance, atol=tolerance)
    for head, want in zip(heads, exact):
        assert head.grad.dtype == head.dtype and head.grad.shape == head.shape
        difference = (five_dimensional(head.grad.cpu()).double() - want.grad).abs().max()
        assert difference <= GRADIENT[dtype] * want.grad.abs().max(), difference
    return loss


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_oracle(device, dtype, options):
    # The scale stands for GradScaler's; without it half-precision gradients underflow.
    compare(make_heads(2, 4, SIZES[3], device, dtype), make_targets(13, 2, 4, device), options, scale=1024.0)


def test_an_anchor_that_is_nan_matches_nothing(device):
    """An anchor with one or two NaN sides fails every comparison, as in YOLOv5."""
    anchors = ANCHORS.clone()
    anchors[0, 0, 0] = anchors[1, 1, 1] = anchors[2, 2] = float("nan")
    compare(make_heads(2, 4, SIZES[3], device), make_targets(40, 2, 4, device), anchors=anchors)


LONGER = {"longer_cell_rows": "cell_rows", "4d_of_more_channels": "4d_channels_last"}


@pytest.mark.parametrize(
    "layout", ["anchor_rows", "cell_rows", "planes", "4d", "4d_channels_last", "sliced", "odd_permutation", *LONGER]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_layouts(device, dtype, layout):
    heads = make_heads(2, 3, SIZES[3], device, dtype, layout)
    compare(heads, make_targets(9, 2, 3, device), scale=1024.0)
    # autograd makes head.grad contiguous where the head has gaps, so compare the raw gradients.
    loss = ops.yolov5_loss(heads, make_targets(9, 2, 3, device), ANCHORS.to(device)[:3], BALANCE.to(device))[0]
    dense = make_heads(2, 3, SIZES[3], device, dtype, LONGER.get(layout, layout))
    for gradient, head in zip(torch.autograd.grad(loss, heads), dense):
        if layout not in ("sliced", "odd_permutation"):
            assert gradient.stride() == head.stride(), "the gradient lies as the head does, without its gaps"


@pytest.mark.parametrize("layout", ["anchor_rows", "cell_rows", "planes"])
@pytest.mark.parametrize("classes", [1, 2, 3, 11, 80, 131, 300])
def test_numbers_of_classes(device, classes, layout):
    # Rows of 6 to 305 elements have vectors of two, one or no objectness, and more classes than a warp takes at once.
    compare(
        make_heads(1, classes, [(3, 5)], device, torch.float16, layout), make_targets(6, 1, classes, device), scale=64.0
    )


@pytest.mark.parametrize("levels", [1, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 31, 33])
def test_numbers_of_targets_and_levels(device, count, levels):
    compare(make_heads(3, 2, SIZES[levels], device), make_targets(count, 3, 2, device))


def test_large_odd_grid(device):
    # Every kernel runs several blocks, none of them full.
    heads = make_heads(1, 3, [(67, 41)], device, torch.float16, "planes")
    compare(heads, make_targets(40, 1, 3, device), scale=4096.0)
    compare(make_heads(1, 3, [(67, 41)], device, torch.float16), make_targets(40, 1, 3, device), scale=4096.0)


@pytest.mark.parametrize("sort_obj_iou", [False, True])
def test_shared_cells(device, sort_obj_iou):
    """Box and class gradients of targets in one cell add up; the objectness follows one of them."""
    targets = make_targets(3, 1, 4, device).repeat_interleave(15, 0)
    targets[:, 1] = torch.arange(45, device=device) % 4
    targets[:, 4:] *= 1 + torch.arange(45, device=device).view(-1, 1) % 5 * 0.2
    compare(make_heads(1, 4, SIZES[3], device, torch.float64), targets, {"sort_obj_iou": sort_obj_iou})


@pytest.mark.parametrize(
    "x, y",
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (0.5, 0.5),
        (0.25, 0.75),
        (1 / 16, 15 / 16),
        (0.03125, 0.96875),
        (1.0, 0.4),
        (0.999999, 0.1),
    ],
)
def test_grid_lines_and_edges(device, x, y):
    # On a grid line a target goes to both neighbors; at x = 1 its cell is the last one and its center at offset 1.
    targets = torch.tensor([[0, 1, x, y, 0.2, 0.3], [0, 0, y, x, 0.1, 0.1]], device=device)
    compare(make_heads(1, 2, [(16, 16), (8, 8), (4, 4)], device, torch.float64), targets)


@pytest.mark.parametrize("sort_obj_iou", [False, True])
@pytest.mark.parametrize(
    "box",
    [
        (0.4, -0.03, 0.2, 0.3),
        (-0.03, 0.4, 0.2, 0.3),
        (-0.1, -0.2, 0.3, 0.2),
        (-3.0, 0.5, 0.2, 0.2),
        (1.3, 2.5, 0.2, 0.2),
        (0.3, 0.3, -0.2, 0.2),
    ],
)
def test_boxes_outside_the_image(device, box, sort_obj_iou):
    # YOLOv5 assigns boxes outside, which a user's own loader may give, to the nearest cell.
    targets = torch.tensor([[0, 1, *box], [0, 0, 0.4, 0.6, 0.2, 0.3]], device=device)
    compare(make_heads(1, 2, SIZES[3], device, torch.float64), targets, {"sort_obj_iou": sort_obj_iou})


def test_images_and_classes_are_truncated(device):
    targets = torch.tensor([[-0.4, 1.9, 0.4, 0.6, 0.2, 0.3], [0.9, -0.9, 0.3, 0.3, 0.2, 0.2]], device=device)
    compare(make_heads(1, 2, SIZES[3], device, torch.float64), targets)


def test_one_match_sorted(device):
    # YOLOv5 fails here because its squeeze leaves a 0-d tensor to sort.
    targets = torch.tensor([[0, 0, 0.09, 0.09, 0.3, 0.3]], device=device)
    compare(make_heads(1, 2, [(5, 7)], device, torch.float64), targets, {"sort_obj_iou": True, "anchor_t": 1.3})


def test_padding_is_not_used(device):
    heads = make_heads(2, 3, SIZES[3], device)
    targets = make_targets(9, 2, 3, device)
    padded = torch.cat((targets, torch.full((5, 6), float("nan"), device=device)))
    args = (ANCHORS[:3].to(device), BALANCE.to(device))
    loss, items, _, _ = ops.yolov5_loss(heads, targets, *args)
    gradients = torch.autograd.grad(loss, heads)
    loss2, items2, _, status = ops.yolov5_loss(heads, padded, *args, num_targets=torch.tensor([9], device=device))
    gradients2 = torch.autograd.grad(loss2, heads)
    torch.testing.assert_close(items2, items, rtol=1e-6, atol=0)
    assert status.tolist() == [0, 0, 0, 0]
    for a, b in zip(gradients, gradients2):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_gradcheck(device):
    heads = make_heads(1, 2, [(3, 4), (2, 2)], device, torch.float64)
    targets = make_targets(3, 1, 2, device)
    anchors, balance = ANCHORS[2:].to(device), BALANCE.to(device)

    def box_and_class(*heads):
        # The objectness target is a constant in the gradient but not in the difference quotient.
        return ops.yolov5_loss(list(heads), targets, anchors, balance, obj=0.0, anchor_t=20.0, label_smoothing=0.1)[0]

    def objectness(*heads):
        # With gr = 0 the target is 1 wherever there is a match.
        return ops.yolov5_loss(
            list(heads), targets, anchors, balance, box=0.0, cls=0.0, gr=0.0, anchor_t=20.0, fl_gamma=1.5, obj_pw=1.3
        )[0]

    assert torch.autograd.gradcheck(objectness, heads)
    # CIoU's weight alpha is constant in the gradient too, so only the class part of the first is a true derivative.
    for head in heads:
        head.requires_grad_(False)
    rest = [head[..., 5:].clone().requires_grad_() for head in heads]
    assert torch.autograd.gradcheck(
        lambda *classes: box_and_class(*(torch.cat((head[..., :5], c), -1) for head, c in zip(heads, classes))), rest
    )


def test_repeatable_bit_for_bit(device):
    heads = make_heads(4, 5, SIZES[3], device, torch.float16)
    targets = make_targets(300, 4, 5, device)
    args = (targets, ANCHORS[:3].to(device), BALANCE.to(device))

    def run():
        loss, items, _, _ = ops.yolov5_loss(heads, *args)
        return [loss.detach(), items, *torch.autograd.grad(loss * 512, heads)]

    first = run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def test_no_grad_and_integer_free_outputs(device):
    heads = make_heads(2, 3, SIZES[3], device, torch.float16)
    with torch.no_grad():
        loss, items, _, _ = ops.yolov5_loss(
            heads, make_targets(4, 2, 3, device), ANCHORS[:3].to(device), BALANCE.to(device)
        )
    assert not loss.requires_grad and not items.requires_grad and loss.dtype == items.dtype == torch.float32


def test_only_one_head_needs_a_gradient(device):
    heads = make_heads(1, 3, SIZES[3], device)
    heads[0].requires_grad_(False)
    loss, items, _, _ = ops.yolov5_loss(
        heads, make_targets(4, 1, 3, device), ANCHORS[:3].to(device), BALANCE.to(device)
    )
    assert loss.requires_grad and not items.requires_grad
    loss.backward()
    assert heads[0].grad is None and heads[1].grad is not None


def sample_call(device, dtype=torch.float32, layout="anchor_rows"):
    heads = make_heads(2, 3, [(4, 6), (2, 3)], device, dtype, layout)
    return (heads, make_targets(5, 2, 3, device), ANCHORS[:2].to(device), BALANCE.to(device))


BAD_ARGUMENTS = [
    ({"anchors": ANCHORS[:3]}, "anchors has shape"),
    ({"anchors": ANCHORS[:2, :2].clone()}, "has 3 anchors"),
    ({"anchors": ANCHORS[:2].double()}, "anchors is float64"),
    ({"targets": torch.rand(4, 5)}, "image, class, x, y, w, h"),
    ({"targets": torch.rand(4, 6).double()}, "targets is float64"),
    ({"balance": torch.ones(1, dtype=torch.float64)}, "balance is"),
    ({"heads": []}, "0 heads came"),
    ({"heads": [torch.rand(1, 3, 4, 4, 5), torch.rand(1, 3, 2, 2, 5)]}, "at least 6"),
    ({"heads": [torch.rand(1, 3, 4, 4, 8), torch.rand(2, 3, 2, 2, 8)]}, "has batch 2"),
    ({"heads": [torch.rand(1, 3, 4, 4, 8), torch.rand(1, 3, 2, 2, 8).half()]}, "one dtype"),
    ({"heads": [torch.rand(1, 25, 4, 4), torch.rand(1, 25, 4, 4)]}, "multiple of the 3 anchors"),
    ({"heads": [torch.rand(3, 4, 8), torch.rand(3, 2, 8)]}, "na, ny, nx, no. or .bs, na.no, ny, nx. is expected"),
    ({"heads": [torch.rand(0, 3, 4, 4, 8), torch.rand(0, 3, 2, 2, 8)]}, "empty head"),
    ({"heads": [torch.ones(1, 3, 4, 4, 8).int(), torch.ones(1, 3, 2, 2, 8).int()]}, "dtype int32"),
    ({"num_targets": torch.ones(2)}, "num_targets is"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ({"anchor_t": -1.0}, "anchor_t is -1"),
]


@pytest.mark.parametrize("change, sentence", BAD_ARGUMENTS, ids=[sentence for _, sentence in BAD_ARGUMENTS])
def test_bad_arguments(device, change, sentence):
    heads, targets, anchors, balance = sample_call(device)
    arguments = {"heads": heads, "targets": targets, "anchors": anchors, "balance": balance}
    for name, value in change.items():
        if isinstance(value, list):
            value = [head.to(device) for head in value]
        arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises((RuntimeError, ValueError), match=sentence):
        ops.yolov5_loss(**arguments)


@pytest.mark.alone
def test_no_sync_and_few_launches(cuda):
    heads, targets, anchors, balance = sample_call(cuda, torch.float16)
    ops.yolov5_loss(heads, targets, anchors, balance)[0].backward()
    names = launched(lambda: ops.yolov5_loss(heads, targets, anchors, balance)[0].backward())
    assert len(names) <= 15, names


@pytest.mark.sanitizer
def test_small_case_for_the_sanitizer(cuda):
    for layout in ("anchor_rows", "planes"):
        compare(
            make_heads(2, 4, [(9, 7), (4, 3)], cuda, torch.float16, layout), make_targets(40, 2, 4, cuda), scale=64.0
        )
