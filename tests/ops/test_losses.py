"""Test what the losses over raw heads and rows of targets share: YOLOv5's and those of Ultralytics' detectors."""

from typing import Any, NamedTuple

import pytest
import torch

from tests.ops import test_v8_loss, test_yolov5_loss
from torch_fastdet import ops


class Loss(NamedTuple):
    """Hold an operator that returns the loss first and the status last."""

    call: Any
    fault: Any
    sample: Any  # the arguments: heads, five rows of targets, and others


LOSSES = {
    "yolov5": Loss(ops.yolov5_loss, ops.yolov5_loss_fault, test_yolov5_loss.sample_call),
    "v8": Loss(ops.v8_loss, ops.v8_loss_fault, test_v8_loss.sample_call),
}
NAN = float("nan")
BAD_ROWS = [
    *[(loss, 0, value, "an image index") for loss in LOSSES for value in (2.0, -1.0, NAN)],
    *[("yolov5", 1, value, "a class index") for value in (3.0, -1.0)],
    *[("v8", 1, value, "a class index") for value in (4.0, -5.0, NAN)],
    *[("yolov5", 2 + i, value, "a finite number") for i, value in enumerate([-torch.inf, NAN, torch.inf, -torch.inf])],
]


@pytest.fixture(params=LOSSES)
def loss(request):
    return LOSSES[request.param]


@pytest.mark.parametrize("name, column, value, sentence", BAD_ROWS)
def test_bad_row(device, name, column, value, sentence):
    loss = LOSSES[name]
    heads, targets, *rest = loss.sample(device)
    bad = targets.clone()
    bad[3, column] = value
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"targets row 3, column {column} .*{sentence}"):
            loss.call(heads, bad, *rest)
        return
    got, *_, status = loss.call(heads, bad, *rest)
    assert status.tolist()[0] == 1 and loss.fault(status.tolist()) == (3, column)
    good = torch.cat((targets[:3], targets[4:]))
    torch.testing.assert_close(got, loss.call(heads, good, *rest)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("claimed", [7, -1])
def test_num_targets_that_is_no_number_of_rows(device, loss, claimed):
    args = (*loss.sample(device), torch.tensor([claimed], device=device))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"num_targets is {claimed}, but targets has 5 rows"):
            loss.call(*args)
    else:
        assert loss.call(*args)[-1].tolist() == [0, 0, claimed - 5, 0]
