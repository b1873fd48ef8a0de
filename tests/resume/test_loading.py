"""A loader continues where that of another run stopped, with or without loader processes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_fastdet.switches.resume_exact import files
from torch_fastdet.switches.resume_exact.position import CPU, Position
from torch_fastdet.switches.resume_exact.state import random_states, set_random_states


class Draws(Dataset):
    """Draw every item with the three generators; like a mosaic, choose among the items loaded last."""

    def __init__(self):
        self.buffer = []

    def __len__(self):
        return 11

    def load_image(self, index):
        if index not in self.buffer:
            self.buffer.append(index)
            del self.buffer[:-4]

    def __getitem__(self, index):
        self.load_image(index)
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item(), random.choice(self.buffer)],
            dtype=torch.float64,
        )


class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class Infinite(DataLoader):
    """Repeat as both frameworks' loaders do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def seed_worker(_):
    random.seed(torch.initial_seed() % 2**32)
    np.random.seed(torch.initial_seed() % 2**32)


def made(workers, kind=Infinite, batch=2):
    generator = torch.Generator()
    generator.manual_seed(1)
    options = {"prefetch_factor": 3} if workers else {}
    loader = kind(
        Draws(), batch, shuffle=True, num_workers=workers, worker_init_fn=seed_worker, generator=generator, **options
    )
    return loader, Position(loader)


def begin(loader, position):
    with position.beginning():
        loader.iterator = DataLoader.__iter__(loader)


def epochs(loader, position, count):
    found = []
    for _ in range(count):
        position.begin_epoch()
        found.append([batch.tolist() for batch in loader])
        position.in_epoch = False
    return found


@pytest.mark.parametrize(
    "workers, batch",
    [(0, 11), (2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 2), (1, 3), (2, 11)))],
)
def test_resumed_loader_gives_the_batches_of_one_run(workers, batch):
    random.seed(3), np.random.seed(3)
    loader, position = made(workers, batch=batch)
    begin(loader, position)
    epochs(loader, position, 2)
    state, here = position.state(), random_states(CPU)
    expected = epochs(loader, position, 3)
    for epoch in range(2):  # the second run goes on from the first one, which was resumed too
        del loader
        random.seed(9), np.random.seed(9)
        loader, position = made(workers, batch=batch)
        position.check(state)
        position.put(state)
        begin(loader, position)
        set_random_states(here, CPU)
        assert epochs(loader, position, 1) == expected[epoch : epoch + 1]
        state, here = position.state(), random_states(CPU)
    assert epochs(loader, position, 1) == expected[2:]


def test_plain_loader_begins_each_epoch_with_its_generator():
    loader, position = made(2, DataLoader)
    epochs(loader, position, 1)
    state = position.state()
    expected = epochs(loader, position, 1)
    loader, position = made(2, DataLoader)
    position.put(state)
    assert epochs(loader, position, 1) == expected


def test_state_of_another_loader_is_refused():
    loader, position = made(0)
    begin(loader, position)
    epochs(loader, position, 1)
    state = position.state()
    with pytest.raises(files.NotOurs, match=r"^it was trained with 0 loader processes, not with 2\.$"):
        made(2)[1].check(state)
    with pytest.raises(files.NotOurs, match=r"^it was trained with 6 batches in an epoch, not with 3\.$"):
        made(0, batch=4)[1].check(state)
