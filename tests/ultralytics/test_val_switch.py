"""val_optim in Ultralytics' validators: which of them get it, and what their metrics are made of."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_fastdet.ultralytics as drop_in
from tests.ops.test_metrics import IOUV, image
from torch_fastdet.ultralytics import validation
from torch_fastdet.ultralytics.validation import confusions


@pytest.fixture
def ultralytics():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        val = pytest.importorskip("ultralytics.models.yolo.detect.val", reason="ultralytics is not installed")
        from ultralytics.utils import metrics
    yield SimpleNamespace(validator=val.DetectionValidator, matrix=metrics.ConfusionMatrix)
    drop_in.unpatch()


def preds(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"bboxes": rows[:, :4], "conf": rows[:, 4], "cls": rows[:, 5], "extra": rows[:, 6:]}


def batch(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cls": labels[:, 0], "bboxes": labels[:, 1:]}


def test_is_replaced_and_put_back(ultralytics):
    names = "update_metrics", "_process_batch"
    before = [vars(ultralytics.validator)[name] for name in names] + [vars(ultralytics.matrix)["process_batch"]]
    said = drop_in.patch(val_optim=True)
    assert sum(line.startswith("val_optim: ultralytics.") for line in said) == 4
    drop_in.unpatch()
    assert before == [vars(ultralytics.validator)[name] for name in names] + [vars(ultralytics.matrix)["process_batch"]]


@pytest.mark.parametrize(("n", "m"), [(50, 9), (0, 3), (3, 0)])
def test_matches_as_stock(ultralytics, device, n, m):
    detections, labels = image(n, m, 1)
    stock = ultralytics.validator._process_batch
    drop_in.patch(val_optim=True)
    ours = ultralytics.validator._process_batch
    assert ours is not stock
    validator = object.__new__(ultralytics.validator)
    validator.iouv, validator.niou = IOUV, 10
    wanted = stock(validator, preds(detections), batch(labels))
    found = ours(validator, preds(detections.to(device)), batch(labels.to(device)))
    assert wanted.keys() == found.keys() and np.array_equal(wanted["tp"], found["tp"])
    assert found["tp"].dtype == wanted["tp"].dtype and found["tp"].shape == wanted["tp"].shape


@pytest.mark.parametrize(("n", "m"), [(50, 9), (0, 3), (3, 0)])
def test_confusion_matrix_is_stocks(ultralytics, device, n, m):
    detections, labels = image(n, m, 2)
    detections = detections[torch.randperm(n)]  # end-to-end heads do not sort
    stock, ours = (ultralytics.matrix(names={i: str(i) for i in range(3)}) for _ in range(2))
    stock.process_batch(preds(detections), batch(labels), conf=0.3)
    drop_in.patch(val_optim=True)
    ours.process_batch(preds(detections.to(device)), batch(labels.to(device)), conf=0.3)
    assert np.array_equal(stock.matrix, ours.matrix)


@pytest.mark.parametrize("rule", ["greedy", "best"])
@pytest.mark.parametrize("labels", [[], [[1.0, 60, 60, 70, 70]]], ids=["none", "far away"])
def test_detections_of_an_image_without_matches_are_false_positives(device, rule, labels):
    """By the rule of 8.4.120 to 8.4.170 too; the operator leaves them out, as YOLOv5 does."""
    rows = torch.tensor([[0.0, 0, 9, 9, 0.9, 1], [20, 20, 29, 29, 0.8, 0], [20, 20, 29, 29, 0.2, 0]], device=device)
    labels = torch.tensor(labels, device=device).reshape(-1, 5)
    found = confusions(rows, labels, 2, 0.25, 0.45, rule)
    assert found.tolist() == [[0, 0, 1], [0, 0, 1], [0, len(labels), 0]]


class Validator:
    """What update_metrics reads of a validator, with tensors that are on the host already."""

    def __init__(self):
        self.device, self.args, self.seen = torch.device("cuda"), SimpleNamespace(single_cls=True), []

    def _process_batch(self, preds, batch):
        raise AssertionError

    def update(self, preds, batch):
        self.seen.append((self.device.type, preds, batch))
        if batch.get("fail"):
            raise RuntimeError("stock failed")


def test_metrics_are_updated_on_the_host():
    update = validation.update_on_host(Validator.update, Validator._process_batch)
    validator = Validator()
    given = [preds(image(n, 3, n)[0]) for n in (4, 0, 7)]
    labels = {"cls": torch.ones(5, 1), "bboxes": torch.rand(5, 4), "batch_idx": torch.zeros(5), "img": object()}
    update(validator, given, labels)
    (device, seen, host) = validator.seen.pop()
    assert device == "cpu" and validator.device.type == "cuda"
    assert host.keys() == labels.keys() and host["img"] is labels["img"]
    for a, b in zip(given, seen):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        assert not a["cls"].any(), "single_cls changes what is plotted later, too"
    with pytest.raises(RuntimeError, match="stock failed"):
        update(validator, given, labels | {"fail": True})
    assert validator.device.type == "cuda"


def test_other_validators_get_stocks():
    class Masks(Validator):
        def _process_batch(self, preds, batch):
            raise AssertionError

    update = validation.update_on_host(Validator.update, Validator._process_batch)
    validator, labels = Masks(), {}
    update(validator, [], labels)
    device, _, seen = validator.seen.pop()
    assert device == "cuda" and seen is labels
