"""Loss items that are read while the GPU works on what was launched after them."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch

from torch_fastdet.hosts.shared import loss_items
from torch_fastdet.hosts.shared.loss_items import LossItems, read_early

VALUES = (0.125, 3.7, 1e-3)


class _Stream:
    """A stream of a device that does everything at once, and notes what it waited for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def device(device, monkeypatch):
    """A GPU, or the CPU with streams that do nothing."""
    if device.type == "cpu":
        streams = {"current": _Stream(), "beside": _Stream()}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["current"])
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(loss_items, "_stream", lambda device: streams["beside"])
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return device


def _items(device: torch.device, beside: bool = True, values=VALUES) -> torch.Tensor:
    made = torch.tensor(values, device=device)
    if device.type == "cuda":
        return read_early(made, beside)
    return loss_items._known_at(made, torch.cuda.current_stream(device).record_event(), beside)


@pytest.mark.parametrize("beside", [True, False])
def test_running_means_have_stocks_bits(device, beside):
    plain, mean = torch.zeros(3, device=device), torch.zeros(3, device=device)
    for i in range(5):
        values = [(i + 1) * value for value in VALUES]
        plain = (plain * i + torch.tensor(values, device=device)) / (i + 1)
        mean = (mean * i + _items(device, beside, values)) / (i + 1)
        assert type(mean) is LossItems
        assert [float(value) for value in mean] == plain.tolist()
    assert "%11.4g" * 3 % (*mean,) == "%11.4g" * 3 % (*plain,)
    assert f"{mean[1]:.3f} {mean[1].item()} {round(float(mean[2]), 5)}" == (
        f"{plain[1]:.3f} {plain[1].item()} {round(float(plain[2]), 5)}"
    )
    assert mean.tolist() == plain.tolist() and mean.cpu().equal(plain.cpu()) and type(mean.cpu()) is torch.Tensor


def test_other_functions_give_plain_tensors(device):
    items, plain = _items(device), torch.tensor(VALUES, device=device)
    found = [items.sum(), torch.zeros_like(items), torch.stack([items, items]), -items, items.clone(), items.isfinite()]
    assert {type(value) for value in found} == {torch.Tensor}
    assert found[0].equal(plain.sum()) and found[2].equal(torch.stack([plain, plain]))
    assert items.shape == (3,) and items.device.type == device.type and len(items) == 3 and items.dtype == torch.float32
    total = torch.zeros(3, device=device)
    total += items
    assert type(total) is torch.Tensor and total.equal(plain)
    assert repr(items) == repr(plain)


def test_what_is_written_to_it_is_read(device):
    items = _items(device)
    first = items[0]
    items.mul_(2)
    assert items.tolist() == [2 * value for value in torch.tensor(VALUES).tolist()]
    assert first.item() == 2 * VALUES[0]
    assert (items + items).tolist() == [4 * value for value in torch.tensor(VALUES).tolist()]


def test_values_that_are_handed_out_or_gathered_are_read_in_order(device):
    """Behind what the current stream does: it may write to them, or compute them."""
    items = _items(device)
    assert {type(items[index]) for index in ([0, 2], items.isfinite(), True, slice(0, 2))} == {torch.Tensor}
    assert type(items[1]) is LossItems
    items.data.mul_(2)
    assert loss_items._event(items) is not items._known and items.tolist() == [
        2 * value for value in torch.tensor(VALUES).tolist()
    ]
    assert items.unsqueeze_(0) is items and items.shape == (1, 3)
    items.data = torch.ones(3, device=device)
    assert items.tolist() == [1.0] * 3


def test_loggers_find_a_tensor(device):
    """Weights & Biases and others look at the name of the type."""
    kind = _items(device).__class__
    assert f"{kind.__module__}.{kind.__name__}" == "torch.Tensor"


def test_copies_and_files_are_plain(device):
    items = _items(device)
    file = io.BytesIO()
    torch.save(items, file)
    file.seek(0)
    holder: dict[str, object] = {"items": items, "again": items}
    holder["holder"] = holder
    held = copy.deepcopy(holder)
    assert held["again"] is held["items"]
    for copied in (
        held["items"],
        copy.deepcopy(items),
        copy.copy(items),
        pickle.loads(pickle.dumps(items)),
        torch.load(file),
    ):
        assert type(copied) is torch.Tensor and copied.device == items.device and copied.tolist() == items.tolist()


def test_plain_where_nothing_is_launched_later():
    items = torch.tensor(VALUES)
    assert read_early(items, True) is items


def _cycles(milliseconds: float) -> int:
    return int(milliseconds * 1.5e6)


@pytest.mark.parametrize("beside", [True, False])
def test_reading_waits_for_nothing_that_was_launched_later(cuda, beside):
    device, stream = cuda, torch.cuda.current_stream()
    mean = (_items(device, beside) * 1 + _items(device, beside)) / 2  # loads the kernels, which waits for the GPU
    assert [float(value) for value in mean] == torch.tensor(VALUES).tolist()
    torch.cuda.synchronize()
    items = _items(device, beside)
    if not beside:
        mean = (mean * 1 + items) / 2
    torch.cuda._sleep(_cycles(300))
    if beside:
        mean = (mean * 1 + items) / 2
    assert [float(value) for value in mean] == torch.tensor(VALUES).tolist()
    assert not stream.query(), "the current stream was waited for"
    assert mean.sum().item() == torch.tensor(VALUES).sum().item() and stream.query()  # in order there


def test_reading_waits_for_the_items(cuda):
    source = torch.zeros(3, device=cuda)
    torch.cuda.synchronize()
    for beside in (True, False):
        torch.cuda._sleep(_cycles(100))
        source += 1
        items = read_early(source * 1, beside)
        mean = (items * 0 + items) / 1
        assert mean.tolist() == [1.0 + (not beside)] * 3


def test_memory_is_not_used_again_before_it_is_read(cuda):
    found = []
    for i in range(200):
        mean = (_items(cuda, True, [float(i)] * 3) * 1 + _items(cuda, True, [1.0] * 3)) / 1
        torch.cuda._sleep(_cycles(0.05))
        found.append(mean + torch.zeros(3, device=cuda))  # on the current stream, behind what sleeps there
        del mean
        torch.full((3,), -1.0, device=cuda)
    assert [value[0].item() for value in found] == [i + 1.0 for i in range(200)]
