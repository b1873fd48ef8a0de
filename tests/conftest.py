"""Provide the device fixture and a fixed seed to all tests."""

import os
import re
from collections.abc import Collection, Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import setuptools  # noqa: F401  before distutils, which YOLOv5's packages import; torch.compile imports both and fails otherwise
import torch

import torch_fastdet
from tests import traces
from torch_fastdet import _say

# Without these variables, importing Ultralytics accesses the network.
os.environ |= {"YOLO_OFFLINE": "true", "ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS": "true"}


def spread_over_gpus() -> None:
    """Give each process of pytest-xdist another GPU as its first one if there are several."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    gpus = list(map(str, range(torch.cuda.device_count())))
    if worker.startswith("gw") and len(gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(worker.removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


spread_over_gpus()
# Tests check the lines about each replacement.
os.environ.setdefault(_say.LEVEL, "debug")


def cuda_missing() -> str | None:
    """Return why CUDA tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    if torch_fastdet.build_info()["cuda"] is None:
        return "torch_fastdet is built for the CPU only"
    return None


def gpus_missing(wanted: int = 2) -> str | None:
    """Return why tests with so many GPUs cannot run here, or None."""
    return cuda_missing() or (None if torch.cuda.device_count() >= wanted else f"needs {wanted} GPUs")


#: Tests that need two GPUs have these marks.
TWO_GPUS = (pytest.mark.two_gpus, pytest.mark.gpu)


def some_slow(cases: Iterable[Any], quick: Collection[Any], mark: Any = pytest.mark.slow) -> list[Any]:
    """Return the cases for ``parametrize``. All but the quick ones are marked slow, or with ``mark``."""
    return [pytest.param(case, marks=[mark] * (case not in quick)) for case in cases]


def with_trapz(patch: pytest.MonkeyPatch) -> None:
    """Give numpy 2.4 and newer the name trapz, which YOLOv5 calls."""
    if not hasattr(np, "trapz"):
        patch.setattr(np, "trapz", np.trapezoid, raising=False)


# Tests with these fixtures start programs of YOLOv5 or Ultralytics, which run on the CPU.
PROGRAMS = {"real_yolov5", "ultralytics_environment"}


# Tests of these modules share what takes long to make, so one process of pytest-xdist runs the whole module and makes it once. The first
# group shares the trainings of tests/yolov5/conftest.py's `train`.
TRAININGS = re.compile(r"tests/yolov5/test_(options|real_scripts)\.py")
SHARING = re.compile(
    r"tests/(distributed|examples|golden|ultralytics)/|tests/yolov5/test_(loader|nms)_switch\.py|"
    r"tests/packaging/test_cmake\.py|tests/test_(readme|stock_kinds)\.py"
)


def shared(nodeid: str) -> str | None:
    """Return the name of what the test shares with others, or None for a test that any process may run."""
    path = nodeid.split("::")[0]
    if TRAININGS.match(path):
        return "trainings of YOLOv5"
    return path if SHARING.match(path) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedule for ``--dist loadgroup``: tests that share something run together, the others one by one, in the order of collection."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared(nodeid) or nodeid

    return Scheduler(config, log)


TRAINING = re.compile(r"tests/(distributed|examples|ultralytics|yolov5)/")


