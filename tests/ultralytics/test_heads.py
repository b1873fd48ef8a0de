"""Outputs of Detect as captured steps have them, against Ultralytics' own."""

import copy
from types import SimpleNamespace

import pytest
import torch

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
