"""Implements ``resume_exact`` in Ultralytics' trainer: saved with last.pt, and put back when the first resumed epoch begins."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from torch_fastdet._say import say
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Function, Loader, Trainer
from torch_fastdet.patching.replace import around
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.resume_exact import files, frames
from torch_fastdet.switches.resume_exact import state as training
from torch_fastdet.switches.resume_exact.files import State
from torch_fastdet.switches.resume_exact.position import Position

LAST_STEP = "last_opt_step"


class WholeFile(type(Path())):  # type: ignore[misc]
    """Name a path whose bytes are written whole or not at all; ``with_state`` is what the file of torch_fastdet beside it gets."""

    with_state: Callable[[], State] | None = None

    def write_bytes(self, data: bytes) -> int:
        path = Path(self)
        if self.with_state is not None:
            return files.write_checkpoint(path, lambda made: made.write_bytes(data), self.with_state)
        with files.whole(path) as made:
            return made.write_bytes(data)


class Over(Exception):
    """Raise where the resumed training was killed when it was over: no epoch is left, only its end."""


class Run:
    """Follow one trainer's training."""

    def __init__(self) -> None:
        self.position: Position | None = None
        self.state: State | None = None
        self.begun = False

    def begin_epoch(self, trainer: Trainer, frame: FrameType) -> None:
        if not self.begun:
            self.begun = True
            if trainer.resume:
                with training.or_as_stocks():
                    self.state = training.read(Path(trainer.args.resume))
                    if self.state["locals"].get("stop", False):
                        raise Over
        # The trainer creates another loader if memory runs out.
        if self.position is None or self.position.loader is not trainer.train_loader:
            self.position = _position_of(trainer.train_loader)
        self.position.begin_epoch()
        if (state := self.state) is None:
            return
        self.state, close_mosaic = None, trainer.args.close_mosaic
        with training.or_as_stocks():
            self.position.check(state["loader"])
            training.check(state, trainer.model, trainer.optimizer)
            # If mosaics end here, the uninterrupted run also creates another iterator of its loader.
            closes = bool(close_mosaic) and trainer.start_epoch == trainer.epochs - close_mosaic
            self.position.put(state["loader"], begins_again=closes)
            training.put(state, trainer.model, trainer.optimizer, trainer.scaler, trainer.ema, trainer.stopper)
            frames.write(frame, {LAST_STEP: state["locals"][LAST_STEP]})
            trainer.accumulate = state["locals"]["accumulate"]
            training.cut_table(Path(trainer.csv), *state["table"])
            say(f"resume_exact: the training goes on from {trainer.args.resume}, to the last bit")

    def state_of(self, trainer: Trainer, frame: FrameType) -> State:
        assert self.position is not None
        return {
            **training.take(trainer.model, trainer.optimizer, trainer.scaler, trainer.ema, trainer.stopper),
            "loader": self.position.state(),
            "locals": {
                LAST_STEP: int(frames.read(frame, (LAST_STEP,))[LAST_STEP]),
                "accumulate": trainer.accumulate,
                "stop": bool(trainer.stop),
            },
            "table": training.table(Path(trainer.csv)),
        }


def obstacle_in_loader(loader: object) -> Obstacle | None:
    """Return why the place of a trainer's loader in its random draws cannot be noted; None where it can."""
    generator, sampler = getattr(loader, "generator", None), getattr(loader, "sampler", None)
    draws = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and sampler.generator is generator)
    if hasattr(loader, "iterator") and isinstance(generator, torch.Generator) and draws:
        return None
    return Obstacle("the trainer has a data loader of its own, and one of build_dataloader is expected.")


def _position_of(loader: Loader) -> Position:
    """Return the position of a training loader, noted from its next iterator on."""
    position = Position(loader)
    make = loader._get_iterator

    def _get_iterator() -> object:
        with position.beginning():
            return make()

    loader._get_iterator = _get_iterator
    return position


def _runs(_: Active) -> weakref.WeakKeyDictionary[object, Run]:
    return weakref.WeakKeyDictionary()


def _frame() -> FrameType | None:
    return frames.training_frame("_do_train", (LAST_STEP,))


def obstacle_in_loop(trainer: Trainer) -> Obstacle | None:
    """Return why the position in an accumulation cannot be read; None where it can."""
    code = getattr(inspect.unwrap(vars(trainer).get("_do_train", obstacle_in_loop)), "__code__", None)
    if code is not None and LAST_STEP in code.co_varnames:
        return None
    return Obstacle(f"{trainer.__module__}.{trainer.__name__}._do_train has no local variable {LAST_STEP}.")


@around
def run_callbacks(active: Active, stock: Function, trainer: Trainer, event: str) -> None:
    """Follow the trainer, which says by ``BaseTrainer.run_callbacks`` where it is."""
    runs = active.shared(_runs)
    stock(trainer, event)
    if trainer.world_size > 1:
        if event == "on_train_epoch_start":
            active.cannot_apply("the training has several processes, and one is expected.")
    elif event == "on_train_epoch_start" and (frame := _frame()) is not None:
        if (obstacle := obstacle_in_loader(trainer.train_loader)) is not None:
            active.cannot_apply(obstacle)
        runs.setdefault(trainer, Run()).begin_epoch(trainer, frame)
    elif event == "on_train_epoch_end" and trainer in runs and (position := runs[trainer].position) is not None:
        position.in_epoch = False
    elif event == "on_train_end" and trainer in runs:  # last.pt is stripped, and nothing can be resumed
        files.forget(Path(trainer.last))


@around
def save_model(active: Active, stock: Function, trainer: Trainer) -> object:
    """Write whole files in ``BaseTrainer.save_model``, the first with the file of torch_fastdet."""
    runs = active.shared(_runs)
    run, frame = runs.get(trainer), _frame()
    if run is None or run.position is None or frame is None:
        return stock(trainer)
    paths = {name: WholeFile(vars(trainer)[name]) for name in ("last", "best", "wdir")}
    paths["last"].with_state = lambda: run.state_of(trainer, frame)
    with own_attributes([(trainer, name, path) for name, path in paths.items()]):
        return stock(trainer)


@around
def do_train(_: object, stock: Function, trainer: Trainer, *args: object) -> object:
    """End a training that is over, of which ``BaseTrainer._do_train`` would train one epoch."""
    try:
        return stock(trainer, *args)
    except Over:
        say("resume_exact: the training was over when it was killed, and ends now")
        trainer.final_eval()
        trainer.run_callbacks("on_train_end")
        trainer.run_callbacks("teardown")
        return None
