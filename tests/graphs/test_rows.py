"""Compare RowGraphs' gradients of rows and parameters with those of the same function without graphs."""

import copy

import pytest
import torch
from torch import nn

from tests.graphs.fake_gpu import GPU
from torch_fastdet import memory
from torch_fastdet.graphs.rows import RowGraphs, _eager, _filled_up


class Flow(nn.Module):
    """Return as loss a mean over the rows that are kept, as PoseLoss26 does."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def loss(self, x, keep):
        y = self.net(torch.where(keep[:, None], x, 0).float()).flatten().float()
        return (y.square() * keep).sum() / keep.sum().clamp(min=1)


def rows_of(count, dtype=torch.float32):
    x = torch.randn(count, 4, device=GPU.device, dtype=dtype)
    return x.requires_grad_(), torch.rand(count, device=GPU.device) < 0.7


def graphs_of(lines=None):
    lines = [] if lines is None else lines
    return RowGraphs("it", lines.append, lines.append)


def eager(flow, rows):
    return _eager(flow.loss, rows, _filled_up(len(rows[0])))


def step(branches, rows, amp=None):
    """Return the loss of all branches, backward with a scale, and the gradients of the rows."""
    with torch.autocast("cuda", amp, enabled=amp is not None):
        loss = sum((i + 1) * branch(*given) for i, (branch, given) in enumerate(zip(branches, rows)))
    (loss * (1024 if amp else 1)).backward()
    return loss.detach(), *[given[0].grad for given in rows]


def twins(flow):
    plain = copy.deepcopy(flow)
    graphs = graphs_of(), graphs_of()
    replayed = [lambda *rows, own=own: own(flow.loss, flow, rows) for own in graphs]
    return plain, graphs, replayed, [lambda *rows: eager(plain, rows)] * 2


def same(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def same_flows(flow, plain):
    same(flow.parameters(), plain.parameters())
    same([p.grad for p in flow.parameters()], [p.grad for p in plain.parameters()])


def same_steps(graphs, flow):
    """Run one step of the module with graphs and one of a copy without."""
    plain, rows = copy.deepcopy(flow), rows_of(40)
    again = rows[0].detach().clone().requires_grad_(), rows[1]
    for net in (flow, plain):
        net.zero_grad()
    same(step([lambda *r: graphs(flow.loss, flow, r)], [rows]), step([lambda *r: eager(plain, r)], [again]))
    same_flows(flow, plain)


@pytest.mark.parametrize("amp", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_bit_equal(gpu, amp, accumulate):
    """Two branches share a module; weights change, and each step has another number of rows, also few or none."""
    if amp and gpu.type == "cpu":
        pytest.skip("the stand-in has no autocast")
    flow = Flow().to(gpu)
    plain, graphs, replayed, reference = twins(flow)
    lr = 0.1 / 1024 if amp else 0.1  # of gradients that are scaled
    optimizers = [torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9) for net in (flow, plain)]
    for i, count in enumerate((900, 1000, 910, 100, 1001, 7, 90, 0, 899, 0, 8, 1020)):
        rows = [rows_of(count, amp or torch.float32), rows_of(count // 2, amp or torch.float32)]
        again = [(x.detach().clone().requires_grad_(), keep) for x, keep in rows]
        found = step(replayed, rows, amp)
        assert found[0].isfinite(), "NaN equals nothing"
        same(found, step(reference, again, amp))
        same_flows(flow, plain)
        if i % accumulate == accumulate - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [len(own._pool) for own in graphs] == [2, 2], "what came twice was captured"


def test_gradients_are_nobody_elses(gpu):
    """The next replay does not write gradients that a loop keeps."""
    flow = Flow().to(gpu)
    graphs = graphs_of()
    kept, values = [], []
    for _ in range(5):
        rows = rows_of(40)
        flow.zero_grad()
        loss = graphs(flow.loss, flow, rows)
        loss.backward()
        kept += [loss, rows[0].grad, *(p.grad for p in flow.parameters())]
        values += [tensor.detach().clone() for tensor in kept[len(values) :]]
    same(kept, values)


@pytest.mark.parametrize("change", ["freeze", "replace", "other_module"])
def test_changed_parameters(gpu, change):
    flow = Flow().to(gpu)
    graphs = graphs_of()
    for number in range(6):
        if number == 3:
            if change == "freeze":
                flow.net[0].requires_grad_(False)
            elif change == "replace":
                flow.net[2].weight = nn.Parameter(torch.randn(32, 32, device=gpu) / 8)
            else:
                flow = Flow().to(gpu)
        same_steps(graphs, flow)
    assert len(graphs._pool) == (2 if change == "freeze" else 1)


def test_two_passes_before_their_backward_passes(gpu):
    flow = Flow().to(gpu)
    plain, (graphs, _), replayed, reference = twins(flow)
    for _ in range(3):
        step(replayed[:1], [rows_of(40)])
    flow.zero_grad()
    rows = [rows_of(40) for _ in range(3)]
    again = [(x.detach().clone().requires_grad_(), keep) for x, keep in rows]
    same(step(replayed[:1] * 3, rows), step(reference[:1] * 3, again))
    same_flows(flow, plain)
    assert graphs.running() is None


def test_memory_is_given_back(gpu):
    flow, graphs = Flow().to(gpu), graphs_of()
    device = rows_of(1)[0].device
    for _ in range(2):
        loss = graphs(flow.loss, flow, rows_of(40))
        assert len(graphs._pool) in (0, 1)
        memory.release(device)
        assert len(graphs._pool) == 0
        loss.backward()
    for captured in (0, 1, 1):
        same_steps(graphs, flow)
        assert len(graphs._pool) == captured


def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(gpu):
    flow, lines = Flow().to(gpu), []
    graphs = graphs_of(lines)

    def waits(x, keep):
        return flow.loss(x, keep) * (1 if float(keep.sum()) >= 0 else 2)

    for _ in range(4):
        rows = rows_of(40)
        loss = graphs(waits, flow, rows)
        loss.backward()
        torch.testing.assert_close(loss, flow.loss(*rows))
    assert len(lines) == 1 and lines[0].startswith("it cannot be captured in a CUDA graph: ")


def test_runs_as_it_is_without_gradients_and_on_the_cpu():
    flow, graphs, rows = Flow(), graphs_of(), (torch.randn(5, 4), torch.ones(5, dtype=torch.bool))
    for given in (rows, (rows[0].clone().requires_grad_(), rows[1])):
        for _ in range(3):
            assert torch.equal(graphs(flow.loss, flow, given), flow.loss(*given))
    assert len(graphs._pool) == 0


def test_replays_do_not_wait_for_the_gpu(cuda):
    flow, graphs = Flow().to(cuda), graphs_of()
    for _ in range(3):
        step([lambda *rows: graphs(flow.loss, flow, rows)], [rows_of(40)])
    given = [[rows_of(count)] for count in (40, 33, 37)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in given:
            step([lambda *r: graphs(flow.loss, flow, r)], rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("side", ["forward", "both"])
def test_side_stream(cuda, side):
    flow = Flow().to(cuda)
    plain, _, replayed, reference = twins(flow)
    stream = torch.cuda.Stream()
    for i in range(6):
        rows = [rows_of(2000)]
        again = [(x.detach().clone().requires_grad_(), keep) for x, keep in rows]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if i % 2 else torch.cuda.current_stream()):
            loss = replayed[0](*rows[0])
            if side == "both":
                loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        if side == "forward":
            loss.backward()
        same((loss.detach(), rows[0][0].grad), step(reference[:1], again))
        same_flows(flow, plain)
        del loss  # with autograd's nodes of the parameters, which remember a stream


def test_more_numbers_than_graphs_run_eagerly(gpu):
    """A capture that replaces a kept one would take longer than each call."""
    flow, lines = Flow().to(gpu), []
    graphs = RowGraphs("it", lines.append, lines.append, max_graphs=2)
    for _ in range(3):
        for count in (8, 40, 90):
            graphs(flow.loss, flow, rows_of(count)).backward()
    assert len(graphs._pool) == 2 and len(lines) == 2, lines
