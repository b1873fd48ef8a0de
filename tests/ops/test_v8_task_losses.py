"""Compare v8_segmentation_loss and v8_pose_loss with float64 oracles: the task's parts after v8_loss's assignment."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_v8_loss import STRIDES, flat, make_joined, make_targets, settings_on
from tests.references import v8_loss as reference
from torch_fastdet import ops

SIZES = [(8, 12), (4, 6), (2, 3)]
HEIGHT, WIDTH = 64, 96
# The loss is a float32 sum of float32 terms; half-precision gradients are rounded once, relative to the largest.
LOSS = {torch.float64: 1e-7, torch.float32: 5e-6, torch.float16: 5e-6, torch.bfloat16: 5e-6}
GRADIENT = {torch.float64: 1e-7, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PARTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.7], dtype=torch.float64)


def sorted_targets(count, batch, classes=4):
    rows = make_targets(count, batch, classes)
    return rows[rows[:, 0].argsort(stable=True)]


def exact_leaves(tensors):
    return [t.detach().cpu().double().requires_grad_() for t in tensors]


def compare(got, tensors, want, exact, dtype):
    """Compare losses and gradients; the oracle's are with respect to `exact`, the operator's to `tensors`."""
    loss, items, status = got
    parts = PARTS[: len(loss)]
    assert status.tolist() == [0, 0, 0, 0] and loss.shape == items.shape == want.shape
    torch.testing.assert_close(items.cpu().double(), want.detach(), rtol=LOSS[dtype], atol=LOSS[dtype])
    batch = len(exact[0])
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach() * batch, rtol=LOSS[dtype], atol=LOSS[dtype])
    scale = 1024.0  # GradScaler's: without it half gradients fall below the smallest number
    ours = torch.autograd.grad((loss * parts.to(loss)).sum() * scale, tensors)
    theirs = torch.autograd.grad((want * parts).sum() * batch * scale, exact, allow_unused=True)
    for tensor, mine, wanted in zip(tensors, ours, theirs):
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        wanted = torch.zeros_like(mine, dtype=torch.float64, device="cpu") if wanted is None else wanted
        assert (mine.cpu().double() - wanted).abs().max() <= GRADIENT[dtype] * wanted.abs().max() + 1e-7


def base(targets, exact, **options):
    """Return the oracle's detection parts (box, class, distance), and which target got which anchor."""
    loss, _, assignments = reference.v8_loss(*exact[:2], SIZES, STRIDES[:3], targets, settings_on().tolist(), **options)
    return loss / len(exact[0]), assignments


def segmentation(
    device, dtype, targets, overlap=True, masks=None, channels=32, size=(16, 24), layout=None, batch=2, **kw
):
    heads = make_joined(batch, 4, SIZES, 16, dtype, device)
    coefficients = (torch.randn(batch, channels, 126) * 0.4).to(device, dtype)
    protos = torch.randn(batch, channels, *size).to(device, dtype)
    if layout == "channels_last":
        protos = protos.contiguous(memory_format=torch.channels_last)
        coefficients = coefficients.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "sliced":
        protos, coefficients = F.pad(protos, (0, 3))[..., : size[1]], F.pad(coefficients, (2, 1))[..., 2:-1]
    if masks is None:
        most = max(1, int(targets[:, 0].long().bincount().max()) if len(targets) else 1)
        masks = torch.randint(0, most + 2, (batch, *size)) if overlap else torch.randint(0, 2, (len(targets), *size))
    tensors = [t.detach().requires_grad_() for t in (*heads, coefficients, protos)]
    got = ops.v8_segmentation_loss(
        tensors[:2],
        *tensors[2:],
        masks.to(device),
        targets.to(device),
        settings_on(device),
        STRIDES[:3],
        flat(SIZES),
        overlap=overlap,
        **kw,
    )
    return got, tensors, masks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [None, "channels_last", "sliced"])
def test_masks_match_oracle(device, dtype, overlap, layout):
    targets = sorted_targets(9, 2)
    got, tensors, masks = segmentation(device, dtype, targets, overlap, layout=layout)
    exact = exact_leaves(tensors)
    detection, assignments = base(targets, exact)
    item = reference.mask_loss(exact[2], exact[3], masks, targets, assignments, HEIGHT, WIDTH, 7.5, overlap=overlap)
    assert item > 0
    compare(got, tensors, torch.stack((detection[0], item, *detection[1:])), exact, dtype)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk, topk2, size", [(10, 10, (16, 24)), (7, 1, (16, 24)), (12, 3, (32, 20))])
