"""What a CUDA graph of an operator has to give."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of ``step``, captured after a call on a side stream, and what its replays write to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def check_replay(step: Callable[[], list[Tensor]], inputs: list[Tensor]) -> None:
    """Capture ``step``, change ``inputs`` three times, and hold each replay to the bits of a call."""
    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            for tensor in inputs:
                tensor.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, step()))
