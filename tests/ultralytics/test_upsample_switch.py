"""upsample_optim replaces the method in Ultralytics. tests/yolov5/test_upsample_switch.py tests the method itself."""

import warnings

import pytest
import torch

import torch_fastdet.ultralytics as drop_in
import torch_fastdet.yolov5
from tests.yolov5.test_upsample_switch import Operators
from torch_fastdet.nn.forwards import conv_forward
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.rewrites.layers import takes_bytes


@pytest.fixture
def model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tasks = pytest.importorskip("ultralytics.nn.tasks", reason="ultralytics is not installed")
    torch.manual_seed(0)
    yield tasks.DetectionModel("yolov8n.yaml", nc=3, verbose=False).train()
    drop_in.unpatch()


def outputs(model, x):
    with torch.autocast(x.device.type, torch.bfloat16), Operators() as operators:
        found = model(x)
    return operators.ours, [part for part in found.values() if isinstance(part, torch.Tensor)]


def test_under_autocast_values_are_stocks(model, device):
    stock = torch.nn.Upsample.forward
    model = model.to(device)
    x = torch.rand(2, 3, 64, 64, device=device)
    count, theirs = outputs(model, x)
    assert count == 0
    said = drop_in.patch(upsample_optim=True)
    assert any(line.startswith("upsample_optim: torch.nn.modules.upsampling.Upsample.forward") for line in said)
    count, mine = outputs(model, x)
    assert count == 2
    for a, b in zip(mine, theirs):
        # cuDNN may choose another kernel for the layout of another dtype.
        torch.testing.assert_close(a, b, **({"rtol": 0.05, "atol": 0.05} if a.is_cuda else {"rtol": 0, "atol": 0}))
    drop_in.unpatch()
    assert torch.nn.Upsample.forward is stock


@pytest.mark.parametrize("first", [drop_in, torch_fastdet.yolov5])
def test_both_hosts_may_replace_it(model, first):
    stock = torch.nn.Upsample.forward
    hosts = [drop_in, torch_fastdet.yolov5]
    for host in hosts:
        host.patch(upsample_optim=True)
    first.unpatch()
    assert torch.nn.Upsample.forward is not stock
    for host in hosts:
        host.unpatch()
    assert torch.nn.Upsample.forward is stock


def test_in_graphs_the_neck_concatenates_as_it_upsamples(model, device):
    model, x = model.to(device).double(), torch.rand(2, 3, 64, 64, device=device, dtype=torch.float64)

    def run():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = [part for part in model(x).values() if isinstance(part, torch.Tensor)]
        loss = sum(part.square().mean() for part in found)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        names = [event.name for event in profile.events()]
        return names.count("torch_fastdet::upsample_nearest2x_cat"), [*found, *gradients]

    drop_in.patch(upsample_optim=True)
    none, expected = run()
    with fewer_copies(model):
        joined, found = run()
    assert none == 0 and joined >= 2
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind, name", [("DetectionModel", "yolov8n.yaml"), ("WorldModel", "yolov8s-worldv2.yaml")])
def test_in_graphs_the_stem_divides_bytes_where_it_alone_reads_them(monkeypatch, kind, name):
    tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)
    monkeypatch.setattr(tasks.Conv, "forward", conv_forward(tasks.Conv.forward))
    model = getattr(tasks, kind)(name, nc=3, verbose=False)
    with fewer_copies(model):
        assert takes_bytes(model) == (kind == "DetectionModel")
