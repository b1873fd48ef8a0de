"""Under real predictors and validators cuda_graph gives the bits of the original, whichever the task."""

import functools

import pytest

from tests.conftest import some_slow

FAMILIES = ("yolov8n", "yolo26n", "yolov10n", "segment", "segment26", "pose", "obb", "classify", "rtdetr")
QUICK = ("yolov8n", "segment", "odd", "augment", "hooks")  # for each change
ON_THE_CPU = ("yolov8n", "yolo26n", "segment", "pose", "obb", "classify", "rtdetr")  # one of each kind of head
CASES = ("grey", "odd", "stream", "augment", "embed", "hooks", "weights", "settings", "pickled", "validate", "threads")
FIRST = "cuda_graph: ultralytics.nn.backends.pytorch.PyTorchBackend.forward -> torch_fastdet."
BEGUN = "answers by CUDA graphs from now on, one for each input shape"


def check(found):
    assert found["same"], "other results than stock's"
    assert found["numbers"] > 0
    assert any(line.startswith(FIRST) for line in found["said"])


@pytest.fixture(scope="module")
def predicted(program, digits):
    """Run a group of cases once: those of every change, all others, or all other families."""
    run = functools.cache(lambda *cases: program("predictions.py", digits, *cases))
    groups = [QUICK, *([case for case in cases if case not in QUICK] for cases in (CASES, ON_THE_CPU))]
    return lambda case: run(*next(group for group in groups if case in group))[case]


@pytest.mark.parametrize("family", some_slow(ON_THE_CPU, QUICK, pytest.mark.nightly))
def test_families(predicted, family):
    found = predicted(family)
    check(found)
    square = family in ("classify", "rtdetr")
    assert [len(shapes) for shapes in found["shapes"]] == [1 if square else 2]
    assert found["said"][-1].endswith(BEGUN)


@pytest.mark.parametrize("case", some_slow(CASES, QUICK))
def test_cases(predicted, case):
    found = predicted(case)
    check(found)
    captured = sum(map(len, found["shapes"]))
    assert captured == 0 if case in ("augment", "embed") else captured > 0
    last = found["said"][-1]
    if case in ("augment", "embed"):
        assert (
            last == "cuda_graph: predictions with augment=, embed= or other arguments of the model run without graphs"
        )
    elif case == "hooks":
        assert last.endswith("has hooks, which a replay would not call; it runs eagerly")
    else:
        assert last.endswith(BEGUN)


def test_on_a_gpu(cuda, program, digits):
    cases = [*FAMILIES, *CASES, "half"]
    found = program("predictions.py", digits, *cases, "--device", 0)
    for case in cases:
        check(found[case])
        assert case in ("augment", "embed") or any(found[case]["shapes"]), case
