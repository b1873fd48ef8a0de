"""Compare SegmentationLoss with the segmentation ComputeLoss of the installed yolov5 package."""

import warnings

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.yolov5.test_compute_loss import Model, make_targets, without_shared_cells
from torch_fastdet.switches.loss.yolov5 import SegmentationLoss

CLASSES, CHANNELS = 4, 32


@pytest.fixture(scope="module")
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.segment.loss", reason="yolov5 is not installed")


def make_model(device="cpu", **options):
    model = Model(classes=CLASSES, device=device, **options)
    model.model[-1].nm = CHANNELS
    return model


def make(model, seed=0, count=20, batch=4, size=(128, 96), overlap=True, ratio=4, device="cpu"):
    torch.manual_seed(seed)
    height, width = size
    targets = make_targets(count, batch, CLASSES)
    targets = targets[targets[:, 0].argsort(stable=True)]
    if torch.device(device).type == "cuda":
        targets = without_shared_cells(targets)
    heads = [
        torch.randn(batch, 3, height // int(s), width // int(s), 5 + CLASSES + CHANNELS, device=device).requires_grad_()
        for s in model.model[-1].stride
    ]
    protos = torch.randn(batch, CHANNELS, height // 4, width // 4, device=device).requires_grad_()
    shape = (height // ratio, width // ratio)
    masks = torch.randint(0, 8, (batch, *shape)) if overlap else torch.randint(0, 2, (len(targets), *shape))
    return (heads, protos), targets.to(device), masks.float().to(device)


def assert_same(stock, model, given, overlap=True, autobalance=False):
    results = []
    for kind in (stock, SegmentationLoss):
        loss, items = kind(model, autobalance, overlap)(*given)
        (heads, protos), _, _ = given
        leaves = [*heads, protos]
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        results.append((loss.detach(), items, gradients))
    (want, want_items, theirs), (loss, items, ours) = results
    assert loss.shape == want.shape and loss.dtype == want.dtype and not items.requires_grad
    torch.testing.assert_close(
        items, want_items, rtol=1e-5, atol=1e-6, msg=f"items {items.tolist()}, stock's {want_items.tolist()}"
    )
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for mine, wanted in zip(ours, theirs):
        assert (mine is None) == (wanted is None)
        if wanted is None:
            continue
        assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-9


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_same_as_stock(stock, device, overlap, seed):
    model = make_model(device)
    assert_same(stock.ComputeLoss, model, make(model, seed, overlap=overlap, device=device), overlap)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_masks_of_any_size(stock, overlap, ratio):
    model = make_model()
    assert_same(stock.ComputeLoss, model, make(model, 4, overlap=overlap, ratio=ratio), overlap)


@pytest.mark.parametrize("options", [{"fl_gamma": 1.5}, {"label_smoothing": 0.1, "cls_pw": 1.5}, {"box": 0.2}], ids=str)
def test_settings(stock, options):
    model = make_model(**options)
    assert_same(stock.ComputeLoss, model, make(model, 5), autobalance=True)


@pytest.mark.parametrize("count", [0, 1, 120])
def test_numbers_of_targets(stock, count):
    model = make_model()
    assert_same(stock.ComputeLoss, model, make(model, 6, count))


def test_targets_without_a_match(stock):
    """No gradient reaches the prototypes: with a gradient of zero, momentum and weight decay would change their layers."""
    model = make_model(anchor_t=0.5)
    assert_same(stock.ComputeLoss, model, make(model, 6))


def test_boxes_at_the_borders_and_masks_that_vanish(stock):
    model = make_model()
    preds, targets, masks = make(model, 7)
    targets[0, 2:] = torch.tensor([0.0, 1.0, 0.5, 0.5])
    targets[1, 2:] = torch.tensor([0.5, 0.5, 1.0, 1.0])
    targets[2, 2:] = torch.tensor([0.25, 0.75, 0.25, 0.5])  # its edges lie on pixels
    assert_same(stock.ComputeLoss, model, (preds, targets, masks))
    assert_same(stock.ComputeLoss, model, (preds, targets, torch.zeros_like(masks)))


def test_boxes_outside_and_of_no_area(stock):
    """Polygons outside the image, of two points or on a line leave such boxes behind."""
    model = make_model()
    preds, targets, masks = make(model, 9)
    targets[0, 2:] = torch.tensor([0.5, 0.5, 0.4, 0.0])
    targets[1, 2:] = torch.tensor([0.999, 0.001, 0.1, 0.1])
    targets[2, 2:] = torch.tensor([0.4, 0.6, 1e-3, 1e-3])
    assert_same(stock.ComputeLoss, model, (preds, targets, masks))


@pytest.mark.parametrize("part", ["protos", "coefficients", "boxes", "scores"])
def test_nan_predictions_give_what_stock_gives(stock, part):
    model = make_model()
    (heads, protos), targets, masks = make(model, 10)
    columns = {"boxes": slice(0, 4), "scores": slice(4, -CHANNELS), "coefficients": slice(-CHANNELS, None)}
    for tensor in (protos,) if part == "protos" else [head[..., columns[part]] for head in heads]:
        tensor.detach().fill_(float("nan"))
    (want, want_items), (loss, items) = (
        kind(model, overlap=True)((heads, protos), targets, masks) for kind in (stock.ComputeLoss, SegmentationLoss)
    )
    torch.testing.assert_close((loss, items), (want, want_items), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert loss.isnan().all()


def test_bad_targets_and_arguments(stock):
    model = make_model()
    (heads, protos), targets, masks = make(model, 8)
    loss = SegmentationLoss(model, overlap=True)
    targets[3, 1] = CLASSES
    with pytest.raises(ValueError, match=r"targets row 3, column 1 \(class\) is 4"):
        loss((heads, protos), targets, masks)
    with pytest.raises(TypeError, match="SegmentationLoss: preds is not"):
        loss(heads, targets, masks)
    with pytest.raises(RuntimeError, match="outputs an anchor"):
        loss(([head[..., 1:] for head in heads], protos), targets, masks)
    with pytest.raises(TypeError, match="YOLOv5's Segment is expected"):
        SegmentationLoss(Model(classes=CLASSES))


def test_another_loss_keeps_its_own(stock, monkeypatch, caplog):
    """The loss of detection is replaced nevertheless."""
    single = stock.ComputeLoss.single_mask_loss
    monkeypatch.setattr(stock.ComputeLoss, "single_mask_loss", lambda self, *args: 1.01 * single(self, *args))
    import yolov5.utils.loss as detection

    theirs, of_detection = stock.ComputeLoss, detection.ComputeLoss
    drop_in.patch(loss_optim=True)
    try:
        assert stock.ComputeLoss is theirs and detection.ComputeLoss is not of_detection
    finally:
        drop_in.unpatch()
