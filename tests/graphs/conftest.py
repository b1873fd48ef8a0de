"""Provide the GPU of these tests: a real one, or the CPU with recorded operators that stand in for CUDA graphs."""

import pytest
import torch

from tests.conftest import cuda_missing
from tests.graphs import fake_gpu


@pytest.fixture(params=["fake", "cuda"])
def gpu(request, monkeypatch) -> torch.device:
    """Run the test with graphs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda":
        if reason := cuda_missing():
            pytest.skip(reason)
    else:
        fake_gpu.install(monkeypatch)
    monkeypatch.setattr(
        fake_gpu.GPU, "device", torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
    )
    return fake_gpu.GPU.device


@pytest.fixture
def cuda(monkeypatch) -> torch.device:
    """Return the GPU for features that only a real GPU has: streams, the allocator, autocast."""
    if reason := cuda_missing():
        pytest.skip(reason)
    monkeypatch.setattr(fake_gpu.GPU, "device", torch.device("cuda", 0))
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic(same_convolutions):
    """Make results repeatable: graphs are compared with eager calls bit by bit."""
