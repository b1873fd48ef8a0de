"""What a CUDA graph of an operator has to give."""

from collections.abc import Callable

import torch
from torch import Tensor


def check_replay(step: Callable[[], list[Tensor]], inputs: list[Tensor]) -> None:
    """Capture ``step`` after a call on a side stream, change ``inputs``, and hold the replay to the bits of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in inputs:
            tensor.normal_()
    graph.replay()
    assert all(map(torch.equal, captured, step()))