def test_compared_masks_match_oracle(device, dtype, overlap, topk, topk2, size):
    """This is YOLO26's assignment; the last case has masks of another size than the prototypes, soft without overlap.

    Half precision is left out because PyTorch rounds the enlarged prototypes there.
    """
    size = size if dtype in (torch.float32, torch.float64) else (16, 24)
    targets = sorted_targets(9, 2)
    masks = None
    if size != (16, 24):
        masks = torch.randint(0, 6, (2, *size)) if overlap else torch.rand(9, *size)
    got, tensors, masks = segmentation(
        device, dtype, targets, overlap, masks, topk=topk, topk2=topk2, compare_masks=True
    )
    exact = exact_leaves(tensors)
    fixed = [t.detach() for t in exact[2:]]
    iou = reference.mask_overlap(*fixed, masks, targets, HEIGHT, overlap=overlap)
    detection, assignments = base(targets, exact, topk=topk, topk2=topk2, mask_iou=iou)
    _, plain = base(targets, exact, topk=topk, topk2=topk2)
    assert assignments != plain, "masks change the assignment"
    protos = exact[3]
    if size != (16, 24):
        protos = F.interpolate(protos, size, mode="bilinear", align_corners=False)
    item = reference.mask_loss(exact[2], protos, masks, targets, assignments, HEIGHT, WIDTH, 7.5, overlap=overlap)
    compare(got, tensors, torch.stack((detection[0], item, *detection[1:])), exact, dtype)


@pytest.mark.parametrize("count", [0, 1])
def test_compared_masks_of_few_targets(device, count):
    got, *_ = segmentation(device, torch.float32, sorted_targets(count, 2), compare_masks=True, topk2=1)
    assert got[0].isfinite().all() and (got[1] > 0).tolist()[0::2] == [count > 0, True]


@pytest.mark.parametrize("channels", [1, 31, 33, 128])
@pytest.mark.parametrize("size", [(16, 24), (7, 65)], ids=str)
def test_channels_and_sizes(device, channels, size):
    targets = sorted_targets(5, 2)
    got, tensors, masks = segmentation(device, torch.float32, targets, channels=channels, size=size)
    exact = exact_leaves(tensors)
    detection, assignments = base(targets, exact)
    item = reference.mask_loss(exact[2], exact[3], masks, targets, assignments, HEIGHT, WIDTH, 7.5)
    compare(got, tensors, torch.stack((detection[0], item, *detection[1:])), exact, torch.float32)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("overlap", [True, False])
def test_dtypes_of_masks(device, dtype, overlap):
    targets = sorted_targets(3, 2)
    shape = (2 if overlap else 3, 16, 24)
    masks = torch.randint(0, 2, shape)
    torch.manual_seed(3)
    want, _, _ = segmentation(device, torch.float32, targets, overlap, masks.float())
    torch.manual_seed(3)
    got, _, _ = segmentation(device, torch.float32, targets, overlap, masks.to(dtype))
    assert torch.equal(want[0], got[0])


def test_no_targets_in_the_batch_or_in_an_image(device):
    for targets in (torch.zeros(0, 6), torch.tensor([[1.0, 2, 0.5, 0.5, 0.4, 0.6]])):
        got, tensors, masks = segmentation(device, torch.float32, targets)
        exact = exact_leaves(tensors)
        detection, assignments = base(targets, exact)
        item = reference.mask_loss(exact[2], exact[3], masks, targets, assignments, HEIGHT, WIDTH, 7.5)
        compare(got, tensors, torch.stack((detection[0], item, *detection[1:])), exact, torch.float32)
        assert (len(targets) == 0) == (float(got[1][1]) == 0)


def test_masks_of_another_size(device):
    """The prototypes are enlarged to the size of the masks."""
    targets = sorted_targets(5, 2)
    masks = torch.randint(0, 4, (2, 32, 48))
    got, tensors, _ = segmentation(device, torch.float32, targets, masks=masks)
    exact = exact_leaves(tensors)
    detection, assignments = base(targets, exact)
    large = F.interpolate(exact[3], (32, 48), mode="bilinear", align_corners=False)
    item = reference.mask_loss(exact[2], large, masks, targets, assignments, HEIGHT, WIDTH, 7.5)
    compare(got, tensors, torch.stack((detection[0], item, *detection[1:])), exact, torch.float32)


