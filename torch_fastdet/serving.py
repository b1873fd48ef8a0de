"""Shares one model between many threads: images that several callers submit go through ``predict`` in batches.

with Batcher(lambda images: model.predict(images, verbose=False), max_batch=16, max_wait_ms=2.0) as batcher:
    result = batcher.submit(frame).result()                                    # from any thread
"""

from __future__ import annotations

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

    One thread calls ``predict``. A batch goes out when it is full, or when its first image has waited for ``max_wait_ms``, or, if it is as
    large as any of the last 16, when no other image has come for a sixteenth of that time: callers who wait for their results before they
    submit again need not wait for the clock. While a batch is being predicted the next one fills up.

    Args:
        predict: Takes a list of images and returns a list of as many results, such as a ``YOLO`` or any other callable; for a model of
            YOLOv5's hub ``lambda images: model(images).tolist()``.
        max_batch: Images that go through ``predict`` at once, at most.
        max_wait_ms: How long the first image of a batch waits for others, in milliseconds.

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
    sizes: deque[int] = deque([max_batch], maxlen=16)  # of the last batches
    while (first := waiting.get()) is not None:
        batch, end = [first], first[2] + max_wait
        last: Any = ()
        while len(batch) < max_batch:
            left = max(end - time.monotonic(), 0)
            try:
                last = waiting.get(timeout=min(left, max_wait / 16) if len(batch) >= max(sizes) else left)
            except queue.Empty:
                break
            if last is None:
                break
            batch.append(last)
        sizes.append(len(batch))
        _answer(predict, [(image, future) for image, future, _ in batch if future.set_running_or_notify_cancel()])
        if last is None:
            return


def _answer(predict: Callable[[list[Any]], Any], batch: list[tuple[Any, Future[Any]]]) -> None:
    """Set the results of a batch. If it fails, try its images one by one, so that only the cause of an error gets it."""
    try:
        results = list(predict([image for image, _ in batch])) if batch else []
        if len(results) != len(batch):
            raise ValueError(f"Batcher: predict returned {len(results)} results for {len(batch)} images")
    except BaseException as error:
        if len(batch) == 1:
            batch[0][1].set_exception(error)
        else:
            for one in batch:
                _answer(predict, [one])
        return
    for (_, future), result in zip(batch, results):
        future.set_result(result)
