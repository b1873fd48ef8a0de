"""Memory that loader processes use again: never while somebody looks into it."""

import gc
import os
import pickle
import resource
import sys
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.forks import exit_status, fork
from torch_fastdet._say import saying_once, warn
from torch_fastdet.images import slots
from torch_fastdet.images.slots import FREE, LENT, Parcel


@pytest.fixture(autouse=True)
def none_before():
    gc.collect()  # also so that a forked process finds no loaders of earlier tests to end
    slots._own.clear()
    yield
    gc.collect()
    slots._own.clear()


def receive(parcel):
    return pickle.loads(ForkingPickler.dumps(parcel))


def sent(value, shape=(2, 3)):
    parcel = Parcel(shape)
    parcel.tensor.fill_(value)
    return receive(parcel)


def states():
    return [int(slot.state[0]) for slot in slots._own]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x,
        lambda x: x[1, 1:],
        lambda x: x.numpy()[0],
        lambda x: x.view(-1).split(2),
        lambda x: memoryview(x.numpy()),
    ],
    ids=["tensor", "view", "array", "split", "buffer"],
)
def test_memory_is_used_again_when_nobody_looks_into_it(look):
    seen = look(sent(1))
    gc.collect()
    other = sent(2)
    assert states() == [LENT, LENT]
    content = torch.cat(
        [torch.as_tensor(np.asarray(x)).reshape(-1) for x in (seen if isinstance(seen, tuple) else [seen])]
    )
    assert (content == 1).all() and (other == 2).all()
    del seen, content
    gc.collect()
    assert states() == [FREE, LENT]
    third = sent(3)
    assert states() == [LENT, LENT] and (third == 3).all() and (other == 2).all()
    del other, third
    gc.collect()
    assert states() == [FREE, FREE]


def test_a_forked_process_that_drops_a_batch_frees_nothing():
    batch = sent(1)

    def drop():
        nonlocal batch
        del batch
        gc.collect()

    assert exit_status(fork(drop)) == 0
    assert states() == [LENT] and (batch == 1).all()


def test_few_spare_slots_and_none_too_small_are_kept():
    kept = [sent(1) for _ in range(8)]
    del kept
    gc.collect()
    assert states() == [FREE] * 8
    one = sent(2)
    assert states() == [LENT] + [FREE] * slots.SPARE
    large = sent(3, (20, 3))
    assert states() == [LENT, LENT] and (one == 2).all() and (large == 3).all()
    small = sent(4, (1,))
    assert states() == [LENT] * 3 and small.shape == (1,)


class Batches(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        parcel = Parcel((50, 1000))
        parcel.tensor.fill_(index)
        return parcel


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_of_loader_processes(method):
    loader = DataLoader(Batches(), batch_size=None, num_workers=1 + (method == "fork"), multiprocessing_context=method)
    kept = list(loader)
    assert all((batch == number).all() for number, batch in enumerate(kept))
    files = len(os.listdir("/proc/self/fd"))
    addresses = [batch.data_ptr() for batch in kept]
    assert len(set(addresses)) == len(kept)
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files - 12  # nothing is left open
    for number, batch in enumerate(loader):
        assert (batch == number).all() and type(batch) is torch.Tensor
        batch.mul_(0)  # the loop's own


def test_too_many_open_files_are_one_error(monkeypatch):
    def full(*_):
        raise OSError(24, "Too many open files")

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match="Too many open files"):
        slots._OwnSlot(8)
    gc.collect()
    assert not unraisable


def test_batches_go_through_a_pipe_where_memory_is_refused(caplog, monkeypatch):
    """As ``ulimit -f`` makes it: the limit is in bytes of one file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(slots, "_say_once", saying_once("loader_optim", warn))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with caplog.at_level("WARNING", "torch_fastdet"):
            batches = list(DataLoader(Batches(), batch_size=None, num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(batches) == 12
    assert all(batch.shape == (50, 1000) and (batch == number).all() for number, batch in enumerate(batches))
    batches[0].mul_(0)  # the loop's own
    (record,) = caplog.records
    assert "through a pipe, because there is no memory to share: [Errno 27] File too large" in record.message