def test_padding_and_unsorted_rows(device):
    targets = sorted_targets(6, 2)
    torch.manual_seed(4)
    want, _, masks = segmentation(device, torch.float32, targets)
    padded = torch.cat((targets, torch.full((5, 6), float("nan"))))
    torch.manual_seed(4)
    segmentation(device, torch.float32, targets)  # draws the same masks
    torch.manual_seed(4)
    got, _, _ = segmentation(device, torch.float32, padded, masks=masks, num_targets=torch.tensor([6], device=device))
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    # Rows may come in any order: a target is its image's k-th in that order.
    order = torch.tensor([5, 0, 4, 1, 3, 2])
    moved = targets[order]
    renumbered = torch.zeros_like(masks)
    for b in range(2):
        old = [i for i in range(6) if targets[i, 0] == b]
        new = [int(order[i]) for i in range(6) if moved[i, 0] == b]
        for number, row in enumerate(new):
            renumbered[b][masks[b] == old.index(row) + 1] = number + 1
    torch.manual_seed(4)
    again, _, _ = segmentation(device, torch.float32, moved, masks=renumbered)
    torch.testing.assert_close(again[0], want[0], rtol=1e-6, atol=1e-6)


def test_nothing_as_large_as_positives_times_pixels():
    """The operator keeps nothing of that size for the backward pass."""
    heads = make_joined(1, 4, SIZES)
    _, _, _, anchor, row, _, _ = torch.ops.torch_fastdet.v8_loss(
        heads, make_targets(50, 1, 4), settings_on(), STRIDES[:3], flat(SIZES)
    )
    protos, coefficients = torch.randn(1, 32, 160, 160), torch.randn(1, 32, 126)
    result = torch.ops.torch_fastdet.v8_mask_loss(
        coefficients, protos, torch.zeros(1, 160, 160), make_targets(50, 1, 4), settings_on(), anchor, row, [64, 96]
    )
    assert sum(t.numel() for t in result) <= 50 * 10 * (32 + 4) + 10


def pose(device, dtype, targets, columns=3, label_columns=3, count=5, batch=2, keypoints=None, **kw):
    heads = make_joined(batch, 4, SIZES, 16, dtype, device)
    predictions = (torch.randn(batch, count * columns, 126)).to(device, dtype)
    if keypoints is None:
        visible = torch.randint(0, 3, (len(targets), count, 1)).float()
        keypoints = torch.cat((torch.rand(len(targets), count, 2), visible), 2)[..., :label_columns]
    sigmas = torch.rand(count) * 0.3 + 0.05
    tensors = [t.detach().requires_grad_() for t in (*heads, predictions)]
    got = ops.v8_pose_loss(
        tensors[:2],
        tensors[2],
        keypoints.to(device),
        sigmas.to(device),
        targets.to(device),
        settings_on(device),
        torch.tensor([12.0, 1.5], dtype=torch.float64, device=device),
        STRIDES[:3],
        flat(SIZES),
        **kw,
    )
    return got, tensors, keypoints, sigmas


