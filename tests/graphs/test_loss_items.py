"""Test loss items that are read while the GPU runs work that was launched after them."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.graphs import fake_gpu
from tests.graphs.samples import Detector, make_training, some_batches
from torch_fastdet.graphs import TrainStep
from torch_fastdet.graphs import loss_items as _loss_items
from torch_fastdet.graphs.loss_items import LossItems, copy_early, read_early
from torch_fastdet.optim import SGD

VALUES = (0.125, 3.7, 1e-3)


def keep_busy(device, seconds):
    """Keep the current stream busy for ``seconds`` at 2 GHz."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * 2e9))


class _Stream:
    """Stand in for a stream that runs everything at once; record the events that it waited for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def device(device, monkeypatch):
    """Return a GPU, or the CPU with streams that do nothing."""
    if device.type == "cpu":
        streams = {"current": _Stream(), "beside": _Stream()}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["current"])
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(_loss_items, "_stream", lambda device: streams["beside"])
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return device


def _items(device: torch.device, beside: bool = True, values=VALUES) -> torch.Tensor:
    made = torch.tensor(values, device=device)
    if device.type == "cuda":
        return read_early(made, beside)
    return _loss_items._known_at(made, torch.cuda.current_stream(device).record_event(), beside)


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
    """Reads wait for the current stream, which may write to the items or compute them."""
    items = _items(device)
    assert {type(items[index]) for index in ([0, 2], items.isfinite(), True, slice(0, 2))} == {torch.Tensor}
    assert type(items[1]) is LossItems
    items.data.mul_(2)
    assert _loss_items._event(items) is not items._known and items.tolist() == [
        2 * value for value in torch.tensor(VALUES).tolist()
    ]
    assert items.unsqueeze_(0) is items and items.shape == (1, 3)
    items.data = torch.ones(3, device=device)
    assert items.tolist() == [1.0] * 3


def test_loggers_find_a_tensor(device):
    """Weights & Biases and other loggers look at the name of the type."""
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
    copied = copy_early(items, object())
    assert type(copied) is torch.Tensor and copied.equal(items) and copied is not items


def test_a_step_knows_its_items_before_the_backward_pass(monkeypatch):
    """Items have their values from before the backward pass, even if a loss returns a parameter."""
    fake_gpu.install(monkeypatch)
    model = Detector()
    compute_loss, optimizer, scaler, ema = make_training(model)
    weight = model.heads[0].weight

    def loss(*args):
        return compute_loss(*args)[0], weight.detach()[0, 0, 0]

    step, seen = TrainStep(model, loss, optimizer, scaler, ema), []
    for i, batch in enumerate(some_batches(8)):
        before = weight.detach().clone()
        if step.memory()["graphs"]:
            step._items_known.then = lambda before=before: seen.append(weight.equal(before))
        items = step(*batch, update=i % 2 == 1)
        assert items.equal(before[0, 0, 0]) and weight.equal(before) == (i % 2 == 0)
    assert seen == [True] * 5


class Slow(nn.Module):
    """Return a mean, and keep the GPU busy for the given seconds in forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(1)), (forward, backward)

    def forward(self, x):
        return _Busy.apply(x.mean() * self.scale, *self.seconds)


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        keep_busy(x.device, forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        keep_busy(gradient.device, ctx.seconds)
        return gradient.clone(), None, None


def _slow_step(device: torch.device, forward: float = 0.0, backward: float = 0.0) -> TrainStep:
    """Return a step whose items are those of the first target and follow the forward pass."""
    model = Slow(forward, backward).to(device)

    def loss(output, targets, count):
        return output, output.detach() * 0 + targets[0, 3:]

    return TrainStep(model, loss, SGD(model.parameters(), lr=0.01))


def _batch(device: torch.device, value: float, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    # Draw on the CPU: during a capture another thread must not draw random numbers of the GPU.
    return torch.rand(1, 3, size, size).to(device), torch.full((1, 6), value, device=device)


def test_reading_a_steps_items_does_not_wait_for_its_backward_pass(cuda):
    step, stream = _slow_step(cuda, backward=0.2), torch.cuda.current_stream()
    mean = torch.zeros(3, device=cuda)
    for i in range(6):
        items = step(*_batch(cuda, float(i)))
        assert type(items) is LossItems and items.tolist() == [float(i)] * 3
        assert i < 2 or not stream.query(), "the current stream was waited for"
        mean = (mean * i + items) / (i + 1)
        if i:
            assert mean[0].item() == i / 2
            assert i < 2 or not stream.query(), "the current stream was waited for"
    assert items.sum().item() == 15.0  # in order there
    torch.cuda.synchronize()


@pytest.mark.parametrize("held_up", [False, True])
def test_items_of_steps_in_flight_keep_their_values(cuda, held_up):
    """Two image shapes and an accumulation have six graphs in one pool; the copy of the items may come late."""
    step, stream = _slow_step(cuda, forward=0.002, backward=0.002), torch.cuda.current_stream()
    found, sums, reads = [], [], []
    for i in range(60):
        if held_up and i % 7 == 6:
            with torch.cuda.stream(_loss_items._stream(stream)):
                keep_busy(cuda, 0.03)
        items = step(*_batch(cuda, float(i), (32, 64)[i // 3 % 2]), update=i % 3 == 2)
        found.append(items)
        sums.append(items + torch.zeros(3, device=cuda))  # on the current stream
        if i % 5 == 4:
            reads.append(items.tolist())
    assert reads == [[float(i)] * 3 for i in range(4, 60, 5)]
    assert [items.tolist() for items in found] == [[float(i)] * 3 for i in range(60)]
    assert torch.stack(sums).equal(torch.stack(found)) and step.memory()["graphs"] == 6


def test_threads_read_the_items_of_their_own_steps(cuda):
    """Each thread has its own stream and another that copies items, so none waits for another thread's step."""
    steps, streams = [_slow_step(cuda, 0.001, 0.001) for _ in range(3)], [torch.cuda.Stream() for _ in range(3)]

    def run(step: TrainStep, stream: torch.cuda.Stream, first: float) -> list[list[float]]:
        with torch.cuda.stream(stream):
            return [step(*_batch(cuda, first + i)).tolist() for i in range(50)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, steps, streams, (0.0, 100.0, 200.0)))
    assert found == [[[first + i] * 3 for i in range(50)] for first in (0.0, 100.0, 200.0)]
    assert len({_loss_items._stream(stream) for stream in streams}) == 3


def test_a_step_that_is_dropped_while_it_runs_keeps_its_items(cuda):
    for i in range(10):
        step = _slow_step(cuda, forward=0.02, backward=0.02)
        for value in range(3):
            items = step(*_batch(cuda, float(i + value)))
        del step
        other = [torch.full((64,), -1.0, device=cuda) for _ in range(100)]
        assert items.tolist() == [float(i + 2)] * 3
        del other
    torch.cuda.synchronize()


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
