"""Budgets the memory of images and graphs, and frees it when a GPU runs out of memory.

Whatever holds much memory is an :class:`Owner` and registers itself. ``TORCH_FASTDET_CACHE`` limits the images of all data sets of the
process on the host, and ``TORCH_FASTDET_GPU_CACHE`` those on a GPU; an owner counts with all its bytes from the start. Inside
:func:`with_room`, owners free what they hold, the cheapest first.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import resource
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import torch

from torch_fastdet._torch.captures import no_capture

__all__ = ["report"]

T = TypeVar("T")

HOST_BUDGET, GPU_BUDGET = "TORCH_FASTDET_CACHE", "TORCH_FASTDET_GPU_CACHE"
#: Images may take this share of the host's available memory if ``TORCH_FASTDET_CACHE`` is not set.
HOST_SHARE = 0.5
#: Images may take the first share of a GPU's memory, and leave the second one free, if ``TORCH_FASTDET_GPU_CACHE`` is not set.
GPU_SHARE, GPU_RESERVE = 1 / 16, 1 / 8
#: The host's memory is low if less than this share of it is free. Images take no more then.
RESERVE = 0.05
#: This budget keeps all images, as ``--cache ram`` does.
UNLIMITED = 1 << 62

#: Errors of CUDA, cuBLAS and cuDNN with these words mean that a GPU has no memory left.
NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "unable to find an engine",
)

#: The cost of freeing memory: images must be uploaded again, or graphs captured again.
UPLOAD, CAPTURE = range(2)


# Owners ---------------------------------------------------------------------------------------------------------------


class Owner:
    """Describe what holds much memory, of the process or of a GPU."""

    #: A plural noun for the contents of the memory.
    what: str
    #: The environment variable of the budget that it counts against, or "".
    budget: str = ""
    #: ``UPLOAD`` or ``CAPTURE``.
    cost: int = UPLOAD
    #: The device that holds the memory, or None before it is allocated.
    device: torch.device | None = torch.device("cpu")

    def held(self) -> int:
        """Return bytes that it holds or may still take."""
        raise NotImplementedError

    def used(self) -> int:
        """Return bytes that it has taken."""
        return self.held()

    def offer(self) -> str:
        """Return what :meth:`release` would give back now to the thread that calls it, in words; "" for nothing."""
        return ""

    def release(self) -> None:
        """Free the memory. Later calls run without it or allocate it again."""


# The references are weak, and there is no lock: the garbage collector may end an owner anywhere.
_owners: set[weakref.ref[Owner]] = set()


def register(owner: Owner) -> None:
    """Count this owner in, as long as it lives."""
    _owners.add(weakref.ref(owner, _owners.discard))


def owners() -> list[Owner]:
    return [owner for reference in list(_owners) if (owner := reference()) is not None]


class Row(NamedTuple):
    """Hold one line of :func:`report`."""

    what: str
    device: str
    held: int
    used: int
    budget: str


def report() -> list[Row]:
    """Return every owner that holds memory, sorted by device, the largest first."""
    rows = [Row(owner.what, str(owner.device), owner.held(), owner.used(), owner.budget) for owner in owners()]
    return sorted((row for row in rows if row.held), key=lambda row: (row.device, -row.held))


def words(nbytes: int) -> str:
    """Return a size to read: ``"1.5 GiB"``."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


# Budgets --------------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, name: str) -> int:
    """Return ``"8G"``, ``"500m"`` or ``"0"`` in bytes; ``name`` is the variable that the error names."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{name} is {text!r}, but a size such as 8G, 500M or 0 is expected")
    return int(float(match[1]) * _UNITS[match[2]])


def _asked(name: str) -> int | None:
    text = os.environ.get(name, "")
    return parse_size(text, name) if text.strip() else None


def host_budget() -> int:
    """Return bytes of the host's memory that are left of ``TORCH_FASTDET_CACHE``."""
    mine = [owner for owner in owners() if owner.budget == HOST_BUDGET]
    whole = _asked(HOST_BUDGET)
    if whole is None:  # what is used now was available before
        whole = int((machine_memory()[1] + sum(owner.used() for owner in mine)) * HOST_SHARE)
    return max(whole - sum(owner.held() for owner in mine), 0)


def waits_for_steps() -> bool:
    """Return whether images may take what the first steps leave free: ``TORCH_FASTDET_GPU_CACHE`` is not set."""
    return _asked(GPU_BUDGET) is None


