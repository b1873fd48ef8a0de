"""Lets ranks wait for the first rank's scan of labels in the store of their process group, not in a collective with a timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.patching.replace import in_place_of

#: In seconds; Ultralytics gives its whole process group as much.
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


def first_rank_first(_: object, stock: Callable[[int], contextlib.AbstractContextManager], __: object) -> Any:
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


def smart_ddp(_: object, stock: Callable[[Any], object], __: object) -> Any:
    """Return ``smart_DDP``, which the others reach while rank 0 reads the validation set and checks anchors."""

    @in_place_of(stock)
    def smart_DDP(model: object) -> Any:
        meet()
        return stock(model)

    return smart_DDP
