"""Shares one model between many threads, whose images go through ``predict`` in batches.

with Batcher(lambda images: model.predict(images, verbose=False), max_batch=16, max_wait_ms=2.0) as batcher:
    result = batcher.submit(frame).result()                                    # from any thread
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch_fastdet.ops._checks import check_type

__all__ = ["Batcher"]


class Batcher:
    """Form batches of single images that any number of threads submit, and give each caller its own result.

    One thread calls ``predict``. A batch goes out when it is full, when it holds as many images as were inside at once during the last 16
    batches, or when its first image has waited for ``max_wait_ms`` since the thread was free. So callers who wait for their results before
    they submit again share one batch, and need not wait for the clock. While a batch is being predicted the next one fills up.

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
        self._waiting: queue.SimpleQueue[tuple[Any, Future[Any], float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        work = predict, max_batch, max_wait_ms / 1e3, self._waiting
        self._thread = threading.Thread(target=_run, args=work, name="torch_fastdet.Batcher", daemon=True)
        self._thread.start()
        #: Tells the thread to end, once: in close(), or when nobody has the Batcher any more.
        self._end = weakref.finalize(self, self._waiting.put, None)

    def submit(self, image: Any) -> Future[Any]:
        """Return a future of the image's result. An error of ``predict`` for this image is raised by ``future.result()``.

        Args:
            image: Whatever ``predict`` takes a list of.

        Raises:
            RuntimeError: the Batcher is closed.
        """
        future: Future[Any] = Future()
        with self._lock:  # nothing is submitted behind the end
            if not self._end.alive:
                raise RuntimeError("Batcher: submit() was called after close()")
            self._waiting.put((image, future, time.monotonic()))
        return future

    def close(self) -> None:
        """Predict what has been submitted, and end the thread. Later calls do nothing."""
        with self._lock:
            self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _run(
    predict: Callable[[list[Any]], Any],
    max_batch: int,
    max_wait: float,
    waiting: queue.SimpleQueue[tuple[Any, Future[Any], float] | None],
) -> None:
    peaks: deque[int] = deque([max_batch], maxlen=16)  # images inside when each of the last batches was predicted
    answered = 0.0
    while (first := waiting.get()) is not None:
        batch, end = [first], max(first[2], answered) + max_wait
        last: Any = ()
        while len(batch) < max_batch:
            try:
                last = waiting.get(timeout=0 if len(batch) >= max(peaks) else max(end - time.monotonic(), 0))
            except queue.Empty:
                break
            if last is None:
                break
            batch.append(last)
        answers = _answers(
            predict, [(image, future) for image, future, _ in batch if future.set_running_or_notify_cancel()]
        )
        peaks.append(len(batch) + waiting.qsize())  # before anybody who gets an answer submits again
        for answer in answers:
            answer()
        answered = time.monotonic()
        if last is None:
            return


def _answers(predict: Callable[[list[Any]], Any], batch: list[tuple[Any, Future[Any]]]) -> list[Callable[[], None]]:
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
