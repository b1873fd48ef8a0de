"""What a user pickles of a trainer loads in a process without torch_fastdet."""

import pickle

import pytest
import torch
from torch import nn

from tests import starter
from torch_fastdet import optim

WITHOUT = """
import pickle, sys
sys.modules["torch_fastdet"] = None  # an import of it raises ImportError
import torch
for file in sys.argv[1:]:
    parts = torch.load(file, weights_only=False)
    optimizer, ema, *_ = parts
    print(type(optimizer).__module__, type(ema).__module__, len(optimizer.state), ema.updates, ema.decay(ema.updates))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ema.update(ema.ema)
"""


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


@pytest.mark.nightly
def test_average_and_optimizer_load_without_us(tmp_path, ultralytics_environment):
    """Both frameworks' averages, which cannot be pickled without us, become objects of their classes."""
    program = """
import sys, torch
from torch import nn
from torch_fastdet import optim, yolov5, ultralytics
for file, door, host in zip(sys.argv[1:], (ultralytics, yolov5), ("ultralytics.utils.torch_utils", "yolov5.utils.torch_utils")):
    door.patch(multi_tensor_optimizer=True)
    __import__(host)
    kind = sys.modules[host].ModelEMA
    model = nn.Linear(3, 2)
    ema = kind(model, tau=50)
    ema.update(model)
    optimizer = optim.converted(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.save([optimizer, ema], file)
    door.unpatch()
"""
    files = [str(tmp_path / name) for name in ("ultralytics.pt", "yolov5.pt")]
    for code in (program, WITHOUT):
        done = starter.python(["-c", code, *files], tmp_path, ultralytics_environment, seconds=200)
        assert done.returncode == 0, done.stdout[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("torch.optim.")]
    assert [line[:4] for line in lines] == [
        ["torch.optim.sgd", "ultralytics.utils.torch_utils", "0", "1"],
        ["torch.optim.sgd", "yolov5.utils.torch_utils", "0", "1"],
    ]
    assert all(float(line[4]) == pytest.approx(0.9999 * (1 - 2.718281828 ** (-1 / 50)), rel=1e-6) for line in lines)


@pytest.mark.slow
@pytest.mark.cpu
def test_nothing_of_a_trainer_names_us(program, digits, tmp_path):
    found = program("pickles.py", digits, tmp_path / "runs", tmp_path / "parts.pt")
    assert found["found"] == {} and {"optimizer", "ema", "scaler", "stopper"} <= found["kept"].keys()
