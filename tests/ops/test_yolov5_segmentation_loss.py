"""Compare yolov5_segmentation_loss, on the masks of yolov5_loss' matches, with a float64 oracle."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.test_yolov5_loss import ANCHORS, BALANCE, GRADIENT, SIZES, make_targets
from tests.references import yolov5_loss as reference
from torch_fastdet import ops

# The loss is a float32 sum of float32 terms. Both compute the share of the image that a box covers in float32; the
# operator also multiplies it by the number of matches in float32.
LOSS = {torch.float64: 1e-7, torch.float32: 5e-6, torch.float16: 5e-6, torch.bfloat16: 5e-6}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CLASSES, CHANNELS = 3, 8


def make(device, dtype, layout="copied", batch=2, size=(32, 24), channels=CHANNELS):
    """Return leaf heads and prototypes."""
    heads = []
    for ny, nx in SIZES[3]:
        head = torch.randn(batch, 3, ny, nx, 5 + CLASSES + channels, dtype=torch.float64).to(device, dtype)
        if layout == "views":  # of a channels_last convolution
            head = head.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        heads.append(head.requires_grad_())
    protos = torch.randn(batch, channels, *size).to(device, dtype)
    if layout == "views":
        protos = protos.contiguous(memory_format=torch.channels_last)
    return heads, protos.requires_grad_()


def sorted_targets(count, batch=2):
    targets = make_targets(count, batch, CLASSES)
    return targets[targets[:, 0].argsort(stable=True)]


def make_masks(targets, overlap, size=(32, 24), batch=2):
    return torch.randint(0, 6, (batch, *size)) if overlap else torch.randint(0, 2, (len(targets), *size))


def run(heads, protos, masks, targets, overlap, **options):
    device = protos.device
    return ops.yolov5_segmentation_loss(
        heads, protos, masks.to(device), targets.to(device), ANCHORS[:3].to(device), BALANCE.to(device),
        overlap=overlap, **options,
    )  # fmt: skip


def compare(heads, protos, masks, targets, overlap, **options):
    dtype = protos.dtype
    loss, items, objectness, status = run(heads, protos, masks, targets, overlap, **options)
    scale = 1024.0  # GradScaler's: without it half gradients fall below the smallest number
    ours = torch.autograd.grad(loss.sum() * scale, [*heads, protos])
    exact = [t.detach().cpu().double().requires_grad_() for t in (*heads, protos)]
    want, want_items, _ = reference.yolov5_loss(
        [head[..., : 5 + CLASSES] for head in exact[:-1]], targets, ANCHORS[:3], BALANCE[:3], **options
    )
    masks = F.interpolate(masks[:, None].double(), protos.shape[2:], mode="nearest")[:, 0]
    item = reference.mask_loss(exact[:-1], exact[-1], masks, targets, ANCHORS[:3], overlap=overlap, **options)
    assert status.tolist() == [0, 0, 0, 0] and loss.shape == (1,) and items.shape == (4,) and objectness.shape == (3,)
    want_items = torch.cat((want_items[:1], item.detach().view(1), want_items[1:]))
    want = want + item * len(protos)
    torch.testing.assert_close(items.cpu().double(), want_items, rtol=LOSS[dtype], atol=LOSS[dtype])
    torch.testing.assert_close(loss.detach().cpu().double(), want.detach(), rtol=LOSS[dtype], atol=LOSS[dtype])
    for mine, wanted in zip(ours, torch.autograd.grad(want.sum() * scale, exact)):
        assert (mine.cpu().double() - wanted).abs().max() <= GRADIENT[dtype] * wanted.abs().max() + 1e-7
    return items


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", ["copied", "views"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_oracle(device, dtype, layout, overlap):
    targets = sorted_targets(9)
    items = compare(*make(device, dtype, layout), make_masks(targets, overlap), targets, overlap)
    assert items[1] > 0


@pytest.mark.parametrize("channels, size", [(1, (7, 65)), (33, (16, 16)), (128, (5, 4))], ids=str)
def test_channels_and_sizes(device, channels, size):
    targets = sorted_targets(5)
    heads, protos = make(device, torch.float32, size=size, channels=channels)
    compare(heads, protos, make_masks(targets, True, size), targets, True)


def test_masks_of_another_size_and_gains(device):
    targets = sorted_targets(6)
    heads, protos = make(device, torch.float32)
    compare(heads, protos, make_masks(targets, True, (70, 48)), targets, True, box=0.2, anchor_t=2.5)


def test_targets_that_share_anchors(device):
    """Each match of an anchor counts, in its gradient too."""
    targets = sorted_targets(1).repeat(5, 1)
    targets[:, 2:] += torch.rand(5, 4) * 1e-3
    compare(*make(device, torch.float32), make_masks(targets, True), targets, True)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("overlap", [True, False])
def test_images_without_targets(device, count, overlap):
    targets = sorted_targets(count)
    items = compare(*make(device, torch.float32), make_masks(targets, overlap), targets, overlap)
    assert (items[1] == 0) == (count == 0)


def test_padding_and_bad_rows(device):
    targets = sorted_targets(6)
    heads, protos = make(device, torch.float32)
    masks = make_masks(targets, True)
    want = run(heads, protos, masks, targets, True)
    padded = torch.cat((targets, torch.full((5, 6), float("nan"))))
    got = run(heads, protos, masks, padded, True, num_targets=torch.tensor([6], device=device))
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    targets[2, 1] = CLASSES
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"targets row 2, column 1 \(class\) is 3"):
            run(heads, protos, masks, targets, True)
    else:
        assert run(heads, protos, masks, targets, True)[3][0] == 1


def test_nan_stays_in_its_part(device):
    targets = sorted_targets(4)
    heads, protos = make(device, torch.float32)
    with torch.no_grad():
        protos.fill_(float("nan"))
    items = run(heads, protos, make_masks(targets, True), targets, True)[1]
    assert items.isnan().tolist() == [False, True, False, False]


def test_errors():
    targets = sorted_targets(2)
    heads, protos = make("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="yolov5_mask_loss: masks has 3 masks, but targets has 2 rows"):
        run(heads, protos, torch.zeros(3, 32, 24), targets, False)
    with pytest.raises(RuntimeError, match="yolov5_segmentation_loss: a head has shape"):
        run([head.flatten(1, 2) for head in heads], protos, torch.zeros(2, 32, 24), targets, True)
    with pytest.raises(TypeError, match="yolov5_segmentation_loss: masks is a list"):
        ops.yolov5_segmentation_loss(heads, protos, [], targets, ANCHORS[:3], BALANCE)
    with pytest.raises(RuntimeError, match="a second derivative was asked for"):
        first = torch.autograd.grad(
            run(heads, protos, torch.zeros(2, 32, 24), targets, True)[0].sum(), [protos], create_graph=True
        )
        first[0].sum().backward()
