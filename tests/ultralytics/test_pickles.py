"""Whatever a user pickles of a trainer loads in a process without torch_fastdet."""

import pickle

import pytest
import torch
from torch import nn

from torch_fastdet import optim


def stepped(kind, **options) -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    optimizer = optim.converted(kind(model.parameters(), lr=0.1, **options))
    assert type(optimizer).__module__.startswith("torch_fastdet.")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name, options", [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("MuSGD", {})])
def test_optimizers_are_filed_as_the_originals(name, options):
    kind = getattr(pytest.importorskip("ultralytics.optim") if name == "MuSGD" else torch.optim, name)
    optimizer = stepped(kind, **options)
    data = pickle.dumps(optimizer)
    assert b"torch_fastdet" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is kind
    expected, got = optimizer.state_dict(), loaded.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(got["state"], expected["state"], rtol=0, atol=0)


def test_optimizers_of_the_user_stay_ours():
    own = optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert type(pickle.loads(pickle.dumps(own))) is optim.SGD


@pytest.mark.slow
@pytest.mark.cpu
def test_nothing_of_a_trainer_names_us(program, digits, tmp_path):
    found = program("pickles.py", digits, tmp_path / "runs", tmp_path / "parts.pt")
    assert found["found"] == {} and {"optimizer", "ema", "scaler", "stopper"} <= found["kept"].keys()
