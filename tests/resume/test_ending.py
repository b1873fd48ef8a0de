"""A training that was killed between its last save and its end ends when resumed, without another epoch."""

from collections import UserList
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from torch_fastdet.switches.resume_exact import files, ultralytics, yolov5


def saved(path: Path, stop: bool, workers: int = 0) -> None:
    """Write a checkpoint with a state that is complete as far as it is read before the first epoch."""
    loader = {
        "workers": workers,
        "batches": 2,
        "repeats": False,
        "generator": torch.Generator().get_state(),
        "loaded": [],
    }
    others = ("random", "model", "gradients", "optimizer", "scaler", "ema", "stopper")
    state = {**{name: {} for name in others}, "channels_last": [], "updates": 0, "table": []}
    state |= {"locals": {"last_opt_step": 1, "maps": torch.zeros(2), "stop": stop}, "loader": loader}
    files.write_checkpoint(path, lambda made: made.write_bytes(b"checkpoint"), lambda: state)


def train(run, last, weights, resume=True):
    """Imitate train.py's function of this name: local variables, one of which other functions see, and a loop."""
    start_epoch, epochs = 3, 5
    model = optimizer = scaler = ema = stopper = last_opt_step = maps = None
    schedule = lambda x: x / epochs  # noqa: E731
    train_loader = DataLoader(UserList([0, 1]), generator=torch.Generator())
    run.made_loader(train_loader)
    seen = []
    for epoch in range(start_epoch, epochs):
        seen.append(epoch)
    run.end()
    return seen, epoch - start_epoch + 1, schedule, (model, optimizer, scaler, ema, stopper, last_opt_step, maps)


@pytest.mark.parametrize("stop", [False, True])
def test_train_py(tmp_path, stop, capsys):
    last = tmp_path / "last.pt"
    saved(last, stop)
    seen, completed, *_ = train(yolov5.Run(None), last, last)
    assert seen == ([] if stop else [3, 4]) and completed == len(seen)
    assert bool(list(tmp_path.glob("*.resume"))) != stop, "what nobody can resume any more is removed"


@pytest.mark.parametrize("stop", [False, True])
def test_trainer_of_ultralytics(tmp_path, stop):
    saved(tmp_path / "last.pt", stop)
    events = []

    def loop(trainer):
        events.append("setup")
        ultralytics.Run().begin_epoch(trainer, None)

    trainer = SimpleNamespace(
        resume=True, args=SimpleNamespace(resume=str(tmp_path / "last.pt"), close_mosaic=0), train_loader=None
    )
    trainer.final_eval = lambda: events.append("final_eval")
    trainer.run_callbacks = events.append
    do_train = ultralytics.do_train(None, loop, None)
    if stop:
        do_train(trainer)
        assert events == ["setup", "final_eval", "on_train_end", "teardown"]
    else:
        with pytest.raises(AttributeError):  # it goes on to the loader, which is none
            do_train(trainer)
