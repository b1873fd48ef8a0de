"""Test pixels that loader processes send."""

import gc
import os
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_fastdet.images import worker
from torch_fastdet.images.parcel import Parcel
from torch_fastdet.images.plan import Bytes


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
    files = len(os.listdir("/proc/self/fd"))
    kept = list(loader)
    assert all((batch == number).all() for number, batch in enumerate(kept))
    assert len({batch.data_ptr() for batch in kept}) == len(kept)
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < files + 12  # they are closed
    for number, batch in enumerate(loader):
        assert (batch == number).all() and type(batch) is torch.Tensor
        batch.mul_(0)  # the loop's own


def test_too_many_open_files_are_one_error(monkeypatch, caplog):
    def full(*_):
        raise OSError(24, "Too many open files")

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match="Too many open files"):
        Parcel((8,))
    gc.collect()
    assert not unraisable
    own = Bytes()
    own.add(np.arange(worker.SMALL, dtype=np.uint32).view(np.uint8))
    assert np.array_equal(worker._for_another_process(own), own.joined()), "through the pipe"
    assert "copied through a pipe: [Errno 24] Too many open files" in caplog.text
