"""What the losses of both hosts note of their targets on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from torch_fastdet._deferred import DeferredStatus


class TargetStatus:
    """What a loss notes of its targets on a GPU: errors that are raised later, and what captured graphs have ignored.

    Args:
        loss: how errors call the loss.
        describe: that of :class:`DeferredStatus`, of the operator's status and the rows of targets.
    """

    def __init__(self, loss: str, describe: Callable[[list[int], int], str | None]) -> None:
        self._loss, self._describe = loss, describe
        self.checks = DeferredStatus(describe)
        self._ignored: torch.Tensor | None = None  # bad rows, and targets that had no row
        self._counting = False

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "checks": DeferredStatus(self._describe)}

    def prepare(self, device: torch.device) -> None:
        """Make the counters, before a graph is captured."""
        if self._ignored is None or self._ignored.device != device:
            with torch.inference_mode(False):  # validation may come first, and training writes here
                self._ignored = torch.zeros(2, dtype=torch.int64, device=device)

    def note(self, status: torch.Tensor, rows: int, on_gpu: bool) -> None:
        """Arrange that bad rows are raised later; in a graph, and inside of :meth:`counting`, they are counted."""
        if not on_gpu:  # the operator has raised the error itself
            return
        if self._counting or torch.cuda.is_current_stream_capturing():
            assert self._ignored is not None
            self._ignored.add_(status[:3:2])
        else:
            self.checks.add(status, rows)
            self.checks.raise_arrived(wait=not torch.is_grad_enabled())

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        before, self._counting = self._counting, True
        try:
            yield
        finally:
            self._counting = before

    @property
    def ignored(self) -> int:
        """Bad rows that were counted so far; reading it waits for the device."""
        return 0 if self._ignored is None else int(self._ignored[0])

    def check(self) -> None:
        """Wait for the losses computed so far; raise ValueError if the targets of one had a bad row, or more than its rows."""
        self.checks.raise_arrived(wait=True)
        if self._ignored is not None and (beyond := int(self._ignored[1])):
            self._ignored[1] = 0
            raise ValueError(
                f"{self._loss}: num_targets was not from 0 to the rows of targets, and {abs(beyond)} targets were left out since "
                "the last check; give targets more rows (and capture graphs again)"
            )
