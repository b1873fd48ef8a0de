"""Outputs of Detect as captured steps have them, against Ultralytics' own."""

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.bn_act_models import Operators
from torch_fastdet.graphs._casts import weights_cast_once
from torch_fastdet.layers import bn_act
from torch_fastdet.layers.joint import JOINED, OF_ONE_INPUT
from torch_fastdet.ultralytics.heads import heads_in_rows

tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)


def make(name, device="cpu"):
    model = tasks.DetectionModel(name, nc=4, verbose=False).to(device, memory_format=torch.channels_last).train()
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, epochs=4)
    return model


def outputs(preds):
    return [part[name] for part in (preds.values() if "one2many" in preds else [preds]) for name in ("boxes", "scores")]


@pytest.mark.parametrize("name, kind", [("yolov8n.yaml", "v8DetectionLoss"), ("yolo26n.yaml", "E2ELoss")])
def test_values_and_gradients(device, same_convolutions, name, kind):
    from torch_fastdet.ultralytics import loss as losses

    model, images = make(name, device), torch.rand(2, 3, 64, 96, device=device)
    targets = torch.tensor([[0, 1, 0.4, 0.5, 0.3, 0.4], [1, 3, 0.6, 0.5, 0.5, 0.3]], device=device)
    runs = []
    for inside in (True, False):
        own = copy.deepcopy(model)
        loss = getattr(losses, kind)(own)
        if inside:
            with heads_in_rows(own):
                preds = own(images)
        else:
            preds = own(images)
        assert "forward_head" not in vars(own.model[-1])
        found = outputs(preds)
        assert all((t.stride(1) == 1 and t.stride(2) == t.shape[1]) == inside for t in found)
        value, _ = loss(preds, targets)
        gradients = torch.autograd.grad(
            value.sum(), [p for p in own.parameters() if p.requires_grad], allow_unused=True
        )
        runs.append((found, [g for g in gradients if g is not None]))
    (mine, my_gradients), (theirs, their_gradients) = runs
    assert len(mine) == len(theirs) and len(my_gradients) == len(their_gradients) > 100
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    for a, b in zip(my_gradients, their_gradients):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def test_what_is_left_to_stock(monkeypatch):
    def takes(model):
        with heads_in_rows(model):
            return "forward_head" in vars(model.model[-1])

    model = make("yolov8n.yaml")
    assert takes(model)
    assert not takes(copy.deepcopy(model).eval())
    assert not takes(copy.deepcopy(model).to(memory_format=torch.contiguous_format))
    assert not takes(
        tasks.SegmentationModel("yolov8n-seg.yaml", verbose=False).to(memory_format=torch.channels_last).train()
    )
    detect = type(model.model[-1])
    stock = detect.forward_head
    monkeypatch.setattr(
        detect, "forward_head", lambda self, x, box_head=None, cls_head=None: stock(self, x[::-1], box_head, cls_head)
    )
    assert not takes(model)


def share_a_branch(detect):
    detect.cv2[1], detect.cv3[1] = detect.cv2[0], copy.deepcopy(detect.cv3[0])


CHANGES = {
    "nothing": (lambda detect: None, 3),
    "a hook on a branch": (lambda detect: detect.cv2[0].register_forward_hook(lambda *_: None), 2),
    "a hook on a block": (lambda detect: detect.cv3[1][0].register_forward_hook(lambda *_: None), 2),
    "another first block": (lambda detect: detect.cv3[2].__setitem__(0, torch.nn.Sequential(detect.cv3[2][0])), 2),
    "frozen boxes": (lambda detect: detect.cv2.requires_grad_(False), 0),
    "another momentum": (lambda detect: setattr(detect.cv2[0][0].bn, "momentum", 0.5), 2),
    "one branch for two levels": (share_a_branch, 1),
}


@pytest.mark.parametrize("change, joined", CHANGES.values(), ids=CHANGES)
def test_first_convolutions_of_a_level_are_one(device, same_convolutions, monkeypatch, change, joined):
    """Where both branches begin with the same kind of block. All others are called as stock calls them."""
    block = type(make("yolov8n.yaml").model[0])
    monkeypatch.setattr(block, "forward", bn_act.conv_forward(block.forward))
    monkeypatch.setattr(bn_act, "DEVICES", ("cpu", "cuda"))
    detect = make("yolov8n.yaml").model[-1]
    change(detect)
    channels = [branch[0].conv.in_channels for branch in detect.cv2]
    model = torch.nn.Module()
    model.model = torch.nn.Sequential(detect.to(device, memory_format=torch.channels_last)).train()
    x = [torch.randn(2, c, 8, 8, device=device).contiguous(memory_format=torch.channels_last) for c in channels]
    runs = []
    for inside in (False, True):
        own, operators = copy.deepcopy(model), Operators()
        with operators, torch.autocast(device.type, torch.bfloat16):
            if inside:
                with heads_in_rows(own), weights_cast_once(own, torch.bfloat16):
                    preds = own.model[-1](list(x))
            else:
                preds = own.model[-1](list(x))
        assert not OF_ONE_INPUT and not JOINED
        runs.append((operators.joined, preds["boxes"], preds["scores"]))
    assert [run[0] for run in runs] == [0, joined]
    for stock, mine in zip(runs[0][1:], runs[1][1:]):
        torch.testing.assert_close(mine, stock, rtol=0.05, atol=0.05)
