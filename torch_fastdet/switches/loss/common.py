"""Keeps what the losses of both frameworks note of their targets on a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import nn

from torch_fastdet import ops
from torch_fastdet._deferred import DeferredStatus
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.patching.by_name import CopiedAsItIs, filed_as
from torch_fastdet.patching.protocols import Names
from torch_fastdet.rewrites.all_rewrites import fewer_copies

TARGET_COLUMNS = ("image", "class", "x", "y", "w", "h")
WANTED = ("an image index of the batch", "a class index below the number of classes", *["a finite number"] * 4)


class Criterion(CopiedAsItIs):
    """Give all of Ultralytics' criteria their copies and files: a copy has the same class, a pickle the original one."""

    stock: ClassVar[type]  # set by drop_in()
    check: Callable[[], None]

    def update(self) -> None:
        """Call ``check``, and do what the original does. The trainer calls this method at the end of each epoch, if a criterion has it."""
        self.check()
        getattr(super(), "update", lambda: None)()

    def __getstate__(self) -> Names:
        return {name: value for name, value in vars(self).items() if name != "_fastdet"}

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return filed_as(self.stock, self.__getstate__())


def describe_bad_targets(op: str, status: list[int], rows: int) -> str | None:
    """Return one line on what an operator's ``status`` says of so many rows of targets; None if they are right."""
    if status[2]:
        return f"{op}: num_targets is {rows + status[2]}, but targets has {rows} rows"
    row, column = ops.yolov5_loss_fault(status)  # as v8_loss_fault
    if row < 0:
        return None
    more = f"; {status[0]} rows are bad, all of them were ignored" if status[0] > 1 else "; the row was ignored"
    return f"{op}: targets row {row}, column {column} ({TARGET_COLUMNS[column]}) is not {WANTED[column]}{more}"


class TargetStatus:
    """Hold a GPU's errors of a loss's targets, which are raised later, and the number of those that captured graphs have ignored."""

    def __init__(self, loss: str, op: str) -> None:
        self.loss, self._describe = loss, functools.partial(describe_bad_targets, op)
        self.checks = DeferredStatus(self._describe)
        self.ignored: torch.Tensor | None = None  # bad rows, and targets that had no row
        self.counting = False

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "checks": DeferredStatus(self._describe)}

    def prepare(self, device: torch.device) -> None:
        """Make the counters, before a graph is captured."""
        if self.ignored is None or self.ignored.device != device:
            with torch.inference_mode(False):  # validation may come first, and training writes here
                self.ignored = torch.zeros(2, dtype=torch.int64, device=device)

    def note(self, status: torch.Tensor, rows: int) -> None:
        """Arrange that bad rows are raised later; in a graph, and inside of :meth:`counting`, they are counted."""
        if not status.is_cuda:  # the operator has raised the error itself
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.prepare(status.device)
        if self.counting or capturing:
            assert self.ignored is not None
            self.ignored.add_(status[:3:2])
        else:
            self.checks.add(status, rows)
            self.checks.raise_arrived(wait=not torch.is_grad_enabled())


class Checked(CopiedAsItIs):
    """Give a loss what a TrainStep and a user ask about its targets."""

    _status: TargetStatus

    @property
    def ignored_targets(self) -> int:
        """Return the number of bad rows of targets ignored in CUDA graphs and inside of counting() so far. Reading it is a host sync."""
        return 0 if self._status.ignored is None else int(self._status.ignored[0])

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Ignore and count bad targets on a GPU while inside, as in a CUDA graph. Outside they are an error."""
        return own_attributes([(self._status, "counting", True)])

    @contextlib.contextmanager
    def in_step(self, model: nn.Module) -> Iterator[None]:
        """Return a context for the model and this loss in a TrainStep: bad targets are counted, and copies are avoided."""
        with fewer_copies(model), self.counting():
            yield

    def check(self) -> None:
        """Wait for the losses computed so far; raise ValueError if the targets of one had a bad row, or more than its rows."""
        status = self._status
        status.checks.raise_arrived(wait=True)
        if status.ignored is not None and (beyond := int(status.ignored[1])):
            status.ignored[1] = 0
            raise ValueError(
                f"{status.loss}: num_targets was not from 0 to the rows of targets, and {abs(beyond)} targets were left out since "
                "the last check; give targets more rows (and capture graphs again)"
            )
