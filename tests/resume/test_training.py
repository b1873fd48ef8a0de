"""Test the state of a training, and the local variables of the training function."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from torch_fastdet.switches.resume_exact import files, frames
from torch_fastdet.switches.resume_exact import state as training


def made(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ema = SimpleNamespace(ema=copy.deepcopy(model), updates=0)
    stopper = SimpleNamespace(best_fitness=np.array([0.25 * seed]), best_epoch=seed, possible_stop=False, patience=3)
    return model, optimizer, torch.amp.GradScaler("cpu"), ema, stopper


def steps(parts, count):
    model, optimizer, scaler, ema, _ = parts
    for _ in range(count):
        x = torch.randn(2, 3, 8, 8) * random.random() + float(np.random.rand())
        scaler.scale(model(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for average, value in zip(ema.ema.parameters(), model.parameters()):
            average.data.lerp_(value.data, 0.1)
        ema.updates += 1
    model(torch.randn(2, 3, 8, 8)).sum().backward()  # an accumulation that has begun
    return training.take(*parts)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_state_is_all_that_steps_depend_on(tmp_path):
    parts = made(1)
    steps(parts, 3)
    path = tmp_path / "last.pt"
    files.write_checkpoint(path, lambda p: p.write_bytes(b"x"), lambda: training.take(*parts))
    expected = steps(parts, 3)
    others = made(2)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    state = files.read(path)
    training.check(state, *others[:2])
    training.put(state, *others)
    assert same(steps(others, 3), expected)


def test_state_of_another_model_changes_nothing():
    state, others = training.take(*made(1)), made(2)
    others[0].append(nn.Linear(2, 2))
    with pytest.raises(files.NotOurs, match="other layers"):
        training.check(state, *others[:2])
    others = made(2)
    others[1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(files.NotOurs, match="other groups"):
        training.check(state, *others[:2])


def test_what_a_file_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"^the optimizer\['state'\] holds a object"):
        training.plain({"state": object()}, "the optimizer")


def test_table_loses_the_rows_of_epochs_that_were_not_saved(tmp_path):
    table = tmp_path / "results.csv"
    table.write_text("epoch, loss\n0, 1\n")
    length, checksum = training.table(table)
    table.write_text(table.read_text() + "1, 2\n")
    training.cut_table(table, length, checksum)
    assert table.read_text() == "epoch, loss\n0, 1\n"
    table.write_text("somebody has written another table\n")
    training.cut_table(table, length, checksum)
    assert table.read_text() == "somebody has written another table\n"


def test_local_variables_of_a_running_function_are_read_and_written():
    def callback():
        frame = frames.training_frame("train", ("last_opt_step", "other"))
        assert frames.training_frame("train", ("absent",)) is None
        seen.append(frames.read(frame, ("last_opt_step", "other", "absent")))
        frames.write(frame, {"last_opt_step": 7})

    def train():
        last_opt_step, other = -1, torch.ones(2)
        callback()
        return last_opt_step, other

    seen = []
    step, other = train()
    assert step == 7 and seen[0]["last_opt_step"] == -1 and seen[0]["other"] is other
