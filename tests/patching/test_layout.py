"""The choice between NCHW and NHWC: measured once, kept, said; and nothing of the training changes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_fastdet._torch import private
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.switches.channels_last import layout
from torch_fastdet.switches.channels_last.layout import LayoutChoice


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.bn(self.conv(x)))
        return {"heads": [y, (y.sum(),)], "shape": x.shape}


def images(device="cpu", count=2):
    return torch.rand(count, 3, 8, 8, device=device)


@pytest.fixture
def times(monkeypatch):
    """What is measured; and how often."""
    found = {"NCHW": 2.0, "NHWC": 1.0, "calls": 0}

    def measure(forward, model, x):
        found["calls"] += 1
        return {name: found[name] for name in ("NCHW", "NHWC")}

    monkeypatch.setattr(layout, "measure", measure)
    return found


def is_nhwc(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.mark.parametrize("nchw, wanted", [(2.0, "NHWC"), (0.95, "NHWC"), (0.5, "NCHW")])
def test_the_faster_one_is_taken_once_and_said(times, capsys, nchw, wanted):
    times["NCHW"] = nchw
    choice, model = LayoutChoice("channels_last"), Net()
    for _ in range(2):
        x = choice.place(model, images(), Net.forward)
        assert is_nhwc(x) == is_nhwc(model.conv.weight) == (wanted == "NHWC")
    choice.place(Net(), images(), Net.forward)  # of the same layers and images
    said = capsys.readouterr().err.splitlines()
    assert times["calls"] == 1 and said == [
        f"torch_fastdet: channels_last: {wanted}, because a forward and backward pass takes 1.00 ms in NHWC and {nchw:.2f} ms in "
        "NCHW, which is taken where it is a tenth faster (Net, images (2, 3, 8, 8), float32)"
    ]
    with torch.autocast("cpu", torch.bfloat16):
        choice.place(Net(), images(), Net.forward)
    choice.place(Net(), images(count=3), Net.forward)
    assert times["calls"] == 3
    assert ["bfloat16" in line for line in capsys.readouterr().err.splitlines()] == [True, False]


def test_what_is_taken_unmeasured(times, capsys, monkeypatch):
    choice, given = LayoutChoice("channels_last"), Net().to(memory_format=torch.channels_last)
    assert is_nhwc(choice.place(given, images(), Net.forward))
    times["NCHW"] = 0.5
    asked, model = images().requires_grad_(), Net()  # autobatch's
    assert is_nhwc(choice.place(model, asked, Net.forward)) and times["calls"] == 0
    replica = Net()
    replica._is_replica = True  # DataParallel's
    assert is_nhwc(choice.place(replica, images(), Net.forward)) and times["calls"] == 0
    assert is_nhwc(choice.place(Net().requires_grad_(False), images(), Net.forward)) and times["calls"] == 0
    assert not capsys.readouterr().err
    hooked = Net()
    hooked.bn.register_forward_hook(lambda *_: None)
    assert is_nhwc(choice.place(hooked, images(), Net.forward)) and times["calls"] == 0
    assert "because the model has hooks" in capsys.readouterr().err
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert is_nhwc(choice.place(Net(), images(), Net.forward)) and times["calls"] == 0
    monkeypatch.undo()

    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layout, "measure", fails)
    assert is_nhwc(choice.place(Net(), images(), Net.forward))
    said = capsys.readouterr().err
    assert said.count("NHWC, unmeasured, because") == 2 and "process group" in said and "memory does not" in said


@pytest.mark.parametrize("autocast", [False, True])
def test_measuring_changes_nothing(device, monkeypatch, autocast):
    runs = []
    if device.type == "cpu":
        monkeypatch.setattr(layout, "_milliseconds", lambda run, device: runs.append(run()) or float(len(runs)))
    model = Net().to(device)
    before, hooks = copy.deepcopy(model.state_dict()), []
    model.conv.register_forward_hook(lambda module, *_: hooks.append(is_nhwc(module.weight)))
    x, state = images(device), [torch.get_rng_state(), *torch.cuda.get_rng_state_all()[: device.type == "cuda"]]
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        times = layout.measure(Net.forward, model, x)
    assert set(times) == {"NCHW", "NHWC"} and all(time > 0 for time in times.values())
    assert set(hooks) == {False, True} and not is_nhwc(model.conv.weight)
    assert all(map(torch.equal, state, [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]))
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_no_thread_captures_while_it_waits_for_the_gpu(monkeypatch):
    event, waiting = SimpleNamespace(record=int, synchronize=int, elapsed_time=lambda end: 1.0), []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waiting.append(_capture._captures._waiting))
    monkeypatch.setattr(private, "keep_busy", lambda *_: None)
    assert layout._milliseconds(lambda: None, torch.device("cpu")) == 1.0
    assert waiting == [1] * layout.RUNS


def test_is_measured_on_the_models_device(monkeypatch):
    """The current one may be another: a script with device="cuda:1"."""
    current, x = [], images()

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.clear()

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(layout, "_milliseconds", lambda run, device: float(len(current)))
    assert layout.measure(Net.forward, Net(), x) == {"NCHW": 1.0, "NHWC": 1.0}
