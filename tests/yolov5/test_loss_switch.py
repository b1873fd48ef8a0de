"""loss_optim puts ComputeLoss where training and validation look for it, and trains the same."""

import copy
import importlib
import pickle
import warnings

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.yolov5.test_compute_loss import Model, make_heads, make_targets
from torch_fastdet.patching.replace import SwitchError
from torch_fastdet.switches.loss.yolov5 import ComputeLoss


@pytest.fixture
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.loss", reason="yolov5 is not installed")


def test_a_loss_that_derives_from_stocks_keeps_stocks_code(stock, capsys):
    """The subclass may override steps of the original. It continues to work after unpatch()."""
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
    line = "loss_optim: Doubled derives from yolov5.utils.loss.ComputeLoss, and runs the original code"
    assert line in capsys.readouterr().err
    heads, targets = make_heads(model, 2, 64), make_targets(5, 2, 2)
    for a, b in zip(loss(heads, targets), theirs(model)(heads, targets)):
        torch.testing.assert_close(a, b)
    assert loss.built


@pytest.mark.parametrize("of, gamma", [("utils.loss", 0.0), ("utils.segment.loss", 1.5)])
def test_a_pickle_of_stocks_becomes_ours(stock, of, gamma):
    module = importlib.import_module(f"yolov5.{of}")
    model = Model(classes=2, fl_gamma=gamma, label_smoothing=0.1, cls_pw=1.3, obj_pw=0.8)
    heads, targets, others = make_heads(model, 2, 64), make_targets(5, 2, 2), ()
    if "segment" in of:
        model.model[-1].nm = 4
        heads = [torch.cat([head, head[..., :4]], -1) for head in heads], torch.randn(2, 4, 16, 16)
        others = (torch.zeros(len(targets), 16, 16).bernoulli(0.5),)
    theirs = module.ComputeLoss(model)
    theirs.gr = 0.7
    wanted, data = theirs(heads, targets, *others)[0], pickle.dumps(theirs)
    drop_in.patch(loss_optim=True)
    try:
        loss, made = pickle.loads(data), module.ComputeLoss(model)
    finally:
        drop_in.unpatch()
    made.gr = 0.7
    for again in (loss, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(again, ComputeLoss) and again.gr == 0.7
        torch.testing.assert_close(again(heads, targets, *others)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_name", [False, True])
def test_hyperparameters_that_choose_another_loss(stock, monkeypatch, capsys, by_name):
    """A fork's hyp.yaml may name the IoU of its boxes, which a trial without it does not show."""
    theirs = stock.ComputeLoss

    class Changed(theirs):
        def __call__(self, p, targets):
            loss, items = super().__call__(p, targets)
            return (loss * 2 if self.hyp.get("iou_type") == "SIoU" else loss), items

    Changed.__name__, Changed.__qualname__, Changed.__module__ = "ComputeLoss", "ComputeLoss", theirs.__module__
    monkeypatch.setattr(stock, "ComputeLoss", Changed)
    usual, chosen = Model(classes=2), Model(classes=2)
    chosen.hyp = {**chosen.hyp, "iou_type": "SIoU"}
    drop_in.patch(**({"loss_optim": True} if by_name else {}))
    try:
        assert type(stock.ComputeLoss(usual)) is ComputeLoss
        if by_name:
            with pytest.raises(SwitchError, match="its ComputeLoss with the hyperparameters of this training"):
                stock.ComputeLoss(chosen)
        else:
            assert type(stock.ComputeLoss(chosen)) is Changed
            assert "loss_optim does not apply: its ComputeLoss with the hyperparameters" in capsys.readouterr().err
    finally:
        drop_in.unpatch()


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
