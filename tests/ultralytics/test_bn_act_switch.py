"""Test bn_act_optim on the real Ultralytics."""

import copy
import functools

import pytest
import torch

from tests.bn_act_models import Operators
from torch_fastdet.nn import forwards
from torch_fastdet.patching import switch
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.ultralytics import patch, unpatch

modules = pytest.importorskip("ultralytics.nn.modules", exc_type=ImportError)
block = modules.block


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"])
def test_models_train_as_stocks(model, program):
    assert program("bn_act.py", model)["as stock"]


# The half-precision error of yolo12n varies: .8 of the original's in NHWC, 1.5 in NCHW. The tests below check its blocks.
@pytest.mark.parametrize("model", ["yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo26n"])
def test_models_train_as_stocks_on_a_gpu(model, program, cuda):
    assert program("bn_act.py", model, "cuda")["as stock"]


def fuse(model):
    """Fuse norms as ``BaseModel.fuse`` does."""
    for module in [*model.modules()]:
        if isinstance(module, modules.Conv):
            module.conv = torch.nn.utils.fusion.fuse_conv_bn_eval(module.conv, module.bn)
            del module.bn
        elif isinstance(module, modules.RepConv):
            module.fuse_convs()
        else:
            continue
        module.forward = module.forward_fuse
    return model


# The number is that of torch's additions that remain: those of RepConv with unfused norms, and the one with gamma.
BLOCKS = {
    "RepNCSPELAN4": (lambda: block.RepNCSPELAN4(32, 32, 32, 16, 2), 0),
    "ELAN1": (lambda: block.ELAN1(32, 32, 32, 16), 0),
    "SPPELAN": (lambda: block.SPPELAN(32, 32, 16), 0),
    "A2C2f": (lambda: block.A2C2f(32, 64, 2, area=2), 0),
    "A2C2f of C3k": (lambda: block.A2C2f(32, 64, 2, a2=False), 0),
    "A2C2f with gamma": (lambda: block.A2C2f(32, 32, area=2, residual=True, e=1.0), 1),
    "C2PSA": (lambda: block.C2PSA(32, 32, 2), 0),
    "PSA": (lambda: block.PSA(32, 32), 0),
    "C2fCIB": (lambda: block.C2fCIB(32, 64, 2, shortcut=True), 0),
    "ADown": (lambda: block.ADown(32, 64), 0),
    "C3k2 with attention": (lambda: block.C3k2(32, 64, 2, attn=True), 0),
}


@pytest.fixture
def evaluate(device, monkeypatch):
    """Return a function that evaluates a block without and with bn_act_optim, the latter captured, and returns both and the operators."""
    monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
    monkeypatch.setattr(forwards, "DEVICES", ("cpu", "cuda"))

    def run(model, fused, dtype=torch.float64):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean)
                torch.nn.init.uniform_(module.running_var, 0.5, 2)
        model = (
            torch.nn.Sequential(torch.nn.Conv2d(32, 32, 3, padding=1), model)
            .eval()
            .to(device, dtype, memory_format=torch.channels_last)
        )
        x = torch.randn(2, 32, 8, 12).to(device, dtype).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            wanted = fuse(copy.deepcopy(model))(x) if fused else model(x)
            patch(bn_act_optim=True)
            model = fuse(model) if fused else model
            with fewer_copies(model), Operators() as operators:
                found = model(x)
        return found, wanted, operators

    yield run
    unpatch()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_sums_and_concatenations_in_evaluation(name, fused, evaluate, device):
    make, sums = BLOCKS[name]
    found, wanted, operators = evaluate(make(), fused)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    # cuDNN's float64 convolutions return NCHW.
    assert device.type == "cuda" or found.is_contiguous(memory_format=torch.channels_last)
    assert (operators.sums, operators.cats, operators.copies) == (sums, 0, 0)
    assert operators.pooled == (name == "SPPELAN")


def hook(path, model):
    model.get_submodule(path).register_forward_hook(lambda *_: model.seen.append(path))


CHANGES = {
    "a hook on attention": ("C2PSA", functools.partial(hook, "m.0.attn")),
    "a hook on the last part of attention": ("C2PSA", functools.partial(hook, "m.1.attn.proj.conv")),
    "a hook on a block": ("C2PSA", functools.partial(hook, "m.0")),
    "a hook on v10's attention": ("PSA", functools.partial(hook, "attn.qkv")),
    "a hook on the end of v10's attention": ("PSA", functools.partial(hook, "ffn.1")),
    "a hook on a row of convolutions": ("C2fCIB", functools.partial(hook, "m.0.cv1")),
    "a hook on the end of a row": ("C2fCIB", functools.partial(hook, "m.1.cv1.4")),
    "a hook on a half": ("ADown", functools.partial(hook, "cv2")),
    "no shortcut": ("C2fCIB", lambda model: setattr(model.m[1], "add", False)),
    "a hook on the rest": ("A2C2f", functools.partial(hook, "m.0.0.mlp")),
    "a hook on a row": ("RepNCSPELAN4", functools.partial(hook, "cv2")),
    "a hook on the first": ("ELAN1", functools.partial(hook, "cv1")),
    "a hook on a pooling": ("SPPELAN", functools.partial(hook, "cv3")),
    "another pooling": ("SPPELAN", lambda model: setattr(model, "cv3", torch.nn.MaxPool2d(3, 1, 1))),
    "no sums": ("C2PSA", lambda model: setattr(model.m[1], "add", False)),
    "no list": ("A2C2f", lambda model: setattr(model, "m", torch.nn.Sequential(*model.m))),
}


@pytest.mark.parametrize("name, change", CHANGES.values(), ids=CHANGES)
def test_other_blocks_in_evaluation_keep_their_own_path(name, change, evaluate):
    model = BLOCKS[name][0]()
    model.seen = []
    change(model)
    found, wanted, _ = evaluate(model, False)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert len(model.seen) % 2 == 0, "as often as the original's"


@pytest.mark.parametrize(
    "make",
    [
        lambda: block.C2PSA(32, 32, 2, e=0.375),
        lambda: block.RepNCSPELAN4(32, 32, 24, 12),
        lambda: block.PSA(32, 32, e=0.375),
    ],
)
def test_odd_halves_in_evaluation(make, evaluate):
    found, wanted, operators = evaluate(make(), True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert operators.cats > 0
