"""Compare the outputs of Detect in captured steps with Ultralytics' own."""

import contextlib
import copy
import random
from types import SimpleNamespace

import pytest
import torch

from tests.bn_act_models import Operators, tensors
from torch_fastdet import rewrites
from torch_fastdet.nn import forwards
from torch_fastdet.nn.joint import JOINT, OF_ONE_INPUT
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.rewrites.casts import weight_casts
from torch_fastdet.rewrites.heads import first_blocks, head_rows

ultralytics = pytest.importorskip("ultralytics", exc_type=ImportError)
tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)


def make(name, device="cpu"):
    model = tasks.DetectionModel(name, nc=4, verbose=False).to(device, memory_format=torch.channels_last).train()
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, epochs=4)
    return model


@pytest.fixture
def fused_blocks(monkeypatch):
    block = type(make("yolov8n.yaml").model[0])
    monkeypatch.setattr(block, "forward", forwards.conv_forward(block.forward))


def outputs(preds):
    return [part[name] for part in (preds.values() if "one2many" in preds else [preds]) for name in ("boxes", "scores")]


@pytest.mark.parametrize("name, kind", [("yolov8n.yaml", "v8DetectionLoss"), ("yolo26n.yaml", "E2ELoss")])
def test_values_and_gradients(device, same_convolutions, fused_blocks, name, kind):
    from torch_fastdet.switches.loss import ultralytics as losses

    model, images = make(name, device), torch.rand(2, 3, 64, 96, device=device)
    targets = torch.tensor([[0, 1, 0.4, 0.5, 0.3, 0.4], [1, 3, 0.6, 0.5, 0.5, 0.3]], device=device)
    runs = []
    for inside in (True, False):
        own = copy.deepcopy(model)
        loss = getattr(losses, kind)(own)
        if inside:
            with head_rows.apply(own):
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


@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo26n.yaml"])
def test_evaluation(device, same_convolutions, fused_blocks, name):
    model, images = make(name, device).eval(), torch.rand(2, 3, 64, 96, device=device)
    for fused in (False, True):
        model = model.fuse() if fused else model
        with torch.no_grad():
            want = tensors(model(images))
            with head_rows.apply(model), Operators() as operators:
                found = tensors(model(images))
            in_heads = 6 * (2 if name == "yolo26n.yaml" and not fused else 1)
            # On the CPU the blocks of the network stay unchanged.
            assert operators.evaluated == in_heads if str(device) == "cpu" else operators.evaluated >= in_heads
            again = tensors(model(images))
        for a, b, c in zip(found, want, again):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert torch.equal(b, c)


def test_what_is_left_to_stock(monkeypatch, fused_blocks):
    def takes(model):
        with head_rows.apply(model):
            return "forward_head" in vars(model.model[-1])

    model = make("yolov8n.yaml")
    assert takes(model)
    with monkeypatch.context() as without:
        without.setattr(type(model.model[0]), "forward", lambda self, x: x)
        assert not takes(model)
    assert takes(copy.deepcopy(model).eval())
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
    "evaluation": (lambda detect: detect.eval(), 0),
}
HEADS = {
    "yolov8n-seg": 3,
    "yolov8n-obb": 3,
    "yolov8n-pose": 3,
    "yolo11n-seg": 3,
    "yolo11n": 0,
    "yolo26n-seg": 6,
    "yolo26n": 0,
}


def compare_first_blocks(detect, device, monkeypatch, joined):
    """Compare outputs with joined and separate first blocks, and return how many levels were joined."""
    monkeypatch.setattr(forwards, "DEVICES", ("cpu", "cuda"))
    channels = [branch[0].conv.in_channels for branch in detect.cv2]
    model = torch.nn.Module()
    model.model = torch.nn.Sequential(detect.to(device, memory_format=torch.channels_last))
    model.training = detect.training
    x = [torch.randn(2, c, 16 >> i, 16 >> i, device=device) for i, c in enumerate(channels)]
    x = [features.contiguous(memory_format=torch.channels_last) for features in x]
    runs = []
    for inside in (False, True):
        own, operators = copy.deepcopy(model), Operators()
        at_once = first_blocks.apply(own) if inside else contextlib.nullcontext()
        cast_once = weight_casts.apply(own, torch.bfloat16 if inside else None)
        with operators, torch.autocast(device.type, torch.bfloat16), at_once, cast_once:
            preds = own.model[-1](list(x))
        assert not any({"forward", JOINT, OF_ONE_INPUT} & vars(m).keys() for m in own.modules())
        runs.append((operators.joined, [t for t in tensors(preds) if t.dim() == 3], list(own.buffers())))
    assert [run[0] for run in runs] == [0, joined]
    for stock, mine in zip(runs[0][1] + runs[0][2], runs[1][1] + runs[1][2]):
        torch.testing.assert_close(mine, stock, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("change, joined", CHANGES.values(), ids=CHANGES)
def test_first_convolutions_of_a_level_are_one(device, same_convolutions, monkeypatch, fused_blocks, change, joined):
    """Branches that begin with the same kind of block are joined. All others are called one by one, as in the original."""
    detect = make("yolov8n.yaml").model[-1]
    change(detect)
    compare_first_blocks(detect, device, monkeypatch, joined)


@pytest.mark.parametrize("name, joined", HEADS.items())
def test_first_convolutions_of_other_heads(device, same_convolutions, monkeypatch, fused_blocks, name, joined):
    head = ultralytics.YOLO(f"{name}.yaml").model.model[-1].train()
    compare_first_blocks(head, device, monkeypatch, joined)


def one_by_one(branch):
    block = branch[1][0]
    block.conv = torch.nn.Conv2d(block.conv.in_channels, block.conv.out_channels, 1, bias=False)


@pytest.mark.parametrize(
    "change",
    [lambda head: head.cv2.requires_grad_(False), lambda head: one_by_one(head.cv3), lambda head: one_by_one(head.cv2)],
    ids=["frozen boxes", "another kernel size", "the first of another kernel size"],
)
def test_first_convolutions_that_are_alike_among_others(device, same_convolutions, monkeypatch, fused_blocks, change):
    """If two of three branches are alike, these two are joined, whichever they are."""
    head = ultralytics.YOLO("yolov8n-seg.yaml").model.model[-1].train()
    change(head)
    compare_first_blocks(head, device, monkeypatch, 3)


@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo26n.yaml"])
@pytest.mark.parametrize("training", [True, False])
def test_evidence_of_rewrites_draws_no_random_numbers(fused_blocks, name, training):
    """Evidence is taken in the middle of a training, so it must not change the generators."""
    model = make(name).train(training)
    known = [value for module in vars(rewrites).values() for value in getattr(module, "__dict__", {}).values()]
    caches = [
        value for value in known if hasattr(value, "cache_clear") and value.__module__.startswith(rewrites.__name__)
    ]
    assert len(caches) > 3
    for cache in caches:
        cache.cache_clear()
    states = torch.get_rng_state(), random.getstate()
    with fewer_copies(model):
        pass
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
