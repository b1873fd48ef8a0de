"""multi_tensor_optimizer puts its parts under the original names."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import torch_fastdet.yolov5 as drop_in
from tests.launches import launched
from torch_fastdet import optim
from torch_fastdet._torch.private import NORM_LAYERS
from torch_fastdet.ema import ModelEMA
from torch_fastdet.yolov5.host import HOST

#: This switch, not asked for by name.
ALONE = {"fastdet": True} | {name: False for name in drop_in.SWITCHES if name != "multi_tensor_optimizer"}


@pytest.fixture
def patched():
    stock = nn.utils.clip_grad_norm_, torch.amp.GradScaler.unscale_
    HOST.patch(ALONE, import_now=False)
    yield
    drop_in.unpatch()
    assert (nn.utils.clip_grad_norm_, torch.amp.GradScaler.unscale_) == stock


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1), nn.LayerNorm(5)).to(device)


def test_smart_optimizer_groups_and_log_line(caplog):
    model = network("cpu")
    with caplog.at_level(logging.INFO, logger="torch_fastdet"):
        optimizer = drop_in.smart_optimizer(model, "SGD", 0.01, 0.937, 5e-4)
    assert type(optimizer) is optim.SGD
    assert "SGD, lr 0.01, parameters by group: 4 bias, 2 rest, 2 norm (decay 0.0005)" in caplog.text
    sizes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    assert sizes == [[(8,), (8,), (5,), (5,)], [(8, 3, 3, 3), (5, 8, 1, 1)], [(8,), (5,)]]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 5e-4, 0.0]
    assert all(group["nesterov"] and group["momentum"] == 0.937 for group in optimizer.param_groups)
    for name in ("Adam", "AdamW", "RMSProp"):
        assert type(drop_in.smart_optimizer(model, name)).__name__.lower() == name.lower()
    with pytest.raises(NotImplementedError, match="name is 'LION', but one of SGD, Adam, AdamW, RMSProp is expected"):
        drop_in.smart_optimizer(model, "LION")


def test_one_smart_optimizer_for_each_layout(monkeypatch):
    """Every holder of an original function gets its one replacement, in whatever order the modules of two layouts come."""
    modules = [ModuleType(name) for name in ("train", "yolov5.train", "utils.torch_utils", "yolov5.utils.torch_utils")]
    stocks = []
    for module, user in zip(modules[2:], modules):
        exec("def smart_optimizer(model, name='Adam', lr=0.001, momentum=0.9, decay=1e-5): pass", vars(module))
        user.smart_optimizer = module.smart_optimizer
        stocks.append(module.smart_optimizer)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    HOST.patch(ALONE, import_now=False)
    try:
        ours = [module.smart_optimizer for module in modules]
        assert ours[0] is ours[2] and ours[1] is ours[3] and len({*ours, *stocks}) == 4
    finally:
        drop_in.unpatch()
    assert [module.smart_optimizer for module in modules] == stocks * 2


def test_rmsprop_stays_stocks(monkeypatch, capsys):
    """A printed line says so. It is an error if the user asked for the switch by name."""
    module = ModuleType("utils.torch_utils")
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    built = {kind.__name__: kind(network("cpu").parameters(), lr=0.1) for kind in kinds}
    built["RMSProp"] = torch.optim.RMSprop(network("cpu").parameters(), lr=0.1)
    vars(module)["built"] = built
    exec(
        "def smart_optimizer(model, name='Adam', lr=0.001, momentum=0.9, decay=1e-5): return built[name]", vars(module)
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    HOST.patch(ALONE, import_now=False)
    try:
        made = {name: module.smart_optimizer(None, name) for name in built}
        drop_in.unpatch()
        HOST.patch({"multi_tensor_optimizer": True}, import_now=False)
        with pytest.raises(drop_in.SwitchError, match="multi_tensor_optimizer cannot apply: the optimizer is RMSProp"):
            module.smart_optimizer(None, "RMSProp")
    finally:
        drop_in.unpatch()
    assert made["RMSProp"] is built["RMSProp"]
    assert [type(made[name]) for name in ("SGD", "Adam", "AdamW")] == [optim.SGD, optim.Adam, optim.AdamW]
    assert "multi_tensor_optimizer does not apply: the optimizer is RMSProp" in capsys.readouterr().err


def test_norms_are_all_that_torch_has():
    layers = {layer for name, layer in vars(nn).items() if "Norm" in name}
    assert {layer for layer in layers if not issubclass(layer, NORM_LAYERS)} == {nn.LocalResponseNorm}, (
        "it has no weight"
    )


class Step:
    """Run train.py's sequence around the optimizer."""

    def __init__(self, device, kind):
        self.model = network(device)
        self.params = list(self.model.parameters())
        self.optimizer = kind(self.params, lr=0.05, momentum=0.9, nesterov=True)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)
        self.scaler.scale(torch.zeros((), device=device))
        self.seen = []

    def __call__(self, step, overflow):
        generator = torch.Generator().manual_seed(step)
        for p in self.params:
            p.grad = (torch.randn(p.shape, generator=generator) * self.scaler.get_scale()).to(p.device)
        if overflow:
            self.params[2].grad.view(-1)[0] = float("inf")
        self.scaler.unscale_(self.optimizer)
        unscaled = [p.grad.clone() for p in self.params]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=2.0)
        self.seen.append([*unscaled, norm, *(p.grad.clone() for p in self.params)])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def test_train_pys_sequence_has_stocks_effects(device, patched, monkeypatch):
    """A callback also reads the same p.grad after unscaling or clipping."""
    ours = Step(device, optim.SGD)
    for step in range(8):
        ours(step, step in (0, 4))
    monkeypatch.undo()
    drop_in.unpatch()
    stock = Step(device, torch.optim.SGD)
    for step in range(8):
        stock(step, step in (0, 4))
    assert ours.scaler.state_dict() == stock.scaler.state_dict()
    for mine, wanted in zip(ours.seen, stock.seen):
        for a, b in zip(mine, wanted):
            torch.testing.assert_close(a, b, equal_nan=True)
    for a, b in zip(ours.params, stock.params):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_errors_of_unscale_are_torchs(device, patched):
    step = Step(device, optim.SGD)
    step.params[0].grad = torch.ones_like(step.params[0])
    step.scaler.unscale_(step.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        step.scaler.unscale_(step.optimizer)
    step.scaler.step(step.optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        step.scaler.unscale_(step.optimizer)


@pytest.mark.alone
def test_eight_launches_and_no_sync(cuda, patched):
    step = Step(cuda, optim.SGD)
    ema = ModelEMA(step.model)
    for i in range(3):
        step(i, False)
        ema.update(step.model)
    for p in step.params:
        p.grad = torch.randn_like(p)

    def take():
        step.scaler.unscale_(step.optimizer)
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), max_norm=2.0)
        step.scaler.step(step.optimizer)
        step.scaler.update()
        ema.update(step.model)

    names = launched(take)
    assert len(names) <= 8, names
