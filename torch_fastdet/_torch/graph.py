"""Provides a CUDA graph whose memory goes back to the allocator behind its replays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


def new_cuda_graph() -> torch.cuda.CUDAGraph:
    return torch.cuda.CUDAGraph()


def new_event() -> torch.cuda.Event:
    """Return one that is recorded inside of graphs: streams outside of them wait for the replay that was launched last."""
    return torch.cuda.Event(external=True)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def let_wait(streams: Sequence[torch.cuda.Stream], awaited: torch.cuda.Stream) -> None:
    """Let ``streams`` wait for what ``awaited`` has to do now; nothing is done inside of a capture, which that would break."""
    if not any(map(_is_capturing, (awaited, *streams))):
        event = awaited.record_event()
        for stream in streams:
            stream.wait_event(event)


class Graph:
    """Hold a CUDA graph captured on ``streams``.

    The allocator unmaps the memory of a dropped graph once these are idle. Its last replay may still run on another stream, which they
    therefore wait for first.
    """

    def __init__(self, *streams: torch.cuda.Stream) -> None:
        self.held = new_cuda_graph()
        self.replayed_on: torch.cuda.Stream | None = None
        self._streams = streams

    def replay(self, stream: torch.cuda.Stream | None = None) -> None:
        """Replay on the current stream, which is ``stream``; it is looked up if that is None."""
        self.replayed_on = stream or current_stream(self._streams[0].device)
        self.held.replay()

    def __del__(self) -> None:
        # A forked process has no CUDA, and at the interpreter's exit modules may be gone.
        with contextlib.suppress(Exception):
            if self.replayed_on is not None:
                let_wait(self._streams, self.replayed_on)