@pytest.mark.parametrize("columns, label_columns", [(3, 3), (2, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("count", [1, 17, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keypoints_match_oracle(device, dtype, count, columns, label_columns):
    targets = sorted_targets(8, 2)
    got, tensors, keypoints, sigmas = pose(device, dtype, targets, columns, label_columns, count)
    exact = exact_leaves(tensors)
    detection, assignments = base(targets, exact)
    items = reference.keypoint_loss(exact[2], keypoints, sigmas, targets, assignments, SIZES, STRIDES[:3], (12.0, 1.5))
    assert items[0] > 0 and bool(items[1] > 0) == (columns == 3)
    compare(got, tensors, torch.cat((detection[:1], items, detection[1:])), exact, dtype)


@pytest.mark.parametrize("label_columns", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk, topk2", [(10, 10), (7, 1), (12, 3)])
def test_compared_keypoints_match_oracle(device, dtype, label_columns, topk, topk2):
    """This is YOLO26's assignment. One target has no visible keypoint, and the last one fills the image."""
    targets = sorted_targets(8, 2)
    targets[-1, 2:] = torch.tensor([0.5, 0.5, 0.95, 0.95])
    keypoints = torch.cat((targets[:, None, 2:4] + torch.rand(8, 5, 2) * 0.2 - 0.1, torch.ones(8, 5, 1)), 2)
    keypoints[2, :, 2] = 0
    keypoints[3, :3, 2] = 0
    got, tensors, keypoints, sigmas = pose(
        device, dtype, targets, 3, label_columns, 5, keypoints=keypoints[..., :label_columns],
        topk=topk, topk2=topk2, compare_keypoints=True,
    )  # fmt: skip
    exact = exact_leaves(tensors)
    oks = reference.keypoint_similarity(exact[2].detach(), keypoints, sigmas, targets, SIZES, STRIDES[:3])
    detection, assignments = base(targets, exact, topk=topk, topk2=topk2, similarity=oks)
    assert assignments != base(targets, exact, topk=topk, topk2=topk2)[1], "keypoints change the assignment"
    items = reference.keypoint_loss(
        exact[2], keypoints, sigmas, targets, assignments, SIZES, STRIDES[:3], (12.0, 1.5), centered=True
    )
    compare(got, tensors, torch.cat((detection[:1], items, detection[1:])), exact, dtype)


def test_invisible_keypoints_and_no_targets(device):
    one = torch.tensor([[1.0, 2, 0.5, 0.5, 0.4, 0.6]])
    for targets, keypoints in ((torch.zeros(0, 6), torch.zeros(0, 5, 3)), (one, torch.zeros(1, 5, 3))):
        got, tensors, keypoints, sigmas = pose(device, torch.float32, targets, keypoints=keypoints)
        exact = exact_leaves(tensors)
        detection, assignments = base(targets, exact)
        items = reference.keypoint_loss(
            exact[2], keypoints, sigmas, targets, assignments, SIZES, STRIDES[:3], (12.0, 1.5)
        )
        compare(got, tensors, torch.cat((detection[:1], items, detection[1:])), exact, torch.float32)
        assert float(got[1][1]) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"protos": torch.zeros(2, 31, 16, 24)}, r"v8_mask_loss: coefficients has shape \[2, 32, 126\] and protos"),
        (
            {"protos": torch.zeros(2, 32, 16, 24).double()},
            "v8_mask_loss: protos is float64, but coefficients is float32",
        ),
        ({"masks": torch.zeros(3, 16, 24)}, "v8_mask_loss: masks has 3 images, but protos has 2"),
        ({"coefficients": torch.zeros(2, 129, 126), "protos": torch.zeros(2, 129, 16, 24)}, "has 129 channels"),
    ],
)
def test_errors_of_masks(change, message):
    given = {
        "coefficients": torch.zeros(2, 32, 126),
        "protos": torch.zeros(2, 32, 16, 24),
        "masks": torch.zeros(2, 16, 24),
    } | change
    with pytest.raises(RuntimeError, match=message):
        ops.v8_segmentation_loss(
            make_joined(2, 4, SIZES), targets=torch.zeros(0, 6), settings=settings_on(), strides=STRIDES[:3],
            sizes=flat(SIZES), **given,
        )  # fmt: skip


def test_without_overlap_one_mask_a_row_is_expected():
    with pytest.raises(RuntimeError, match="masks has 2 masks, but targets has 1 rows"):
        segmentation("cpu", torch.float32, torch.tensor([[0, 1, 0.5, 0.5, 0.5, 0.5]]), False, torch.zeros(2, 16, 24))


def test_errors_of_keypoints():
    one = torch.tensor([[0, 1, 0.5, 0.5, 0.5, 0.5]])
    with pytest.raises(
        RuntimeError, match=r"v8_keypoint_loss: labels is float32 of shape \[2, 5, 3\], but float32 of shape \(1,"
    ):
        pose("cpu", torch.float32, one, keypoints=torch.zeros(2, 5, 3))
    with pytest.raises(
        RuntimeError, match=r"v8_keypoint_loss: predictions has shape \[2, 15, 126\], but \(bs, 8 or 12, 126\)"
    ):
        pose("cpu", torch.float32, one, keypoints=torch.zeros(1, 4, 3))


class ImageSizes(TorchDispatchMode):
    """Record the image sizes that v8_mask_loss gets."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.torch_fastdet.v8_mask_loss.default:
            self.found.append(args[7])
        return func(*args, **(kwargs or {}))


def test_an_image_size_is_whole_pixels():
    """The size is rounded: 320 / 12 as float32, times 12 cells, is a little less than 320."""
    stride = torch.tensor(320 / 12).item()
    assert stride * 12 < 320
    tensors = [*make_joined(2, 4, [(12, 12)]), torch.randn(2, 8, 144), torch.randn(2, 8, 28, 28), torch.ones(2, 28, 28)]
    with ImageSizes() as sizes:
        ops.v8_segmentation_loss(tensors[:2], *tensors[2:], sorted_targets(9, 2), settings_on(), [stride], [12, 12])
    assert sizes.found == [[320, 320]]
