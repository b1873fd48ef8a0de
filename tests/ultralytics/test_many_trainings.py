"""Trainings one after the other in one process leave nothing behind. `make soak` runs 100; -s prints slopes.

TRAININGS_STOCK=1 runs the original trainings for comparison.
"""

import os
from statistics import median

import pytest

soak = pytest.importorskip("benchmarks.soak", reason="scikit-learn is not installed")
COUNT = int(os.environ.get("TRAININGS", "9"))
SECONDS = 200 + 30 * COUNT
LIMIT = float(os.environ.get("TRAININGS_SECONDS", SECONDS))  # after which no training begins on a GPU
STOCK = ("--stock",) if os.environ.get("TRAININGS_STOCK") else ()
WARM_UP = 3  # caches of torch and of the host
MIB = 1 << 10  # KiB


def check(found, more=0):
    """Check that counts stay the same, but for up to ``more``, as CUDA opens files and starts threads late."""
    rest = found[WARM_UP:]
    print(f"{len(found)} trainings")
    third = len(rest) // 3
    for name in found[0]:
        values = [each[name] for each in rest]
        slope, error = soak.slope(list(range(len(rest))), values)
        print(f"{name}: {values[0]} at first, {values[-1]} at last, {slope:+.3f} ± {error:.3f} a training")
    for name in ("files", "memories", "threads", "python_threads", "owners"):
        begin, end = (max(each[name] for each in part) for part in (rest[:third], rest[-third:]))
        assert end <= begin + more, (name, [each[name] for each in found])
    for name in ("kib", "shared_kib", "gpu_kib"):
        begin, end = (median(each[name] for each in part) for part in (rest[:third], rest[-third:]))
        assert end - begin <= 8 * MIB + 0.02 * begin, (name, [each[name] for each in found])


@pytest.mark.nightly
def test_trainings_leave_nothing(program, digits, tmp_path):
    """A leaked model would show: it takes 12 MiB, its gradients and momentum as much again, and a captured shape 11 MiB."""
    check(program("many.py", digits, tmp_path, COUNT, *STOCK, seconds=SECONDS)["found"])


@pytest.mark.slow
def test_trainings_leave_nothing_on_a_gpu(cuda, program, digits, tmp_path):
    ran = program("many.py", digits, tmp_path, COUNT, *STOCK, "--device", 0, "--seconds", LIMIT, seconds=SECONDS)
    assert len(ran["found"]) >= 9
    check(ran["found"], more=2)
