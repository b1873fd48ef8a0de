"""Runs work in threads ahead of who needs it, in order."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(work: Callable[[T], R], jobs: Iterable[T], threads: int, ahead: int) -> Generator[R]:
    """Yield ``work(job)`` of each job in order, which ``threads`` threads compute up to ``ahead`` jobs early.

    An exception is raised in its result's place and ends the iteration. After that, and after ``close()``, no thread is left. Once the
    main thread has ended, jobs run in the caller's.
    """

    def begin(job: T) -> Callable[[], R]:
        try:
            return pool.submit(work, job).result
        except RuntimeError as error:
            if "shutdown" not in str(error):  # it takes no jobs, or from Python 3.12 on creates no threads
                raise
        return functools.partial(work, job)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="torch_fastdet")
    waiting: deque[Callable[[], R]] = deque()
    remaining = iter(jobs)
    try:
        waiting.extend(begin(job) for job in itertools.islice(remaining, ahead))
        while waiting:
            result = waiting.popleft()()
            waiting.extend(begin(job) for job in itertools.islice(remaining, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def following(iterator: Generator[R], ahead: int) -> Generator[R]:
    """Yield what ``iterator`` yields, which runs in a thread up to ``ahead`` items early. It is closed in the end."""
    end = object()
    with contextlib.closing(iterator):
        for item in in_order(lambda _: next(iterator, end), itertools.repeat(None), 1, ahead):
            if item is end:
                return
            yield item  # type: ignore[misc]
