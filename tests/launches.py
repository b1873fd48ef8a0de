"""What a call asks of a GPU."""

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """While inside, a wait of the host for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launched(call: Callable[[], object]) -> list[str]:
    """The names of what ``call`` runs on the GPU, where it does not wait for it."""
    torch.cuda.synchronize()
    with no_sync(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
