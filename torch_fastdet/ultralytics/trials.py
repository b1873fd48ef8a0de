"""Starts the programs of ``YOLO.tune`` ahead: while a trial trains, the next one imports what it needs, and waits for its words.

``YOLO.tune`` starts a ``yolo`` program for each trial. Most of the time between two trials is the next program's imports, and the plots of
all trials so far. Here both run beside a trial. A program that waits has no CUDA context yet, and becomes the trial as if it started then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_fastdet.patching.protocols import Function
from torch_fastdet.patching.replace import around

#: A training imports these before its first iteration. ``deterministic=True`` asks for the second.
MODULES = "ultralytics.models", "torch._inductor.config", "torchvision", "requests", "matplotlib.font_manager"


class Waiting:
    """Start a program that imports what a training needs, and waits for its words."""

    def __init__(self, flags: Sequence[str]) -> None:
        reader, self._writer = os.pipe()
        self._around = _around()
        # Not -m: runpy warns that the package has imported this module before.
        command = [sys.executable, "-c", f"from {__name__} import main; main()", str(reader), *flags]
        self._program = subprocess.Popen(command, pass_fds=[reader])
        os.close(reader)

    def begin(self, words: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Return the program, which runs with these words; None if it would not be as one that starts now."""
        if self._program.poll() is not None or self._around != _around():
            self.end()
            return None
        with open(self._writer, "w") as words_of_it:
            json.dump(words, words_of_it)
        return self._program

    def end(self) -> None:
        os.close(self._writer)
        self._program.kill()
        self._program.wait()


def _around() -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)


class Subprocess:
    """Act as the module ``subprocess`` for the trainer. Inside of :meth:`ahead`, each ``yolo`` program begins as one that waits."""

    #: The first words of a ``yolo`` program: Python, ``-m``, torch_fastdet.ultralytics, and the switches' flags.
    command: list[str]
    plots: Plots

    def __init__(self) -> None:
        self._ahead = False
        self._next: Waiting | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        self._ahead = True
        try:
            yield
        finally:
            self._ahead = False
            if self._next:
                self._next.end()
                self._next = None
            self.plots.finish()

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        length = len(self.command)
        if not self._ahead or options != {"check": True} or command[:length] != self.command:
            return subprocess.run(command, **options)
        trial = self._next and self._next.begin(command[length:])
        trial = trial or subprocess.Popen(command)
        self._next = Waiting(self.command[3:])
        with trial:
            try:
                trial.wait()
            except BaseException:
                trial.kill()
                raise
        self.plots.finish()  # before the trainer draws
        if trial.returncode:
            raise subprocess.CalledProcessError(trial.returncode, command)
        return subprocess.CompletedProcess(command, 0)


class Plots:
    """Draw in a thread, while the next trial trains. Matplotlib allows that where it draws into files alone."""

    def __init__(self, draw: Callable[..., None]) -> None:
        self._draw = draw
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        import matplotlib

        self.finish()
        if matplotlib.get_backend().lower() != "agg":
            return self._draw(*args, **kwargs)
        self._thread = threading.Thread(target=self._try, args=(args, kwargs))
        self._thread.start()

    def _try(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        try:
            self._draw(*args, **kwargs)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        if self._thread:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error:
            raise error


@around
def with_programs_ahead(programs: Subprocess, stock: Function, *args: object, **kwargs: object) -> object:
    """Run ``Tuner.__call__``, whose programs begin ahead."""
    with programs.ahead():
        return stock(*args, **kwargs)


@contextlib.contextmanager
def _lines_held() -> Iterator[None]:
    """Keep back what the process prints: another one trains meanwhile, on the same terminal."""
    with tempfile.TemporaryFile() as held:
        kept = [(stream, os.dup(stream.fileno())) for stream in (sys.stdout, sys.stderr)]
        for stream, _ in kept:
            os.dup2(held.fileno(), stream.fileno())
        try:
            yield
        finally:
            for stream, real in kept:
                stream.flush()
                os.dup2(real, stream.fileno())
                os.close(real)
            held.seek(0)
            os.write(sys.stderr.fileno(), held.read())


def main() -> None:
    """Import what a training needs, wait for the words of a ``yolo`` command on a pipe, and run it."""
    from torch_fastdet.ultralytics.launcher import LAUNCHER, run

    reader, flags = int(sys.argv[1]), sys.argv[2:]
    sys.argv[:] = ["yolo"]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with _lines_held():
        LAUNCHER.switch_on(LAUNCHER.split(flags)[0], import_now=True)
        for module in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        with open(reader) as words:
            given = words.read()
        if not given:  # the tuning has ended
            raise SystemExit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv += json.loads(given)
    run()
