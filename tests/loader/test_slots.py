"""Memory for batches that is used again: never while somebody holds a batch in it."""

import copy
import gc
import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from torch_fastdet.loader import slots
from torch_fastdet.loader.slots import SLOTS, Slots, fresh_bytes

COUNT = 24


class Filled:
    """A collate_fn whose batch of ``n`` is full of that number, and larger with it."""

    def __init__(self, workers):
        self.slots = Slots(workers)

    def __call__(self, items):
        (number,) = items
        out, sent = self.slots.take(get_worker_info().id, (2, 3, 40 + number % 3))
        out.fill_(number)
        return sent, number


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(slots, "SMALL", 0)


def loader(workers=2, **options):
    return DataLoader(range(COUNT), num_workers=workers, collate_fn=Filled(workers), **options)


def check(batch, number):
    assert batch.shape == (2, 3, 40 + number % 3) and batch.dtype == torch.uint8 and (batch == number).all()


def test_a_slot_is_used_again_when_its_batch_is_let_go_of():
    own, shape = Slots(1), (2, 3, 40)
    outs, arrived = [], []
    for _ in range(SLOTS):
        out, sent = own.take(0, shape)
        outs.append(out)
        arrived.append(slots._arrive(*sent.arguments))
        assert arrived[-1].data_ptr() == out.data_ptr()
    fresh, sent = own.take(0, shape)
    assert sent is fresh and fresh.data_ptr() not in {out.data_ptr() for out in outs}
    view = arrived[1][0, 1].numpy()
    arrived.pop(1)
    assert own.take(0, shape)[0].data_ptr() not in {out.data_ptr() for out in outs}
    del view
    again, sent = own.take(0, (1, 3, 40))
    assert again.data_ptr() == outs[1].data_ptr() and sent.arguments[3] is None
    check = slots._arrive(*sent.arguments)
    assert check.shape == (1, 3, 40) and check.data_ptr() == again.data_ptr()


def test_loader_processes_use_their_slots():
    for batch, number in loader():
        check(batch, number)
    made = loader()
    for batch, number in made:
        check(batch, number)
        taken, received = slots._received[made.collate_fn.slots._number]
    assert received and taken.shape == (2, SLOTS)


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[0, 1], lambda x: x.numpy()[1], lambda x: x.detach()[..., 3]])
def test_what_somebody_holds_stays_as_it_is(hold):
    """More batches than slots, held as a tensor, as a view, or as an array."""
    held = [(hold(batch), number) for batch, number in loader()]
    assert len(held) == COUNT
    for kept, number in held:
        assert set(torch.as_tensor(kept).flatten().tolist()) == {number}


def test_what_a_forked_process_holds_stays_as_it_is():
    made = iter(loader(workers=1))
    batch, number = next(made)
    here, there = multiprocessing.Pipe()

    def look(batch):
        there.recv()
        there.send(int((batch == number).all()))

    process = multiprocessing.get_context("fork").Process(target=look, args=(batch,))
    process.start()
    del batch
    assert len([None for _ in made]) == COUNT - 1
    here.send("look")
    assert here.recv() == 1
    process.join()


def test_copies_have_slots_of_their_own():
    first = Slots(1)
    second = copy.deepcopy(first)
    assert second._number != first._number and second._marks.data_ptr() != first._marks.data_ptr()


def test_nothing_stays_when_a_loader_ends():
    before = set(slots._received)
    batch, number = next(iter(loader()))
    gc.collect()
    assert set(slots._received) == before
    check(batch, number)


def test_small_batches_have_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(slots, "SMALL", 1 << 20)
    own = Slots(1)
    out, sent = own.take(0, (3, 4))
    assert out is sent and not own._own


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 5, 7), (2, 3, 700, 500)])
def test_fresh_bytes(shape):
    first, second = fresh_bytes(shape), fresh_bytes(shape)
    assert first.shape == shape and first.dtype == torch.uint8 and first.is_contiguous()
    first.fill_(1), second.fill_(2)
    assert (first == 1).all()
