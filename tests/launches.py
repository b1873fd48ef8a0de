"""Inspect what a call launches on a GPU and where it waits."""

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Raise if the host waits for the GPU inside the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launched(call: Callable[[], object]) -> list[str]:
    """Return the names of what ``call`` runs on the GPU, without waiting for it."""
    torch.cuda.synchronize()
    with no_sync(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
