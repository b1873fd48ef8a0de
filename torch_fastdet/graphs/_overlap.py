"""The backward pass and the optimizer's step on a stream of their own, so that a loop that reads its loss does not wait for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_fastdet.graphs import _capture


class Overlap:
    """A second stream for what follows the loss of a training step.

    ``loss.item()`` waits for everything on the current stream. Where the backward pass and the optimizer's step run beside that
    stream, it waits for the forward pass alone, and the host prepares the next iteration while the GPU works.

    Until :meth:`join`, nothing may look at gradients, parameters, the optimizer's state or the moving average on another stream. The
    owner of the loop knows whether that is so, and sets :attr:`allowed`.
    """

    def __init__(self) -> None:
        #: Whether backward passes may run beside the current stream now.
        self.allowed = False
        #: Whether something runs there that the current stream has not waited for.
        self.pending = False
        self._stream: torch.cuda.Stream | None = None
        self._held: list[Any] = []

    @contextlib.contextmanager
    def beside(self, device: torch.device | None = None) -> Iterator[None]:
        """While inside, the second stream is the current one. It begins when the current stream has done what it was given.

        Args:
            device: of the stream; only the first of several blocks has to name it.
        """
        if self._stream is None or (device is not None and self._stream.device != device):
            assert device is not None
            self.join()
            self._stream = _capture.new_stream(device)
        self.pending = True
        with _capture.on_stream(self._stream):
            yield

    def hold(self, things: list[Any]) -> None:
        """Keep tensors alive until :meth:`join`: the allocator would give their memory to the current stream at once."""
        self._held += things

    def join(self) -> None:
        """Make the current stream wait for the second one. The host does not wait."""
        if self.pending:
            assert self._stream is not None
            _capture.wait_for(self._stream)
            self.pending = False
            self._held.clear()