def gpu_budget(device: torch.device) -> int:
    """Return bytes of a GPU's memory that are left of ``TORCH_FASTDET_GPU_CACHE``, or that are free now where that is not set."""
    mine = [owner for owner in owners() if owner.budget == GPU_BUDGET]
    whole = _asked(GPU_BUDGET)
    if whole is None:
        mine = [owner for owner in mine if owner.device == device]
        free, total = torch.cuda.mem_get_info(device)
        whole = int(min(total * GPU_SHARE, free + sum(owner.used() for owner in mine) - total * GPU_RESERVE))
    return max(whole - sum(owner.held() for owner in mine), 0)


# The host's memory ----------------------------------------------------------------------------------------------------


# Maps a controller in /proc/self/cgroup ("": version 2) to the folder of its groups, the files of a group's limit and usage, and the
# statistic of memory that the kernel would reclaim.
_GROUPS = {
    "": (
        "sys/fs/cgroup",
        [("memory.max", "memory.current", "inactive_file"), ("memory.high", "memory.current", "inactive_file")],
    ),
    "memory": ("sys/fs/cgroup/memory", [("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]),
}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@functools.cache
def _limits(root: Path) -> list[tuple[Path, str, str, str]]:
    """Return the folders of this process's control group and of all above it, in both versions, each with names of ``_GROUPS``."""
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        for place, limits in (_GROUPS[controller] for controller in controllers.split(",") if controller in _GROUPS):
            group = PurePosixPath(name.lstrip("/"))
            # A container may not see its group, but its own group is at the top.
            folders = [PurePosixPath()] if ".." in group.parts else [group, *group.parents]
            found += [(root / place / folder, *names) for folder in folders for names in limits]
    return found


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None  # not there, or "max"


def machine_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (all, available) bytes for this process: the machine's, or those of its control groups and of ``ulimit -v`` where they have less.

    Args:
        root: the folder that holds ``proc`` and the control groups.
    """
    lines = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo"))
    total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    machine = total
    for folder, limit, usage, reclaimable in _limits(root):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None and most < machine:
            statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            total = min(total, most)
            available = min(available, max(most - used + int(statistics.get(reclaimable, 0)), 0))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        mapped = "".join(_lines(root / "proc/self/statm")).split()[:1] or ["0"]
        total, available = min(total, most), min(available, max(most - int(mapped[0]) * mmap.PAGESIZE, 0))
    return total, available


def is_low() -> bool:
    """Return whether the host has so little memory left that images should take no more."""
    total, available = machine_memory()
    return available < RESERVE * total


# Out of memory --------------------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator, or CUDA and its libraries, which take memory of their own, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY)


def _cheapest(device: torch.device | None) -> list[Owner]:
    """Return the owners on a device that have something to give back, as far as they cost the least."""
    offering = [owner for owner in owners() if owner.device == device and owner.offer()]
    least = min((owner.cost for owner in offering), default=None)
    return [owner for owner in offering if owner.cost == least]


def _release(device: torch.device | None) -> str:
    """Let the cheapest owners give their memory back. What they gave, in words."""
    given = []
    for owner in _cheapest(device):
        given.append(owner.offer())
        owner.release()
    return " and ".join(given)


def release(device: torch.device) -> None:
    """Let all owners on a device give back what they may give to this thread: a trainer begins again with a smaller batch."""
    while _release(device):
        pass


def with_room(
    run: Callable[[], T],
    device: torch.device | None,
    tell: Callable[[str], None],
    error_type: type[Exception] = torch.OutOfMemoryError,
) -> T:
    """Return ``run()``. If it runs out of memory, free what the cheapest owners on the device hold, and run it again.

    ``run`` must be able to run more than once. ``tell`` takes a line each time. ``error_type`` is the type of the errors that may say
    that memory ran out; one is raised if nobody has anything left to give.
    """
    while True:
        try:
            return run()
        except error_type as error:
            if not (is_out_of_memory(error) and _cheapest(device)):
                raise
        # This runs outside the except block, whose traceback holds the tensors of the failed call.
        given = _release(device)
        tell(f"out of memory beside {given}, which are dropped; trying again")
        with no_capture():  # of another thread, which unmapping its stream's memory would end
            torch.cuda.empty_cache()
