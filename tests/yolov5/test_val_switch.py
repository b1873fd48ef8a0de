"""val_optim: the functions that val.py calls for each image, held against stock's."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.launches import no_sync
from tests.ops.test_metrics import IOUV, image, rectangles
from torch_fastdet.yolov5 import validation


@pytest.fixture
def yolov5():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        val = pytest.importorskip("yolov5.val", reason="yolov5 is not installed")
        from yolov5.utils import general, metrics
    yield type("YOLOv5", (), {"val": val, "general": general, "metrics": metrics})
    drop_in.unpatch()


def test_is_replaced_and_put_back(yolov5):
    before = yolov5.val.process_batch, yolov5.val.ConfusionMatrix, yolov5.val.scale_boxes
    with torch.device("meta"):  # whatever the user's default device is
        said = drop_in.patch(val_optim=True)
    assert yolov5.val.process_batch is validation.process_batch
    assert yolov5.val.scale_boxes is yolov5.general.scale_boxes is validation.scale_boxes
    assert yolov5.val.ConfusionMatrix is yolov5.metrics.ConfusionMatrix is not before[1]
    assert len(said) == len(set(said)) and all(line.startswith("val_optim: ") for line in said)
    drop_in.unpatch()
    assert before == (yolov5.val.process_batch, yolov5.val.ConfusionMatrix, yolov5.val.scale_boxes)


def test_a_rule_of_somebody_elses_is_refused(yolov5, monkeypatch):
    def process_batch(detections, labels, iouv):
        return torch.zeros(len(detections), len(iouv), dtype=torch.bool)

    process_batch = type(process_batch)(process_batch.__code__, vars(yolov5.val), "process_batch")
    monkeypatch.setattr(yolov5.val, "process_batch", process_batch)
    with pytest.raises(drop_in.SwitchError, match="its process_batch of a small case gives"):
        drop_in.patch(val_optim=True)
    assert yolov5.val.process_batch is process_batch


@pytest.mark.parametrize("seed", range(5))
def test_matches_as_stock(yolov5, device, seed):
    detections, labels = image(80, 12, seed)
    wanted = yolov5.val.process_batch(detections, labels, IOUV)
    found = validation.process_batch(detections.to(device), labels.to(device), IOUV.to(device))
    assert found.device.type == device.type and torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("scale", [1, 2])
def test_masks_match_as_stock(yolov5, device, overlap, scale):
    """Masks of labels as large as those of predictions, and half as large."""
    from yolov5.segment import val

    stock = val.process_batch
    drop_in.patch(val_optim=True)
    assert val.process_batch is not stock
    for seed, (n, m) in enumerate(((60, 12), (5, 1))):
        detections, labels = image(n, m, seed)
        truth = rectangles(labels[:, 1:], 160).float()
        if overlap:
            truth = torch.stack([mask * (i + 1) for i, mask in enumerate(truth)]).amax(0)[None]
        masks = rectangles(detections[:, :4], 160).float(), truth[:, ::scale, ::scale]
        wanted = stock(detections, labels, IOUV, *masks, overlap, True)
        inputs = (t.to(device) for t in (detections, labels, IOUV, *masks))
        found = val.process_batch(*inputs, overlap, True)
        assert found.device.type == device.type and torch.equal(found.cpu(), wanted) and (n < 9 or wanted.any())
        assert torch.equal(val.process_batch(detections, labels, IOUV), stock(detections, labels, IOUV))
    drop_in.unpatch()
    assert val.process_batch is stock


def test_confusion_matrix_is_stocks(yolov5, device):
    stock = yolov5.metrics.ConfusionMatrix(3)
    drop_in.patch(val_optim=True)
    ours = yolov5.metrics.ConfusionMatrix(nc=3)
    assert isinstance(ours, yolov5.metrics.ConfusionMatrix)
    for seed in range(5):
        detections, labels = image(40, 7, seed)
        for matrix, where in (stock, "cpu"), (ours, device):
            matrix.process_batch(detections.to(where), labels.to(where))
            matrix.process_batch(None, labels[:, 0].to(where))
        assert np.array_equal(ours.matrix, stock.matrix)
    for a, b in zip(ours.tp_fp(), stock.tp_fp()):
        assert np.array_equal(a, b)
    copied = copy.deepcopy(ours)
    ours.matrix = np.zeros((4, 4))
    assert not ours.matrix.any() and type(copied) is type(stock) and np.array_equal(copied.matrix, stock.matrix)
    drop_in.unpatch()
    assert type(pickle.loads(pickle.dumps(ours))) is type(stock)


def test_confusion_matrix_counts_in_training_after_validation(yolov5, device):
    """Made in inference mode, as val.py makes it, and used outside of it."""
    drop_in.patch(val_optim=True)
    matrix = yolov5.metrics.ConfusionMatrix(3)
    detections, labels = (t.to(device) for t in image(40, 7, 0))
    with torch.inference_mode():
        matrix.process_batch(detections, labels)
    matrix.process_batch(detections, labels)
    assert matrix.matrix.sum() > 0


@pytest.mark.parametrize("ratio_pad", [None, ((0.9, 0.9), (3.25, 1.5))])
def test_boxes_are_scaled_to_the_same_bits(yolov5, device, ratio_pad):
    boxes = torch.rand(30, 6) * 80 - 8
    wanted, found = boxes.clone().to(device), boxes.clone().to(device)
    stock = yolov5.general.scale_boxes((64, 80), wanted[:, :4], (50, 70), ratio_pad)
    ours = validation.scale_boxes((64, 80), found[:, :4], (50, 70), ratio_pad)
    assert torch.equal(ours, stock) and torch.equal(found, wanted)
    arrays = boxes.numpy().copy(), boxes.numpy().copy()
    for scale, array in zip((validation.scale_boxes, yolov5.general.scale_boxes), arrays):
        scale((64, 80), array[:, :4], (50, 70), ratio_pad)
    assert np.array_equal(*arrays)


def test_no_host_sync(cuda):
    detections, labels = (t.to(cuda) for t in image(40, 7, 0))
    iouv = IOUV.to(cuda)
    with no_sync():
        validation.process_batch(detections, labels, iouv)
        validation.scale_boxes((64, 80), detections[:, :4], (50, 70), ((0.9, 0.9), (3.25, 1.5)))
