"""Finds where a data loader is in its random draws, between two epochs.

Loader processes and the batch sampler work ahead. So each process notes its random states after every batch in shared memory, and the
sampler before every pass. A file gets the states after the last batch of the epoch.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from torch_fastdet._torch.private import after_each_fetch
from torch_fastdet.patching.protocols import UltralyticsDataset
from torch_fastdet.switches.resume_exact.files import NotOurs, State
from torch_fastdet.switches.resume_exact.state import random_states, set_random_states

CPU = torch.device("cpu")
#: The states of one process after one batch take so many bytes.
SLOT = 1 << 15
#: So many batches may be in transit in addition to those that a process works ahead.
ON_THE_WAY = 8
#: A loader process begins within so many seconds.
PATIENCE = 60.0


def _loaded(dataset: object) -> list[int]:
    """Return the images among which mosaics of Ultralytics choose: those that were loaded last."""
    return list(vars(dataset).get("buffer") or ())


def _load(dataset: UltralyticsDataset, numbers: list[int]) -> None:
    for number in numbers:
        dataset.load_image(number)


class Process:
    """Run the original ``worker_init_fn``, then set the states of a resumed run; note the states after each batch."""

    def __init__(self, stock: Callable[[int], object] | None, slots: Tensor) -> None:
        self.stock = stock
        self.slots = slots
        #: The state with which each process begins in a resumed run.
        self.begin: list[State] | None = None

    def __call__(self, number: int) -> None:
        if self.stock is not None:
            self.stock(number)
        info = get_worker_info()
        assert info is not None
        if self.begin is not None:
            _load(info.dataset, self.begin[number]["loaded"])
            set_random_states(self.begin[number]["random"], CPU)
        made = 0

        def note() -> None:
            nonlocal made
            data = pickle.dumps({"random": random_states(CPU), "loaded": _loaded(info.dataset)})
            slot = self.slots[number, made % self.slots.shape[1]]
            if len(data) <= SLOT - 8:
                slot[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            slot[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
            made += 1

        note()
        after_each_fetch(note)


class Passes:
    """Iterate over the batches of a sampler, pass after pass; note the state of the generator before each."""

    def __init__(self, batches: Any, position: Position) -> None:
        self.batches = batches
        self.position = position

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[object]:
        self.position.begin_pass(self.batches)
        return iter(self.batches)


class Position:
    """Hold the position of one loader that has not begun: one that repeats its batches by ``iterator``, or a plain ``DataLoader``."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.workers = loader.num_workers
        self.repeats = "iterator" in vars(loader)
        self.in_epoch = False
        self._epochs = 0
        self._passes: dict[int, Tensor] = {}
        self._began = 0
        self._to_put: Tensor | None = None
        if not self.repeats:
            return
        batches: Any = loader.batch_sampler
        batches.sampler = Passes(batches.sampler, self)
        if self.workers:
            ring = (loader.prefetch_factor or 2) + ON_THE_WAY
            slots = torch.zeros((self.workers, ring, SLOT), dtype=torch.uint8).share_memory_()
            loader.worker_init_fn = self._process = Process(loader.worker_init_fn, slots)

    @property
    def generator(self) -> torch.Generator:
        generator = self.loader.generator
        assert isinstance(generator, torch.Generator)
        return generator

    def begin_epoch(self) -> None:
        self.in_epoch = True
        self._epochs += 1

    def begin_pass(self, batches: Iterable[object]) -> None:
        if self._to_put is not None:
            self.generator.set_state(self._to_put)
            self._to_put = None
            for _ in batches:  # the pass that the run before made; its end draws too
                pass
        self._passes[self._began] = self.generator.get_state()
        self._began += 1
        self._passes.pop(self._began - 64, None)

    # Between two epochs ----------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what a resumed run needs, after an epoch."""
        state: State = {
            "workers": self.workers,
            "batches": len(self.loader),
            "repeats": self.repeats,
            "generator": self.generator.get_state(),
            "loaded": _loaded(self.loader.dataset),
        }
        if self.repeats:
            state["pass"] = self._passes[self._epochs - 1]
            made = self._epochs * len(self.loader)
            # Processes take turns: the next batch is that of process `made % workers`, and of process 0 in the resumed run.
            numbers = [(made + i) % self.workers for i in range(self.workers)]
            state["processes"] = [
                self._read(number, (made + self.workers - 1 - number) // self.workers) for number in numbers
            ]
        return state

    def _read(self, number: int, made: int) -> State:
        slots = self._process.slots
        slot = slots[number, made % slots.shape[1]]
        end = time.monotonic() + PATIENCE
        while not slot[:8].any() and time.monotonic() < end:  # a process that has no batch yet may still begin
            time.sleep(0.01)
        length = int.from_bytes(bytes(slot[:8].tolist()), "little")
        if not 0 < length <= SLOT - 8:
            raise ValueError(f"the random states of a loader process take {length} bytes, and {SLOT - 8} are expected")
        return pickle.loads(slot[8 : 8 + length].numpy().tobytes())

    def check(self, state: State) -> None:
        """Raise NotOurs where the state is of another loader."""
        for name, mine in (("workers", self.workers), ("batches", len(self.loader)), ("repeats", self.repeats)):
            if state[name] != mine:
                what = "loader processes" if name == "workers" else "batches in an epoch"
                raise NotOurs(f"it was trained with {state[name]} {what}, not with {mine}.")

    def put(self, state: State, begins_again: bool = False) -> None:
        """Go on from another run's :meth:`state`, before the loader makes its iterator.

        With ``begins_again`` the framework makes another iterator now, in the uninterrupted run too.
        """
        if not self.workers:
            _load(self.loader.dataset, state["loaded"])
        if not self.repeats or begins_again:
            self.generator.set_state(state["generator"])
            return
        self._to_put = state["pass"]
        if self.workers:
            self._process.begin = state["processes"]

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Enclose the making of the loader's iterator: its processes are forked inside."""
        self._epochs = int(self.in_epoch)
        self._began = 0
        self._passes.clear()
        yield
        if self.workers:
            self._process.begin = None
