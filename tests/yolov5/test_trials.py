"""A fork that has changed the loss or the average under the original names keeps its own."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tools import canary
from torch_fastdet.ema import ModelEMA as OurModelEMA
from torch_fastdet.switches.bbox_iou.common import bbox_iou, iou
from torch_fastdet.switches.loss import yolov5_trial as losses
from torch_fastdet.switches.nms.trial import DECODING, SUPPRESSION
from torch_fastdet.switches.optimizer.trial import moving_average

TRIALS = Path(__file__).parents[1] / "ultralytics/programs/trials.py"
IOU, AVERAGE = iou(bbox_iou, "YOLOv5 7.0"), moving_average(OurModelEMA, "YOLOv5 7.0")


@pytest.fixture
def loss():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.loss", reason="yolov5 is not installed")


def test_stocks_are_ours_and_nothing_is_drawn(loss):
    from yolov5.utils import general
    from yolov5.utils.torch_utils import ModelEMA

    state = torch.get_rng_state()
    for default in ("cpu", "meta"):  # whatever the user's default is
        with torch.device(default):
            assert losses.trial_of(losses.ComputeLoss).obstacle(loss.ComputeLoss) is AVERAGE.obstacle(ModelEMA) is None
            assert IOU.obstacle(loss.bbox_iou) is SUPPRESSION.obstacle(general.non_max_suppression) is None
    assert torch.equal(state, torch.get_rng_state())
    assert "its non_max" in SUPPRESSION.obstacle(
        lambda *a, **k: general.non_max_suppression(*a, **{**k, "agnostic": True})
    )
    assert "its non_max" in SUPPRESSION.obstacle(lambda x, c, i, **k: general.non_max_suppression(x, c, 0.5, **k))
    assert "its bbox_iou" in IOU.obstacle(lambda *a, **k: loss.bbox_iou(*a, **{**k, "CIoU": False}))
    assert "its moving average" in AVERAGE.obstacle(lambda *a, **k: ModelEMA(*a, tau=1999, **k))


def test_targets_share_no_cell(loss):
    """If targets shared a cell, the original's result would depend on the order of its writes."""
    heads = losses.heads()
    compute = loss.ComputeLoss(losses.ModelLike(losses.OPTIONS[0]))
    _, _, indices, _ = compute.build_targets(heads, torch.tensor(losses.TARGETS))
    for level in indices:
        cells = list(zip(*(part.tolist() for part in level)))
        assert len(cells) > 4 and len(set(cells)) == len(cells)


@pytest.fixture
def trials(real_yolov5):
    """Return the obstacles that the small cases of all switches find in a layout of YOLOv5, or in the checkout in a folder."""

    def run(layout, folder=None):
        real = real_yolov5(layout)
        real = real if folder is None else dataclasses.replace(real, folder=folder)
        said = real.python("-c", f"import sys; sys.path.insert(0, '.')\n{TRIALS.read_text()}", "yolov5").stdout
        return json.loads(said.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["package", "head"])
def test_trials_accept_both_layouts(trials, layout):
    found = trials(layout)
    assert len(found) == 12 and not any(found.values()), found


@pytest.mark.nightly
def test_trials_accept_the_newest_commit(trials):
    """The newest commit has no process_mask_upsample, which no script of YOLOv5 called."""
    if (checkout := canary.head()) is None:
        pytest.skip("git does not reach YOLOv5")
    found = trials("checkout", checkout)
    assert found.keys() == trials("package").keys() - {"process_mask_upsample"} and not any(found.values()), found


CHANGES = {
    "another IoU": lambda loss: setattr(
        loss, "bbox_iou", lambda *a, bbox_iou=loss.bbox_iou, **k: bbox_iou(*a, GIoU=True)
    ),
    "another gain": lambda loss: setattr(loss, "smooth_BCE", lambda eps: (0.9 - eps, 0.1)),
    "another hyperparameter": lambda loss: setattr(loss, "smooth_BCE", lambda eps: {}["nwd"]),
    "another focal loss": lambda loss: setattr(loss, "FocalLoss", loss.QFocalLoss),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_loss_stays(loss, monkeypatch, change, capsys):
    for name in ("bbox_iou", "smooth_BCE", "FocalLoss"):
        monkeypatch.setattr(loss, name, getattr(loss, name))  # put back afterwards
    CHANGES[change](loss)
    stock = loss.ComputeLoss
    try:
        with pytest.raises(
            drop_in.SwitchError, match=r"loss_optim cannot apply: its ComputeLoss (of a small|cannot be)"
        ):
            drop_in.patch(loss_optim=True)
        drop_in.patch(fastdet=True, nms_optim=False, loader_optim=False)
        assert loss.ComputeLoss is stock
        assert capsys.readouterr().err.count("loss_optim does not apply: its ComputeLoss") == 1
    finally:
        drop_in.unpatch()


def test_a_changed_detect_decodes_as_before_and_suppression_is_ours(loss, monkeypatch, capsys):
    from yolov5.models.yolo import Detect
    from yolov5.utils import general

    assert DECODING.obstacle(Detect) is None
    stock = Detect._make_grid

    def make_grid(self, *arguments):
        grid, anchors = stock(self, *arguments)
        return grid, anchors * 1.5

    monkeypatch.setattr(Detect, "_make_grid", make_grid)
    forward, suppression = Detect.forward, general.non_max_suppression
    try:
        drop_in.patch(nms_optim=True)
        assert Detect.forward is forward and general.non_max_suppression is not suppression
        assert capsys.readouterr().err.count("Detect.forward stays: its Detect of a small case gives") == 1
    finally:
        drop_in.unpatch()
