"""Test torch_fastdet.images.ahead: the order of results, errors, and the end of threads."""

import itertools
import subprocess
import sys
import threading
import time

import pytest

from tests.threads import readers
from torch_fastdet.images.ahead import following, in_order


def test_results_come_in_order_whichever_is_ready_first():
    def work(i):
        time.sleep(0.02 if i % 3 == 0 else 0)
        return i * i

    assert list(in_order(work, range(20), threads=4, ahead=6)) == [i * i for i in range(20)]
    assert list(in_order(work, [], threads=4, ahead=6)) == [] and not readers()


def test_it_is_so_far_ahead_and_no_farther():
    begun = []
    results = in_order(lambda i: begun.append(i) or i, itertools.count(), threads=2, ahead=5)
    for expected in range(3):
        assert next(results) == expected
    time.sleep(0.05)
    assert sorted(begun) == list(range(8))  # the three, and five ahead
    results.close()
    assert not readers() and sorted(begun) == list(range(8))


def test_an_error_is_raised_in_its_place():
    def work(i):
        return 1 // (i - 3)

    results = in_order(work, range(9), threads=3, ahead=4)
    assert [next(results) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not readers() and next(results, None) is None


def test_an_iterator_runs_in_a_thread_and_is_closed():
    ran, closed = [], []

    def numbers(end):
        try:
            for i in range(end):
                ran.append(threading.current_thread())
                yield i
            if end == 7:
                raise ValueError("seven")
        finally:
            closed.append(end)

    assert list(following(numbers(5), 2)) == list(range(5)) and closed == [5]
    assert threading.main_thread() not in ran and len(set(ran)) == 1
    with pytest.raises(ValueError, match="seven"):
        list(following(numbers(7), 1))
    left = following(numbers(9), 2)
    assert next(left) == 0
    del left
    assert closed == [5, 7, 9] and not readers()


def test_a_thread_goes_on_when_the_main_thread_has_ended():
    program = """
import threading, time
from torch_fastdet.images.ahead import following, in_order

def read():
    begun = in_order(str, range(5), 2, 3)
    first = next(begun)
    started.set()
    threading.main_thread().join()
    print(*in_order(str, range(3), 2, 3))
    time.sleep(0.2)  # Python ends its pools of threads
    again = following(in_order(lambda i: 1 // (i - 3), range(5), 2, 2), 1)
    print(first, *begun, next(again), next(again), next(again))
    try:
        next(again)
    except ZeroDivisionError:
        print("raised", *again)

started = threading.Event()
threading.Thread(target=read).start()
assert started.wait(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0 1 2\n0 1 2 3 4 -1 -1 -1\nraised\n", "")
