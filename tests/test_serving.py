"""torch_fastdet.serving batches what threads submit, and returns results and errors to the right callers."""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest

from torch_fastdet.serving import Batcher


class Model:
    """Double numbers, and keep the batches that were passed."""

    def __init__(self, seconds=0.0):
        self.batches, self.seconds, self.begun = [], seconds, threading.Event()

    def __call__(self, images):
        self.batches.append(list(images))
        self.begun.set()
        time.sleep(self.seconds)
        if any(image < 0 for image in images):
            raise ValueError(f"negative: {min(images)}")
        return [2 * image for image in images]


def test_each_caller_gets_its_own_result():
    model = Model(0.001)
    with Batcher(model, max_batch=8) as batcher, ThreadPoolExecutor(16) as callers:
        results = list(callers.map(lambda i: batcher.submit(i).result(timeout=10), range(400)))
    assert results == [2 * i for i in range(400)]
    assert max(map(len, model.batches)) > 1 and all(1 <= len(batch) <= 8 for batch in model.batches)


def test_batches_keep_the_order_of_submission_and_fill_up():
    model = Model(0.05)
    with Batcher(model, max_batch=4, max_wait_ms=500) as batcher:
        began = time.monotonic()
        futures = [batcher.submit(i) for i in range(8)]
        assert [future.result(timeout=10) for future in futures] == list(range(0, 16, 2))
        assert time.monotonic() - began < 0.45, "a full batch does not wait"
    assert model.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_lone_image_waits_for_max_wait_ms_and_no_longer():
    with Batcher(Model(), max_wait_ms=100) as batcher:
        began = time.monotonic()
        assert batcher.submit(3).result(timeout=10) == 6
        assert 0.09 < time.monotonic() - began < 5


def test_callers_who_wait_for_their_results_share_one_batch():
    model = Model(0.04)
    with Batcher(model, max_wait_ms=100) as batcher:

        def camera(number):
            assert number == 0 or model.begun.wait(10)  # the others come while the first is predicted
            for _ in range(5):
                batcher.submit(number).result(timeout=10)
                time.sleep(0.003)

        with ThreadPoolExecutor(4) as callers:
            list(callers.map(camera, range(4)))
    assert [len(batch) for batch in model.batches[:4]] == [1, 4, 4, 4]


def test_an_error_goes_to_its_caller_alone():
    model = Model()
    with Batcher(model, max_batch=4, max_wait_ms=500) as batcher:
        futures = [batcher.submit(i) for i in (1, -2, 3, 4)]
        assert [f.result(timeout=10) for f in (futures[0], *futures[2:])] == [2, 6, 8]
        with pytest.raises(ValueError, match="negative: -2"):
            futures[1].result(timeout=10)
        assert batcher.submit(5).result(timeout=10) == 10, "it goes on"
    assert model.batches[:5] == [[1, -2, 3, 4], [1], [-2], [3], [4]]


def test_too_few_results_are_an_error():
    with Batcher(lambda images: images[:1], max_batch=1) as batcher:
        assert batcher.submit(1).result(timeout=10) == 1
    with Batcher(lambda images: []) as batcher, pytest.raises(ValueError, match="returned 0 results for 1 images"):
        batcher.submit(1).result(timeout=10)


def test_close_answers_what_was_submitted_and_leaves_no_thread():
    before = threading.active_count()
    batcher = Batcher(Model(0.01), max_batch=2)
    futures = [batcher.submit(i) for i in range(9)]
    batcher.close()
    batcher.close()
    assert [future.result(timeout=0) for future in futures] == list(range(0, 18, 2))
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match=r"submit\(\) was called after close\(\)"):
        batcher.submit(1)


def test_a_batcher_that_is_dropped_answers_and_leaves_no_thread():
    before = threading.active_count()
    future = Batcher(Model(), max_wait_ms=50).submit(1)
    gc.collect()
    assert future.result(timeout=10) == 2
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_program_that_ends_answers_what_was_submitted():
    program = (
        "import time; from torch_fastdet.serving import Batcher\n"
        "first = Batcher(lambda images: (time.sleep(0.05), images)[1], max_batch=1)\n"
        "batcher = Batcher(lambda images: [first.submit(image).result() for image in images], max_batch=1)\n"
        "for i in range(4): batcher.submit(i).add_done_callback(lambda future: print(future.result()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["0", "1", "2", "3"], "", 0)


def test_a_cancelled_future_is_not_predicted():
    model = Model(0.1)
    with Batcher(model, max_batch=1) as batcher:
        first, second, third = (batcher.submit(i) for i in range(3))
        assert second.cancel()
        assert (first.result(timeout=10), third.result(timeout=10)) == (0, 4)
        with pytest.raises(CancelledError):
            second.result(timeout=10)
    assert model.batches == [[0], [2]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_nobody_waits_for_a_thread_that_a_callback_has_ended(error):
    def end(_):
        raise error

    with Batcher(Model(0.1), max_batch=2) as batcher:
        first, *others = (batcher.submit(i) for i in range(5))
        first.add_done_callback(end)
        assert first.result(timeout=10) == 0
        for other in others:
            with pytest.raises(RuntimeError, match=f"its thread has ended by {error.__name__}"):
                other.result(timeout=10)
        with pytest.raises(RuntimeError, match=f"its thread has ended by {error.__name__}"):
            batcher.submit(5)


def test_numbers_of_numpy():
    with Batcher(Model(), np.int64(4), np.float32(2)) as batcher:
        assert batcher.submit(1).result(timeout=10) == 2


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"predict": 3}, TypeError, "predict is a int, but a callable is expected"),
        ({"max_batch": 0}, ValueError, "max_batch is 0, but at least 1 is expected"),
        ({"max_batch": 2.5}, TypeError, "max_batch is a float, but an integer is expected"),
        ({"max_wait_ms": "4"}, TypeError, "max_wait_ms is a str, but a number is expected"),
        ({"max_wait_ms": -1}, ValueError, "max_wait_ms is -1, but a finite number of at least 0 is expected"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Batcher(**{"predict": list, **arguments})
