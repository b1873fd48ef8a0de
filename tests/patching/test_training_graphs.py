"""A switch captures a model's training passes as graphs, which it replays and counts. A failed capture falls back."""

import pytest
import torch
from torch import nn

from torch_fastdet import _say
from torch_fastdet.graphs import CaptureError
from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.switch import Switch, SwitchError
from torch_fastdet.switches.cuda_graph import common as training_graphs
from torch_fastdet.switches.cuda_graph.common import TrainingGraphs


class Graphs:
    """Stand in for ModuleGraphs: raise each of ``causes`` once, then replay."""

    causes: list

    def __init__(self, model, forward, required, average, **_):
        self.forward, self.required, self.average, self.reason = forward, required, average, None
        made.append(self)

    def __call__(self, x):
        if self.required and Graphs.causes:
            self.reason = "it failed"
            raise CaptureError("Net cannot be captured") from Graphs.causes.pop(0)
        return self.forward(x) * 2 if self.reason is None else self.forward(x)


made = []


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(training_graphs, "ModuleGraphs", Graphs)
    made.clear()
    hosts = []

    def make(by_name=False):
        hosts.append(host := Host({"cuda_graph": Switch("cuda_graph", "", ())}, ()))
        host.patch({"cuda_graph": True} if by_name else {})
        active = host.on["cuda_graph"]
        return TrainingGraphs(active)

    yield make
    for host in hosts:
        host.unpatch()


def passes(run, model, x, count):
    return [run(model, x, lambda model, x: model(x)) for _ in range(count)]


def test_a_pass_is_a_replay_and_is_counted(graphs):
    Graphs.causes = []
    run, model, x = graphs(by_name=True), nn.Identity(), torch.ones(2)
    assert [y.sum().item() for y in passes(run, model, x, 2)] == [4, 4] and len(made) == 1
    assert _say.counts == {("cuda_graph", "training passes"): 2}


def test_where_a_capture_fails_the_host_runs_its_own_code(graphs, capsys):
    Graphs.causes = [RuntimeError("something else")]
    run, model, x = graphs(), nn.Identity(), torch.ones(2)
    assert [y.sum().item() for y in passes(run, model, x, 3)] == [2, 2, 2] and len(made) == 1
    assert capsys.readouterr().err.count("cuda_graph does not apply: Net cannot be captured.") == 1
    assert _say.counts == {("cuda_graph", "training passes without graphs"): 2}


def test_asked_for_by_name_it_is_an_error(graphs):
    Graphs.causes = [RuntimeError("something else")]
    with pytest.raises(SwitchError, match="cuda_graph cannot apply: Net cannot be captured"):
        passes(graphs(by_name=True), nn.Identity(), torch.ones(2), 1)