def spread(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Order tests for ``--dist worksteal``. Each process begins with one stretch of the items, and each stretch begins with an equal
    share of the long tests."""
    takes_long = [bool(TRAINING.match(item.nodeid) or item.get_closest_marker("slow")) for item in items]
    first, then = ([item for item, long in zip(items, takes_long) if long is wanted] for wanted in (True, False))
    ends = [len(then) * process // processes for process in range(processes + 1)]
    stretches = (first[i::processes] + then[ends[i] : ends[i + 1]] for i in range(processes))
    return [item for stretch in stretches for item in stretch]


def mark(items: list[pytest.Item]) -> set[pytest.Item]:
    """Mark tests as `gpu` or `cpu` by their fixtures: ``make test-gpu`` runs the former and leaves the latter out.

    Return those that only a GPU runs.
    """
    on_gpu = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        devices = {parameters[name] for name in ("device", "gpu") if name in parameters}
        if "cuda" in item.fixturenames or "cuda" in devices:
            item.add_marker("gpu")
            on_gpu.add(item)
        elif devices or (PROGRAMS.intersection(item.fixturenames) and not item.get_closest_marker("gpu")):
            item.add_marker("cpu")
    return on_gpu


MOST_CASES = 3


def leave_to_the_nightly_job(items: list[pytest.Item]) -> None:
    """Mark most of the cases of a test with more than MOST_CASES as nightly. Each value of each parameter keeps at least one case.

    Those on the diagonal stay, where the parameters change together, and others until no value is missing.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if len(cases) <= MOST_CASES:
            continue
        ids = [list(dict.fromkeys(column)) for column in zip(*sorted(item.callspec._idlist for item in cases))]
        longest = max(range(len(ids)), key=lambda number, ids=ids: len(ids[number]))
        places = {
            item: tuple(values.index(value) for values, value in zip(ids, item.callspec._idlist)) for item in cases
        }
        on_diagonal = {
            item: all(place == at[longest] % len(values) for place, values in zip(at, ids))
            for item, at in places.items()
        }
        seen: set[tuple[int, int]] = set()
        for item in sorted(cases, key=lambda item: (not on_diagonal[item], places[item])):
            if seen.issuperset(enumerate(places[item])):
                item.add_marker("nightly")
            seen.update(enumerate(places[item]))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    on_gpu = mark(items)
    leave_to_the_nightly_job([item for item in items if item not in on_gpu])
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
    if config.getoption("loadgroup", False):  # in a process of pytest-xdist: long tests begin first
        items.sort(key=lambda item: (shared(item.nodeid) is None, item.get_closest_marker("slow") is None))
    if len(on_gpu) < len(items) and cuda_missing():  # some thousands: one line of pytest's in place of one each
        config.hook.pytest_deselected(items=list(on_gpu))
        items[:] = [item for item in items if item not in on_gpu]
    result = yield  # in which -m chooses
    if hasattr(config, "workerinput") and not config.getoption("loadgroup", False):
        items[:] = spread(items, config.workerinput["workercount"])
    return result


# These tests replace names of a framework.
TRACES, RAN = pytest.StashKey[traces.Traces](), pytest.StashKey[bool]()
IN_FRAMEWORKS = re.compile(r"tests/((patching|ultralytics|yolov5)/|test_(limits|stock_kinds)\.py)")


def pytest_collection_finish(session):
    if session.items:
        traces.note_fakes()
        if any(IN_FRAMEWORKS.match(item.nodeid) for item in session.items):
            traces.import_everything()
        session.stash[TRACES] = traces.Traces()


def pytest_runtest_call(item):
    item.stash[RAN] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if item.stash.get(RAN, False) and (changed := item.session.stash[TRACES].look()):
        pytest.fail(f"the test left a trace, not as before: {', '.join(changed)}", pytrace=False)
    return result


def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope != "function":  # whichever test is the first to ask for it
        traces.seed()


@pytest.fixture(params=["cpu"] if cuda_missing() else ["cpu", "cuda"])
def device(request) -> torch.device:
    """Run the test once on the CPU and once on the GPU, where there is one."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """Return the GPU for tests of features that only a GPU has: streams, graphs, several devices."""
    if reason := cuda_missing():
        pytest.skip(reason)
    return torch.device("cuda")


@pytest.fixture
def same_convolutions():
    """Let a GPU's convolutions give the same bits in each run, in full float32."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def _seed():
    traces.seed()


@pytest.fixture(autouse=True)
def _environment():
    """Restore what a framework's trainer or predictor sets, such as CUBLAS_WORKSPACE_CONFIG."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _lines_on_stderr():
    """Show lines of the package as after ``patch()``, because pytest's own handlers are not a user's."""
    with pytest.MonkeyPatch.context() as patch:  # apart from the tests' own, which they may undo
        patch.setattr(_say, "is_configured", lambda: False)
        for of_other_tests in (_say.counts, _say.fallbacks, _say._showing):
            of_other_tests.clear()
        _say.show("tests")
        yield
        _say.hide("tests")


@pytest.fixture(autouse=True)
def _cuda_survives():
    """End this process after a test that broke its CUDA context, where every later test would fail with the same error."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # the test is reported as a crash, and a new worker goes on
        pytest.exit(f"the last test broke the CUDA context: {error}", returncode=1)
