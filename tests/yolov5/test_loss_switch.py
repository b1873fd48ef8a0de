"""loss_optim puts ComputeLoss where training and validation look for it, and trains the same."""

import copy
import importlib
import os
import pickle
import warnings

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests import starter
from tests.yolov5 import real
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


WITHOUT = """
import sys
sys.modules["torch_fastdet"] = None  # an import of it raises ImportError
import torch
loss, heads, targets, others, wanted = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(loss(heads, targets, *others)[0], wanted, rtol=1e-4, atol=1e-5)
print(type(loss).__module__)
"""


@pytest.mark.parametrize("of, gamma", [("utils.loss", 0.0), ("utils.segment.loss", 1.5)])
def test_a_pickle_is_stocks(stock, tmp_path, of, gamma):
    """The pickle computes the same without torch_fastdet, and becomes torch_fastdet's again if the switch is on."""
    module = importlib.import_module(f"yolov5.{of}")
    model = Model(classes=2, fl_gamma=gamma, label_smoothing=0.1, cls_pw=1.3, obj_pw=0.8)
    heads, targets, others = make_heads(model, 2, 64), make_targets(5, 2, 2), ()
    if "segment" in of:
        model.model[-1].nm = 4
        heads = [torch.cat([head, head[..., :4]], -1) for head in heads], torch.randn(2, 4, 16, 16)
        others = (torch.zeros(len(targets), 16, 16).bernoulli(0.5),)
    drop_in.patch(loss_optim=True)
    try:
        loss = module.ComputeLoss(model)
        loss.gr = 0.7
        wanted = loss(heads, targets, *others)
        for again in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
            assert isinstance(again, ComputeLoss) and again.gr == 0.7
            torch.testing.assert_close(again(heads, targets, *others), wanted, rtol=0, atol=0)
        torch.save([loss, heads, targets, others, wanted[0]], tmp_path / "loss.pt")
    finally:
        drop_in.unpatch()
    environment = real.with_torch_fastdet(dict(os.environ))
    ran = starter.python(["-c", WITHOUT, str(tmp_path / "loss.pt")], tmp_path, environment, seconds=200, apart=True)
    assert ran.stdout.split() == [f"yolov5.{of}"], ran.stderr


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
