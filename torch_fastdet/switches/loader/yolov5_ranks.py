"""Lets ranks wait for the first rank's scan of labels in the store of their process group, not in a collective with a timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import in_place_of

#: Seconds to wait, as many as Ultralytics gives its whole process group.
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


def first_rank_first(_: object, stock: Callable[[int], contextlib.AbstractContextManager], __: object) -> Function:
    """Return ``torch_distributed_zero_first``: its barrier comes when the first rank of each machine is ready."""

    @in_place_of(stock)
    @contextlib.contextmanager
    def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
        if local_rank > 0:
            meet()
        with stock(local_rank):
            yield
            if local_rank == 0:
                meet()

    return torch_distributed_zero_first


def smart_ddp(_: object, stock: Function, __: object) -> Function:
    """Return ``smart_DDP``, which the others reach while rank 0 reads the validation set and checks anchors."""

    @in_place_of(stock)
    def smart_DDP(model: object) -> object:
        meet()
        return stock(model)

    return smart_DDP
