"""val_optim's ``ap_per_class`` has the bits of each framework's, and draws the same plots."""

from __future__ import annotations

import importlib
import warnings
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from tests.conftest import with_trapz
from torch_fastdet.switches.val.average_precision import from_one_sort

HOSTS = {
    "yolov5": ("torch_fastdet.yolov5", "yolov5.utils.metrics", "yolov5.val"),
    "ultralytics": ("torch_fastdet.ultralytics", "ultralytics.utils.metrics", "ultralytics.models.yolo.detect.val"),
}
NAMES = {i: str(i) for i in range(12)}


@pytest.fixture(params=HOSTS)
def host(request, monkeypatch):
    drop_in, metrics, user = HOSTS[request.param]
    with_trapz(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics, _ = (pytest.importorskip(name, reason=f"{request.param} is not installed") for name in (metrics, user))
        drop_in, validation = map(importlib.import_module, (drop_in, f"torch_fastdet.switches.val.{request.param}"))
        yield SimpleNamespace(
            drop_in=drop_in, metrics=metrics, ours=from_one_sort(metrics.ap_per_class, validation.plotted)
        )
    drop_in.unpatch()


def detections(seed=0, n=3000, labels=400, classes=12, thresholds=10, correct=0.3, levels=0):
    """Return correctness, confidence and class of detections, and classes of labels. ``levels`` is the number of different confidences."""
    rng = np.random.default_rng(seed)
    conf = rng.beta(0.4, 3, n).astype(np.float32)
    conf = np.round(conf * levels).astype(np.float32) / levels if levels else conf
    # The columns are not nested: a detection may be correct at a threshold and wrong at a lower one.
    tp = (rng.random((n, 1)) < correct) & (rng.random((n, thresholds)) < 0.7)
    return tp, conf, *(rng.integers(0, classes, count).astype(np.float32) for count in (n, labels))


def without(classes, of):
    return of[~np.isin(of, classes)]


CASES = {
    "usual": detections(),
    "ties": detections(1, levels=20),
    "one threshold": detections(2, thresholds=1),
    "all correct": detections(3, correct=2.0),
    "none correct": detections(4, correct=0.0),
    "few": detections(5, n=7, labels=5, classes=3),
    "one": detections(6, n=1, labels=1, classes=1),
    "more correct than labels": detections(7, labels=30),
    "no detections": detections(8, n=0),
    "no labels": detections(9, labels=0),
}
CASES["classes without labels"] = (*CASES["usual"][:3], without((0, 5, 11), CASES["usual"][3]))
CASES["classes without detections"] = (
    tuple(part[CASES["ties"][2] > 3] for part in CASES["ties"][:3]) + CASES["ties"][3:]
)
CASES["fractions and negative classes"] = (*CASES["usual"][:2], CASES["usual"][2] / 2 - 1, CASES["usual"][3] / 2 - 1)
CASES["doubles"] = (CASES["usual"][0], *(part.astype(np.float64) for part in CASES["usual"][1:]))


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        assert (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs, equal_nan=True)
        )


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_stocks(host, case):
    assert_same(host.ours(*CASES[case], names=NAMES), host.metrics.ap_per_class(*CASES[case], names=NAMES))


def test_other_arrays_get_stocks(host):
    """Correctness given as numbers may differ from 0 and 1."""
    tp, *others = CASES["usual"]
    given = tp * np.float32(0.5), *others
    assert_same(host.ours(*given, names=NAMES), host.metrics.ap_per_class(*given, names=NAMES))


@pytest.mark.parametrize("case", ["usual", "classes without detections", "classes without labels"])
def test_plots_are_stocks(host, case, monkeypatch, tmp_path):
    drawn = []
    for name in ("plot_pr_curve", "plot_mc_curve"):
        monkeypatch.setattr(
            host.metrics, name, lambda *args, _name=name, **options: drawn.append((_name, args, options))
        )
    for function in (host.ours, host.metrics.ap_per_class):
        function(*CASES[case], plot=True, save_dir=tmp_path, names=NAMES, prefix="Box")
    assert len(drawn) == 8
    for (name, args, options), (stock_name, stock_args, stock_options) in zip(drawn[:4], drawn[4:]):
        assert name == stock_name and options == stock_options and len(args) == len(stock_args)
        for ours, theirs in zip(args, stock_args):
            same = ours == theirs if isinstance(theirs, (dict, type(tmp_path))) else np.array_equal(ours, theirs)
            assert same, f"{ours} is not {theirs}"


@pytest.mark.parametrize("name", ["ap_per_class", "compute_ap"])
def test_changed_code_stays(host, name, monkeypatch, capfd):
    stock = getattr(host.metrics, name)
    # A fork's function has the original name, but comes from elsewhere.
    changed = FunctionType(assert_same.__code__, vars(host.metrics), name)
    changed.__module__, changed.__qualname__ = stock.__module__, name
    monkeypatch.setattr(host.metrics, name, changed)
    before = host.metrics.ap_per_class
    said = host.drop_in.patch(val_optim=True)  # by name: the rest applies
    assert host.metrics.ap_per_class is before and any("process_batch" in line for line in said)
    assert capfd.readouterr().err.count(f"ap_per_class stays: {name} is not that of ") == 1
