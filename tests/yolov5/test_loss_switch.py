"""loss_optim: ComputeLoss where training and validation look for it, and the same training."""

import warnings

import pytest

import torch_fastdet.yolov5 as drop_in
from tests.yolov5 import real
from torch_fastdet.yolov5.loss import ComputeLoss


@pytest.fixture
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.loss", reason="yolov5 is not installed")


def test_is_replaced_and_put_back(stock):
    import yolov5.utils.segment.loss as segment

    theirs, of_segmentation = stock.ComputeLoss, segment.ComputeLoss
    said = drop_in.patch(loss_optim=True)
    try:
        assert stock.ComputeLoss is ComputeLoss
        assert segment.ComputeLoss is of_segmentation, "segmentation keeps its own"
        assert any("yolov5.utils.loss.ComputeLoss" in line for line in said)
    finally:
        drop_in.unpatch()
    assert stock.ComputeLoss is theirs


def test_other_signature_is_an_error(stock, monkeypatch):
    class Changed:
        def __init__(self, model, something_new):
            pass

        def __call__(self, p, targets):
            pass

    Changed.__name__, Changed.__module__ = "ComputeLoss", "yolov5.utils.loss"  # as a fork's file would define it
    monkeypatch.setattr(stock, "ComputeLoss", Changed)
    with pytest.raises(drop_in.SwitchError, match="something_new"):
        drop_in.patch(loss_optim=True)
    assert stock.ComputeLoss is Changed


def test_real_training_gives_the_losses_of_stock(real_yolov5, train):
    """The real train.py and its validation, from one seed: the sums' order differs, carried through eight steps."""
    checkout = real_yolov5("checkout")
    fast, stock = train(checkout, "--loss_optim"), train(checkout, stock=True)
    expected, got = real.results(stock.folder), real.results(fast.folder)
    for column in (f"{split}/{kind}_loss" for split in ("train", "val") for kind in ("box", "obj", "cls")):
        assert got[column] == pytest.approx(expected[column], rel=1e-3, abs=2e-5), column
    assert "utils.loss.ComputeLoss -> torch_fastdet." in fast.output
