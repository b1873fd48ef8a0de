"""mask_optim in Ultralytics replaces the right names, and predictions and the validator have the same masks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import torch_fastdet.ultralytics as drop_in
from torch_fastdet import masks
from torch_fastdet.ops.detection_masks import instance_masks
from torch_fastdet.ops.letterbox import place
from torch_fastdet.switches.mask import switch as mask_switch


@pytest.fixture
def ops():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = pytest.importorskip("ultralytics.utils.ops", reason="ultralytics is not installed")
    yield ops
    drop_in.unpatch()


def redefine(ops, monkeypatch, name, parameters, source):
    """Redefine a function of the original module. ``source`` can call the original as ``inner``."""
    monkeypatch.setitem(vars(ops), "inner", getattr(ops, name))
    monkeypatch.setitem(vars(ops), name, None)
    exec(f"def {name}{parameters}:\n    {source}", vars(ops))


@pytest.mark.parametrize("rule", ["other", "broken"])
def test_another_rule_is_refused(ops, monkeypatch, rule):
    source = {"other": "return inner(protos, masks_in, bboxes + 1, shape, upsample)", "broken": "return None"}[rule]
    redefine(ops, monkeypatch, "process_mask", "(protos, masks_in, bboxes, shape, upsample=False)", source)
    with pytest.raises(drop_in.SwitchError, match=r"its process_mask (of a small case|cannot be compared)"):
        drop_in.patch(mask_optim=True)


@pytest.mark.parametrize("height, told", [(41, True), (40, False)])
def test_the_trial_tells_versions_that_cut_the_border_off_first(height, told):
    """Up to 8.4.169 the border is cut off before prototypes are enlarged. A border of a multiple of 8 pixels, as of 40 x 64, hides it."""

    def cut_first(protos, masks_in, bboxes, shape):
        inner = place(list(shape), list(protos.shape[1:]))
        window = [inner.top, inner.left, inner.top + inner.height, inner.left + inner.width]
        return instance_masks(protos, masks_in, bboxes, list(shape), window, 1)

    protos, coefficients, boxes = mask_switch.sample()
    newest = masks.ultralytics_process_mask_native(protos, coefficients, boxes, (height, 64))
    assert torch.equal(cut_first(protos, coefficients, boxes, (height, 64)), newest) != told
    if told:
        target = next(target for target in mask_switch.ULTRALYTICS.targets if target.name == "process_mask_native")
        assert "its process_mask_native of a small case gives" in target.evidence[-1].obstacle(cut_first)


@pytest.mark.parametrize("source", ["return inner(masks.clone(), boxes)", "return inner(masks, boxes + 1)"])
def test_another_crop_is_refused(ops, monkeypatch, source):
    redefine(ops, monkeypatch, "crop_mask", "(masks, boxes)", source)
    with pytest.raises(drop_in.SwitchError, match=r"its \w+ of a small case gives"):
        drop_in.patch(mask_optim=True)


def test_mask_loss_and_its_gradients_are_stocks(ops, device):
    loss = pytest.importorskip("ultralytics.utils.loss").v8SegmentationLoss.single_mask_loss
    g = torch.Generator().manual_seed(0)
    boxes = torch.tensor([[1.0, 2, 9, 8], [0, 0, 20, 12], [3.5, 3.5, 4, 9]])
    tensors = [(torch.rand(3, 12, 20, generator=g) > 0.5).float(), torch.randn(3, 8, generator=g)]
    tensors += [torch.randn(8, 12, 20, generator=g), boxes, torch.tensor([0.2, 1.0, 0.1])]
    results = []
    for patched in (False, True):
        if patched:
            drop_in.patch(mask_optim=True)
        given = [tensor.to(device) for tensor in tensors]
        value = loss(given[0], given[1].requires_grad_(), given[2].requires_grad_(), *given[3:])
        results.append([value.detach(), *torch.autograd.grad(value, given[1:3])])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_prediction_has_stocks_masks(ops, device):
    from ultralytics import YOLO

    torch.manual_seed(0)
    model = YOLO("yolov8n-seg.yaml")
    head = model.model.model[-1]
    with torch.no_grad():
        for level in head.cv3:
            level[-1].bias.add_(9.0)  # untrained, and yet it finds something
    image = np.random.default_rng(0).integers(0, 255, (70, 121, 3), np.uint8)

    def found(native: bool) -> torch.Tensor:
        options = {"conf": 0.2, "imgsz": 128, "max_det": 20, "verbose": False, "device": device.type}
        (result,) = model.predict(image, retina_masks=native, **options)
        return result.masks.data.cpu()

    for native in (False, True):
        wanted = found(native)
        drop_in.patch(mask_optim=True)
        masks = found(native)
        drop_in.unpatch()
        assert len(wanted) and masks.dtype == wanted.dtype and masks.shape == wanted.shape
        assert (masks != wanted).sum() <= 2 + 1e-5 * wanted.numel()
