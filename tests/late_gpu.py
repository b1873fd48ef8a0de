"""Pretend on the CPU that a GPU is always behind: a loss's report arrives when somebody waits for it."""

from types import SimpleNamespace

import torch

from torch_fastdet import _deferred


class Event:
    def record(self, stream):
        self.waited_for = False

    def query(self):
        return self.waited_for

    def synchronize(self):
        self.waited_for = True


class OnGpu(torch.Tensor):
    """Pretend that a CPU tensor is on a GPU."""

    is_cuda = True


#: The training of this program notes a good status and a BAD one, and ends before either arrives.
OWN_LOOP = """
import os, sys, torch
from torch_fastdet._deferred import DeferredStatus

class Event:
    def record(self, stream): ...
    def query(self): return False
    def synchronize(self): ...

empty = torch.empty
torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)
torch.cuda.Event, torch.cuda.current_stream = Event, lambda device: None

def train():
    checks = DeferredStatus(lambda status, rows: f"row {status[0]} of {rows} is bad" if status[0] else None)
    checks.add(torch.tensor([0]), 8)
    checks.add(torch.tensor([BAD]), 8)
    return checks
"""


def install(monkeypatch):
    stand_in = SimpleNamespace(
        inference_mode=torch.inference_mode,
        empty=lambda shape, dtype, pin_memory: torch.empty(shape, dtype=dtype),
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: None),
    )
    monkeypatch.setattr(_deferred, "torch", stand_in)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
