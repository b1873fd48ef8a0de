"""ModelEMA equals the original loop, written here from its definition, whatever moves its tensors."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from tests.launches import launched
from torch_fastdet.ema import DecayRamp, ModelEMA


class Model(nn.Module):
    """Have float and integer buffers, a tensor of each float dtype, an empty one, and attributes to copy."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17), nn.SiLU(), nn.Conv2d(17, 5, 1))
        self.register_buffer("anchors", torch.randn(3, 3, 2))
        self.register_buffer("wide", torch.randn(7, dtype=torch.float64))
        self.register_buffer("narrow", torch.randn(9).half())
        self.register_buffer("brain", torch.randn(5).bfloat16())
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.nc, self.names, self._private, self.process_group = 80, ["a"], 1, "no"


def stock_update(average, model, decay):
    values = model.state_dict()
    for name, v in average.state_dict().items():
        if v.dtype.is_floating_point:
            v *= decay
            v += (1 - decay) * values[name].detach()


def move(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value += torch.randn(value.shape, generator=generator, dtype=torch.float64).to(
                    value.device, value.dtype
                )
            else:
                value += 1


class Pair:
    """Update torch_fastdet's EMA and the original loop over one model."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model = Model().to(device)
        self.ema = ModelEMA(self.model)
        self.stock = copy.deepcopy(self.model).eval()
        self.updates = 0

    def update(self, times=1):
        for _ in range(times):
            self.updates += 1
            move(self.model, self.updates)
            self.ema.update(self.model)
            stock_update(self.stock, self.model, 0.9999 * (1 - math.exp(-self.updates / 2000)))

    def check(self):
        assert self.ema.updates == self.updates
        values = self.model.state_dict()
        for (name, mine), wanted in zip(self.ema.ema.state_dict().items(), self.stock.state_dict().values()):
            if wanted.dtype in (torch.float16, torch.bfloat16):
                # The original rounds three times, torch_fastdet once.
                torch.testing.assert_close(mine, wanted, rtol=3e-2, atol=3e-2)
            elif wanted.dtype != values[name].dtype:
                # The original rounds the value's share to the model's type, torch_fastdet does not.
                tolerance = 1e-3 if values[name].dtype in (torch.float16, torch.bfloat16) else 1e-6
                tolerance *= 20 if values[name].dtype == torch.bfloat16 else 1
                torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(mine, wanted), name


def test_first_update_in_inference_mode(device):
    """The first update makes normal tensors, not those of torch.inference_mode, as later updates write them."""
    model = Model().to(device)
    ema = ModelEMA(model)
    stock = copy.deepcopy(ema.ema)
    with torch.inference_mode():
        ema.update(model)
        stock_update(stock, model, ema.decay(1))
    ema.update(model)
    stock_update(stock, model, ema.decay(2))
    assert ema.updates == 2
    for got, want in zip(ema.ema.parameters(), stock.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_deleted_models_tensors_go(device):
    model = nn.Linear(4, 4).to(device)
    ema = ModelEMA(model)
    ema.update(model)
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None and ema.model is None
    model = nn.Linear(4, 4).to(device)
    ema.update(model)
    assert ema.updates == 2 and ema.model is model


def test_100_updates_are_the_stock_loop_bit_by_bit(device):
    pair = Pair(device)
    for _ in range(100):
        pair.update()
    pair.check()
    assert int(pair.ema.ema.body[1].num_batches_tracked) == 0  # integers are not averaged
    assert not any(p.requires_grad for p in pair.ema.ema.parameters())
    assert not pair.ema.ema.training


def replace_parameter(module):
    module.body[0].weight = nn.Parameter(module.body[0].weight.detach().clone())


def replace_submodule(module):
    module.body[3] = copy.deepcopy(module.body[3])


def replace_buffer(module):
    module.body[1].running_var = module.body[1].running_var.clone()


def replace_data(module):
    for p in module.parameters():
        p.data = p.data.clone()


CHANGES = {
    "half().float()": lambda m: m.half().float(),
    "load_state_dict": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "p.data": replace_data,
    "parameter": replace_parameter,
    "buffer": replace_buffer,
    "submodule": replace_submodule,
    "double": lambda m: m.double(),
}


@pytest.mark.parametrize("whose", ["ema", "model"])
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_storage_is_noticed(device, change, whose):
    """Without a check (bugs 23 and 32) the average would not follow tensors that moved after they were cached in a list."""
    pair = Pair(device)
    pair.update(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if whose == "ema":
            CHANGES[change](pair.ema.ema)
            CHANGES[change](pair.stock)
        else:
            CHANGES[change](pair.model)
    pair.update(2)
    if change == "double":
        for mine, wanted in zip(pair.ema.ema.state_dict().values(), pair.stock.state_dict().values()):
            torch.testing.assert_close(mine, wanted, rtol=3e-2, atol=3e-2)
    else:
        pair.check()


def test_another_model(device):
    pair = Pair(device)
    pair.update(2)
    pair.model = copy.deepcopy(pair.model)
    pair.update(2)
    pair.check()


def test_copies_have_their_own_tensors(device):
    """Bug 32 was in deepcopy(ema)."""
    pair = Pair(device)
    pair.update(2)
    for duplicate in (copy.deepcopy(pair.ema), pickle.loads(pickle.dumps(pair.ema))):
        before = {k: v.clone() for k, v in pair.ema.ema.state_dict().items()}
        assert duplicate.updates == 2 and duplicate.decay(5) == pair.ema.decay(5)
        move(pair.model, 77)
        duplicate.update(pair.model)
        for name, value in pair.ema.ema.state_dict().items():
            assert torch.equal(value, before[name])
        assert not torch.equal(duplicate.ema.anchors, pair.ema.ema.anchors)


def test_resume(device):
    pair = Pair(device)
    pair.update(3)
    saved = copy.deepcopy(pair.ema.ema).half()
    resumed = ModelEMA(pair.model, updates=0)
    resumed.update(pair.model)
    resumed.ema.load_state_dict(saved.float().state_dict())
    resumed.updates = 3
    stock = copy.deepcopy(resumed.ema)
    move(pair.model, 9)
    resumed.update(pair.model)
    stock_update(stock, pair.model, 0.9999 * (1 - math.exp(-4 / 2000)))
    assert torch.equal(resumed.ema.body[0].weight, stock.body[0].weight)
    assert resumed.updates == 4


def test_wrappers_are_unwrapped(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        ema = ModelEMA(wrapped)
        assert type(ema.ema) is nn.Sequential
        stock = copy.deepcopy(model)
        with torch.no_grad():
            model[0].weight += 1
        ema.update(wrapped)
        stock_update(stock, model, 0.9999 * (1 - math.exp(-1 / 2000)))
        assert torch.equal(ema.ema[0].weight, stock[0].weight)


def test_tied_weights_move_twice_as_in_the_stock_loop(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model[1].weight = model[0].weight
    ema, stock = ModelEMA(model), copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight += 1
    ema.update(model)
    stock_update(stock, model, 0.9999 * (1 - math.exp(-1 / 2000)))
    assert torch.equal(ema.ema[0].weight, stock[0].weight)


def test_decay_is_taken_in_double():
    ema = ModelEMA(nn.Linear(2, 2))
    assert isinstance(ema.decay, DecayRamp)
    assert 1 - ema.decay(1e9) == 1 - 0.9999
    for updates in (1, 7, 1234, 99999):
        assert ema.decay(updates) == 0.9999 * (1 - math.exp(-updates / 2000))
    ema.decay = lambda updates: 0.5
    weight = ema.ema.weight.clone()
    model = nn.Linear(2, 2)
    ema.update(model)
    assert torch.equal(ema.ema.weight, weight * 0.5 + model.weight * 0.5)


def test_update_attr():
    model = Model()
    ema = ModelEMA(model)
    model.nc, model.names, model._private, model.process_group = 3, ["x"], 2, "yes"
    ema.update_attr(model, include=["names"])
    assert (ema.ema.nc, ema.ema.names) == (80, ["x"])
    ema.update_attr(model)
    assert (ema.ema.nc, ema.ema._private, ema.ema.process_group) == (3, 1, "no")
    ema.enabled = False
    model.nc = 9
    ema.update_attr(model)
    ema.update(model)
    assert ema.ema.nc == 3 and ema.updates == 0


@pytest.fixture
def process_group():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_update_attr_of_a_wrapped_model(process_group):
    """train.py wraps the model first and then sets names, hyp and nc, which land on the wrapper."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.names, model.yaml = ["0", "1"], {"a": 1}
    for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        ema, wrapped = ModelEMA(model), wrap(model)
        wrapped.names, wrapped.hyp, wrapped._hidden = ["cat", "dog"], {"lr0": 0.01}, 1
        ema.update_attr(wrapped, include=["yaml", "names", "hyp", "stride", "_hidden"])
        assert (ema.ema.names, ema.ema.hyp, ema.ema.yaml) == (["cat", "dog"], {"lr0": 0.01}, {"a": 1})
        ema = ModelEMA(model)
        before = set(vars(ema.ema))
        ema.update_attr(wrapped)
        assert ema.ema.names == ["cat", "dog"]
        assert set(vars(ema.ema)) == before and list(ema.ema._modules) == ["0"]  # nothing of the wrapper's own
    model.cpu()  # DataParallel takes it to a GPU where there is one
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    compiled.names = ["bird"]
    ema.update_attr(compiled, include=["names"])
    assert ema.ema.names == ["bird"]


def test_errors():
    with pytest.raises(TypeError, match=r"ModelEMA: model is int, but a torch\.nn\.Module is expected"):
        ModelEMA(3)
    model = Model()
    ema = ModelEMA(model)
    del model.anchors
    with pytest.raises(KeyError, match="the model has no anchors"):
        ema.update(model)
    model = Model().to("meta")
    with pytest.raises(RuntimeError, match=r"anchors is on meta in the model, but on cpu in the EMA"):
        ema.update(model)
    model = Model()
    model.anchors = torch.zeros(5, 3, 2)
    before = {k: v.clone() for k, v in ema.ema.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"anchors has shape \[5, 3, 2\] in the model, but \[3, 3, 2\] in the EMA"):
        ema.update(model)
    assert ema.updates == 0
    ema.decay = lambda updates: -0.5
    with pytest.raises(ValueError, match=r"ModelEMA: decay\(1\) is -0\.5, but a number from 0 to 1 is expected"):
        ema.update(Model())
    assert all(torch.equal(v, before[k]) for k, v in ema.ema.state_dict().items())
    for wrong, wanted in (
        ({"decay": 2.0}, "decay is 2.0, but a number from 0 to 1"),
        ({"decay": math.nan}, "decay is nan, but a number from 0 to 1"),
        ({"decay": "a"}, "decay is 'a', but a number from 0 to 1"),
        ({"tau": -5}, "tau is -5, but a number not below 0"),
        ({"updates": -1}, "updates is -1, but a number not below 0"),
    ):
        with pytest.raises(ValueError, match=f"ModelEMA: {wanted} is expected"):
            ModelEMA(Model(), **wrong)


@pytest.mark.alone
def test_one_launch_and_no_host_sync(cuda):
    pair = Pair(cuda)
    pair.update(2)
    assert len(launched(lambda: pair.ema.update(pair.model))) == 1
