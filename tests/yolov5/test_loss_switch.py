"""loss_optim: ComputeLoss where training and validation look for it, and the same training."""

import warnings

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.yolov5 import real
from tests.yolov5.test_compute_loss import Model, make_heads, make_targets
from torch_fastdet.switches.loss.yolov5 import ComputeLoss


@pytest.fixture
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.loss", reason="yolov5 is not installed")


def test_is_replaced_and_put_back(stock):
    theirs = stock.ComputeLoss
    said = drop_in.patch(loss_optim=True)
    try:
        assert stock.ComputeLoss is not theirs and issubclass(ComputeLoss, stock.ComputeLoss)
        assert any("yolov5.utils.loss.ComputeLoss" in line for line in said)
    finally:
        drop_in.unpatch()
    assert stock.ComputeLoss is theirs


def test_a_loss_that_derives_from_stocks_keeps_stocks_code(stock, capsys):
    """Its steps are stock's, which it may override; it goes on after unpatch()."""
    theirs, model = stock.ComputeLoss, Model(classes=2)
    drop_in.patch(loss_optim=True)
    try:

        class Doubled(stock.ComputeLoss):
            def build_targets(self, p, targets):
                self.built = True
                return super().build_targets(p, targets)

        assert type(stock.ComputeLoss(model)) is ComputeLoss
        assert isinstance(stock.ComputeLoss(model), stock.ComputeLoss)
        loss = Doubled(model)
        assert isinstance(loss, stock.ComputeLoss) and issubclass(Doubled, stock.ComputeLoss)
        assert Doubled.__mro__ == (Doubled, theirs, object) and type(Doubled) is type
    finally:
        drop_in.unpatch()
    line = "loss_optim: Doubled derives from yolov5.utils.loss.ComputeLoss, and runs stock's code"
    assert line in capsys.readouterr().err
    heads, targets = make_heads(model, 2, 64), make_targets(5, 2, 2)
    for a, b in zip(loss(heads, targets), theirs(model)(heads, targets)):
        torch.testing.assert_close(a, b)
    assert loss.built


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


@pytest.mark.slow
def test_real_training_gives_the_losses_of_stock(real_yolov5, train):
    """The real train.py and its validation, from one seed: the sums' order differs, carried through eight steps."""
    checkout = real_yolov5("checkout")
    fast, stock = train(checkout, "--loss_optim"), train(checkout, stock=True)
    expected, got = real.results(stock.folder), real.results(fast.folder)
    for column in (f"{split}/{kind}_loss" for split in ("train", "val") for kind in ("box", "obj", "cls")):
        assert got[column] == pytest.approx(expected[column], rel=1e-3, abs=2e-5), column
    assert "utils.loss.ComputeLoss -> torch_fastdet." in fast.output
