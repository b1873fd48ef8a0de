"""Traces names what a test leaves behind: replaced attributes, fakes in modules that were imported meanwhile, settings of the process."""

import importlib
import sys

import torch

from tests import traces
from torch_fastdet import memory


def test_what_is_left_is_named(monkeypatch, tmp_path):
    seen = traces.Traces()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "parse_size", lambda text: 7)
        patch.setattr(torch.Tensor, "half", lambda self: self)
        patch.setenv("ORDER", "1")
        patch.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        left = seen.look()
        torch.set_default_dtype(torch.float32)
    assert set(left) >= {"torch_fastdet.memory.parse_size", "the default dtype", "the current directory"}
    assert {"os.environ['ORDER']", "torch.Tensor.half"} <= set(left)
    assert sorted(seen.look()) == sorted(left) and seen.look() == []


def test_a_module_that_keeps_a_fake_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(traces, "PACKAGES", ("a_late_framework",))
    seen = traces.Traces()
    (tmp_path / "a_late_framework.py").write_text("from torch_fastdet.memory import parse_size\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(memory, "parse_size", lambda text: 7)
        importlib.import_module("a_late_framework")
    try:
        assert seen.look() == ["a_late_framework.parse_size (imported while a test had faked it)"]
    finally:
        del sys.modules["a_late_framework"]
