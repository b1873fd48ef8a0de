"""Shares one model between many threads, whose images go through ``predict`` in batches.

with Batcher(lambda images: model.predict(images, verbose=False), max_batch=16, max_wait_ms=2.0) as batcher:
    result = batcher.submit(frame).result()                                    # from any thread
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch_fastdet.ops._checks import check_type

__all__ = ["Batcher"]

#: Maps the thread of each Batcher to what callers have submitted.
_running: weakref.WeakKeyDictionary[threading.Thread, _Line] = weakref.WeakKeyDictionary()


class Batcher:
    """Form batches of single images that any number of threads submit, and give each caller its own result.

    One thread calls ``predict``. A batch goes out when it is full, when it holds as many images as were inside at once during the last 16
    batches, or when its first image has waited for ``max_wait_ms`` since the thread was free. So callers who wait for their results before
    they submit again share one batch, and need not wait for the clock. While a batch is being predicted the next one fills up.

    YOLOv5 and Ultralytics pad images of several shapes to one size, so what a caller gets may depend on the others' images where cameras have
    several shapes. With ``rect=False`` Ultralytics pads every image to ``imgsz``, whatever the batch holds.

    Args:
        predict: Takes a list of images and returns a list of as many results, such as a ``YOLO`` or any other callable; for a model of
            YOLOv5's hub ``lambda images: model(images).tolist()``.
        max_batch: Images that go through ``predict`` at once, at most.
        max_wait_ms: How long the first image of a batch waits for others, in milliseconds, beside the time for which a batch is predicted.

    Raises:
        TypeError: ``predict`` is not callable, ``max_batch`` not an integer, or ``max_wait_ms`` not a number.
        ValueError: ``max_batch`` is below 1, or ``max_wait_ms`` negative or infinite.
    """

    def __init__(self, predict: Callable[[list[Any]], Any], max_batch: int = 16, max_wait_ms: float = 2.0) -> None:
        if not callable(predict):
            raise TypeError(f"Batcher: predict is a {type(predict).__name__}, but a callable is expected")
        check_type("Batcher", "max_batch", max_batch, int)
        check_type("Batcher", "max_wait_ms", max_wait_ms, float)
        if max_batch < 1:
            raise ValueError(f"Batcher: max_batch is {max_batch}, but at least 1 is expected")
        if not 0 <= max_wait_ms / 1e3 <= threading.TIMEOUT_MAX:
            raise ValueError(f"Batcher: max_wait_ms is {max_wait_ms}, but a finite number of at least 0 is expected")
        self._line = _Line()
        work = predict, int(max_batch), float(max_wait_ms) / 1e3, self._line
        self._thread = threading.Thread(target=_run, args=work, name="torch_fastdet.Batcher", daemon=True)
        self._thread.start()
        _running[self._thread] = self._line
        #: Tells the thread once to end: in close(), or when nothing refers to the Batcher any more.
        self._end = weakref.finalize(self, self._line.close)

    def submit(self, image: object) -> Future[Any]:
        """Return a future of the image's result. An error of ``predict`` for this image is raised by ``future.result()``.

        Args:
            image: Whatever ``predict`` takes a list of.

        Raises:
            RuntimeError: the Batcher is closed, or a future's callback has ended its thread, such as by SystemExit.
        """
        future: Future[Any] = Future()
        self._line.join(image, future)
        return future

    def close(self) -> None:
        """Predict what has been submitted, and end the thread. Later calls do nothing."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Line:
    """Hold what callers have submitted. The thread that predicts sleeps until enough have come, and not for each of them."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[object, Future[Any], float]] = deque()
        self.changed = threading.Condition()
        self.enough = 1
        self.closed = ""  # why nobody can submit any more

    def join(self, image: object, future: Future[Any]) -> None:
        with self.changed:
            if self.closed:
                raise RuntimeError(f"Batcher: {self.closed}")
            self.waiting.append((image, future, time.monotonic()))
            if len(self.waiting) >= self.enough:
                self.changed.notify()

    def close(self, why: str = "submit() was called after close()") -> None:
        with self.changed:
            self.closed = self.closed or why
            self.changed.notify()

    def _wait(self, enough: int, end: float | None = None) -> bool:
        self.enough = enough
        left = None if end is None else max(end - time.monotonic(), 0)
        return self.changed.wait_for(lambda: len(self.waiting) >= enough or bool(self.closed), left)

    def take(self, most: int, enough: int, free: float, max_wait: float) -> list[tuple[object, Future[Any]]]:
        """Return at most ``most`` images, in order; an empty list at the end.

        Wait for ``enough`` of them until the first has waited for ``max_wait`` seconds since it came, and since ``free``.
        """
        with self.changed:
            if not self._wait(enough, free + max_wait):
                self._wait(1)
                if self.waiting:
                    self._wait(enough, self.waiting[0][2] + max_wait)
            batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), most))]
        return [(image, future) for image, future, _ in batch]


def _run(predict: Callable[[list[Any]], Any], max_batch: int, max_wait: float, line: _Line) -> None:
    peaks: deque[int] = deque([max_batch], maxlen=16)  # images inside when each of the last batches was predicted
    free = -math.inf
    batch: list[tuple[object, Future[Any]]] = []
    try:
        while batch := line.take(max_batch, min(max(peaks), max_batch), free, max_wait):
            answers = _answers(predict, [one for one in batch if one[1].set_running_or_notify_cancel()])
            peaks.append(len(batch) + len(line.waiting))  # before anybody who gets an answer submits again
            for answer in answers:
                answer()
            free = time.monotonic()
    except BaseException as error:  # of a future's callback, such as SystemExit: nobody may wait for ever
        why = f"its thread has ended by {error!r}"
        line.close(why)
        for future in [future for _, future in batch] + [future for _, future, _ in line.waiting]:
            with contextlib.suppress(BaseException):  # it has an answer, or its callback raises an error, too
                future.set_exception(RuntimeError(f"Batcher: {why}"))
        raise


@atexit.register
def _end_all() -> None:
    """Predict what has been submitted. A thread that is in PyTorch's code when the interpreter ends would abort the process."""
    for thread, line in reversed(list(_running.items())):  # a later one may submit to an earlier one
        line.close("the interpreter ends")
        thread.join()


def _answers(predict: Callable[[list[Any]], Any], batch: list[tuple[object, Future[Any]]]) -> list[Callable[[], None]]:
    """Return what sets each future. If the batch fails, its images are tried one by one, so that only the cause of an error gets it."""
    try:
        results = list(predict([image for image, _ in batch])) if batch else []
        if len(results) != len(batch):
            raise ValueError(f"Batcher: predict returned {len(results)} results for {len(batch)} images")
    except BaseException as error:
        if len(batch) == 1:
            return [functools.partial(batch[0][1].set_exception, error)]
        return [answer for one in batch for answer in _answers(predict, [one])]
    return [functools.partial(future.set_result, result) for (_, future), result in zip(batch, results)]
