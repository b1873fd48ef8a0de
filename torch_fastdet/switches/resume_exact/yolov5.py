"""Implements ``resume_exact`` in train.py: saved with last.pt, and put back when the first resumed epoch begins.

train.py keeps the state of a training in local variables, which are read where it calls its callbacks. Two of them are written.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import DataLoader

from torch_fastdet._say import say
from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import around, in_place_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.resume_exact import files, frames
from torch_fastdet.switches.resume_exact import state as training
from torch_fastdet.switches.resume_exact.files import State
from torch_fastdet.switches.resume_exact.position import Position

PARTS = ("model", "optimizer", "scaler", "ema", "stopper")
LOCALS = ("last_opt_step", "maps")
ENDS = ("stop", "epoch", "epochs")
OF_TRAIN = (*PARTS, *LOCALS, "last", "resume", "train_loader")


class Run:
    """Follow the training that runs in this process; with ``--evolve`` one after the other."""

    def __init__(self, active: Active) -> None:
        self.active = active
        self.position: Position | None = None
        #: The state with which a resumed training continues, until its first epoch begins.
        self.state: State | None = None
        self.last: Path | None = None

    def made_loader(self, loader: DataLoader) -> None:
        """Begin the training loader again, with a position: its processes have begun to work ahead."""
        frame = frames.training_frame("train", OF_TRAIN)
        if frame is None:
            return
        found = frames.read(frame, ("resume", "weights"))
        self.state, self.last, self.position = None, None, Position(loader)
        if found["resume"]:
            with training.or_as_stocks():
                state = training.read(Path(found["weights"]))
                if state["locals"].get("stop", False):  # it was killed before it could end: no epoch is left
                    numbers = frames.read(frame, ("start_epoch", "last"))
                    self.last = Path(numbers["last"])
                    frames.write(frame, {"epochs": numbers["start_epoch"], "epoch": numbers["start_epoch"] - 1})
                    say("resume_exact: the training was over when it was killed, and ends now")
                    return
                self.position.check(state["loader"])
                self.position.put(state["loader"])
                self.state = state
        if not self.position.repeats:
            return
        own = vars(loader)
        own["iterator"] = None  # and its processes end
        if self.state is None:
            self.position.generator.manual_seed(self.position.generator.initial_seed())
        with self.position.beginning():
            own["iterator"] = DataLoader.__iter__(loader)

    def begin_epoch(self, frame: FrameType) -> None:
        found = frames.read(frame, OF_TRAIN)
        self.last = Path(found["last"])
        if self.position is None:
            return
        if (state := self.state) is not None:
            self.state = None
            with training.or_as_stocks():
                training.check(state, found["model"], found["optimizer"])
                training.put(state, *(found[name] for name in PARTS))
                last_step, maps = (state["locals"][name] for name in LOCALS)
                frames.write(frame, {"last_opt_step": last_step, "maps": maps.numpy()})
                training.cut_table(self.last.parent.parent / "results.csv", *state["table"])
                say(f"resume_exact: the training goes on from {self.last}, to the last bit")
        self.position.begin_epoch()

    def end(self) -> None:
        """End the training: last.pt has been stripped, and nothing can be resumed."""
        if self.last is not None:
            files.forget(self.last)
        self.position = self.last = None

    def state_of(self, frame: FrameType) -> State:
        assert self.position is not None and self.last is not None
        found = frames.read(frame, (*OF_TRAIN, *ENDS))
        stop = bool(found.get("stop", False)) or found["epoch"] + 1 >= found["epochs"]
        return {
            **training.take(*(found[name] for name in PARTS)),
            "loader": self.position.state(),
            "locals": {
                "last_opt_step": int(found["last_opt_step"]),
                "maps": torch.as_tensor(found["maps"]),
                "stop": stop,
            },
            "table": training.table(self.last.parent.parent / "results.csv"),
        }


def calling(active: Active, stock: Callable[..., object], _: object) -> Function:
    """Return ``Callbacks.run``, by which train.py says where it is; ``torch.save`` with it."""
    training_run = active.shared(Run)
    active.replace(torch, "save", saving(training_run, torch.save))

    @in_place_of(stock)
    def run(callbacks: object, hook: str, *args: object, **kwargs: object) -> object:
        result = stock(callbacks, hook, *args, **kwargs)
        if hook == "on_train_epoch_start":
            if (frame := frames.training_frame("train", OF_TRAIN)) is not None:
                training_run.begin_epoch(frame)
        elif hook == "on_train_epoch_end" and training_run.position is not None:
            training_run.position.in_epoch = False
        elif hook == "on_train_end":
            training_run.end()
        return result

    return run


def saving(run: Run, stock: Callable[..., None]) -> Callable[..., None]:
    """Return ``torch.save``: checkpoints of the training that runs are written whole, and last.pt with the file of torch_fastdet."""

    @in_place_of(stock)
    def save(obj: object, f: object, *args: object, **kwargs: object) -> None:
        last = run.last
        if last is None or not isinstance(f, (str, os.PathLike)) or Path(f).parent != last.parent:
            return stock(obj, f, *args, **kwargs)

        def write(path: Path) -> None:
            stock(obj, path, *args, **kwargs)

        frame = frames.training_frame("train", OF_TRAIN)
        in_training = isinstance(obj, dict) and obj.get("optimizer") is not None
        if Path(f) == last and frame is not None and in_training and run.position is not None:
            return files.write_checkpoint(last, write, lambda: run.state_of(frame))
        with files.whole(Path(f)) as path:
            write(path)

    return save


@around
def create_dataloader(active: Active, stock: Function, *args: object, **kwargs: object) -> object:
    """Give the training loader of ``create_dataloader`` a position."""
    signature = inspect.signature(stock)
    run = active.shared(Run)
    made = stock(*args, **kwargs)
    arguments = signature.bind(*args, **kwargs)
    arguments.apply_defaults()
    if arguments.arguments["augment"]:
        if arguments.arguments["rank"] != -1:
            active.cannot_apply("the training has several processes, and one is expected.")
        else:
            run.made_loader(made[0])
    return made
