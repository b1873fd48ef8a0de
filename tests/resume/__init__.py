import contextlib
import hashlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch


def checksum(value: object) -> str:
    """Return the checksum of tensors, numbers and strings in lists and dictionaries."""
    found = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:12]


@contextlib.contextmanager
def limits(environment: dict[str, str], empty: Path) -> Iterator[None]:
    """Limit a program to 256 open files, two cores, a home that cannot be made, no nvidia-smi and no visible GPU."""
    whole, cores, files = environment.copy(), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    environment.update(HOME="/proc/nowhere", PATH=str(empty), CUDA_VISIBLE_DEVICES="")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, files[1]))
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.sched_setaffinity(0, cores)
        environment.clear()
        environment.update(whole)
