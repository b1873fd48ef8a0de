"""When the trainer's backward passes and optimizer steps may run on a stream of their own.

After each iteration the trainer's progress bar reads the mean losses, which waits for the stream that computed them. Between the
backward pass and the callbacks of ``on_train_batch_end`` the loop looks at nothing else on the GPU, so that this wait need not
include the backward pass and the step: meanwhile the host prepares the next batch. Callbacks and the next forward pass join first.
Where a part of the loop is not what we know, everything stays on one stream.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from torch_fastdet._multi_tensor import unwrap
from torch_fastdet._say import say
from torch_fastdet.graphs._overlap import Overlap
from torch_fastdet.loader.fingerprint import fingerprint_of
from torch_fastdet.patching.engine import is_code_of

# What the loop does from the backward pass to on_train_batch_end: 8.4.120 to 8.4.150, 8.4.170 to 8.4.190.
KNOWN = ("02ff8ce0", "31945e02")
# Stock's methods that it calls there. None of them looks at weights or gradients.
HARMLESS = ("_get_memory", "plot_training_samples")

#: Replacements of ``optimizer_step`` that run where the backward pass did.
steps: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_of_trainers: weakref.WeakKeyDictionary[Any, Overlap] = weakref.WeakKeyDictionary()
_of_models: weakref.WeakKeyDictionary[nn.Module, Overlap] = weakref.WeakKeyDictionary()


def overlap_of(model: nn.Module) -> Overlap | None:
    """The second stream of a model that a trainer trains now, or None."""
    return _of_models.get(model)


@contextlib.contextmanager
def step_stream(trainer: Any, tensors: Callable[[], list[Any]]) -> Iterator[None]:
    """While inside, the current stream is the one that the backward pass was on. ``tensors()`` outlive the step."""
    overlap = _of_trainers.get(trainer)
    if overlap is None or not overlap.pending:
        yield
    else:
        overlap.hold(tensors())
        with overlap.beside():
            yield


def join(trainer: Any) -> None:
    overlap = _of_trainers.get(trainer)
    if overlap is not None:
        overlap.join()


def training(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``BaseTrainer._do_train``: within it, iterations are those of the loop that is known here."""

    @functools.wraps(stock)
    def _do_train(trainer: Any) -> Any:
        if not knows_loop(stock):
            say(
                "cuda_graph: BaseTrainer._do_train is not one that is known here; the host waits for each optimizer step"
            )
            return stock(trainer)
        _of_trainers[trainer] = Overlap()
        try:
            return stock(trainer)
        finally:
            _close(trainer)
            del _of_trainers[trainer]

    return _do_train


def callbacks(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``BaseTrainer.run_callbacks``: callbacks may look at everything, and their events tell where the loop is."""

    @functools.wraps(stock)
    def run_callbacks(trainer: Any, event: str) -> Any:
        _close(trainer)
        result = stock(trainer, event)
        overlap = _of_trainers.get(trainer)
        if overlap is not None and event == "on_train_batch_start" and _is_stocks(trainer, run_callbacks):
            _of_models[unwrap(trainer.model)] = overlap
            overlap.allowed = True
        return result

    return run_callbacks


def _close(trainer: Any) -> None:
    overlap = _of_trainers.get(trainer)
    if overlap is not None:
        overlap.allowed = False
        overlap.join()


def _is_stocks(trainer: Any, run_callbacks: Callable[..., Any]) -> bool:
    """Whether what the loop calls between the backward pass and the callbacks is stock's code, or ours."""
    kind, own = type(trainer), vars(trainer)
    if any(name in own for name in ("optimizer_step", "run_callbacks", *HARMLESS)):
        return False
    return (
        inspect.getattr_static(kind, "optimizer_step", None) in steps
        and inspect.getattr_static(kind, "run_callbacks", None) is run_callbacks
        and all(is_code_of(inspect.getattr_static(kind, name, None), "ultralytics") for name in HARMLESS)
    )


@functools.cache
def knows_loop(do_train: Callable[..., Any]) -> bool:
    """Whether the loop of ``do_train`` does what is known here between its backward pass and ``on_train_batch_end``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(do_train)))
    except (OSError, TypeError, SyntaxError):
        return False
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For):
            texts = [ast.unparse(statement) for statement in loop.body]
            begins = [i for i, text in enumerate(texts) if ".backward()" in text]
            ends = [i for i, text in enumerate(texts) if "'on_train_batch_end'" in text]
            if len(begins) == len(ends) == 1 and _ends_with_backward(loop.body[begins[0]]):
                return fingerprint_of(*loop.body[begins[0] + 1 : ends[0] + 1]) in KNOWN
    return False


def _ends_with_backward(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Try) and ".backward()" in ast.unparse(statement.body[-1])
