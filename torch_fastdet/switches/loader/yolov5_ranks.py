"""Lets ranks wait for the first rank's scan of labels in the store of their process group, not in a collective with a timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import around

#: The timeout in seconds, which is that of Ultralytics' whole process group.
LONGEST = 3 * 3600.0


def meet() -> None:
    """Wait until each rank of the default group is here."""
    size = group_size()
    if size == 1:
        return
    store = private.default_store()
    arrived = store.add("torch_fastdet/arrived", 1)
    all_are_here = f"torch_fastdet/meeting_{(arrived - 1) // size}"
    if arrived % size == 0:
        store.set(all_are_here, "1")
    end = time.monotonic() + LONGEST
    while not store.check([all_are_here]):  # store.wait() would not see Ctrl-C
        if time.monotonic() > end:
            raise TimeoutError(f"not all of the {size} ranks came within {LONGEST / 3600:g} hours")
        time.sleep(0.05)


@around
@contextlib.contextmanager
def torch_distributed_zero_first(_: object, stock: Function, local_rank: int) -> Iterator[None]:
    """Come to the barrier of ``torch_distributed_zero_first`` when the first rank of each machine is ready."""
    if local_rank > 0:
        meet()
    with stock(local_rank):
        yield
        if local_rank == 0:
            meet()


@around
def smart_DDP(_: object, stock: Function, model: object) -> object:
    """Wait in ``smart_DDP``, which the others reach while rank 0 reads the validation set and checks anchors."""
    meet()
    return stock(model)
