"""What the demo concludes from two runs: verdict, table, results.json and pictures, on runs that are made up."""

from __future__ import annotations

import pytest

pytest.importorskip("tabulate")

from examples.demo import report
from examples.demo.training import FASTDET, STOCK, Progress, Run, Variant

SAID = [
    "bbox_iou_optim: yolov5.utils.loss.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou",
    "bbox_iou_optim: yolov5.utils.metrics.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou",
    "cuda_graph: yolov5.models.yolo.DetectionModel.forward -> torch_fastdet.switches.cuda_graph.forward",
    "cuda_graph does not apply: there is no GPU.",
]


def made_up(tmp_path, variant: Variant, epochs: int = 30, map50: float = 0.88, loss: float = 0.05, said=()) -> Run:
    rows = []
    for epoch in range(epochs):
        part = (epoch + 1) / epochs
        row = {"epoch": float(epoch), report.MAP50: map50 * part, report.MAP: 0.6 * map50 * part}
        rows.append(row | dict.fromkeys(report.LOSSES, loss * (2 - part)))
    progress = Progress()
    seconds = 0.2 if variant is STOCK else 0.1
    for epoch in range(epochs):
        for batch in range(5):
            line = f"{epoch}/{epochs}  0G  {loss}  {loss}  {loss}  80  128:  0%| | {batch}/5 [00:0"
            progress.feed(line, 10.0 * epoch + seconds * batch)
    return Run(variant, tmp_path / variant.name, rows, progress, 300.0, list(said))


@pytest.fixture
def runs(tmp_path):
    return made_up(tmp_path, STOCK), made_up(tmp_path, FASTDET, map50=0.87, said=SAID)


def failed(stock: Run, ours: Run) -> list[str]:
    return [check.sentence for check in report.checks(stock, ours) if not check.passed]


def test_runs_that_agree_pass(runs):
    assert failed(*runs) == []


def test_runs_that_compute_differently_fail_also_in_a_quick_look(tmp_path):
    quick = made_up(tmp_path, STOCK, 2), made_up(tmp_path, FASTDET, 2, loss=0.051, said=SAID)
    assert failed(*quick) == [
        f"train {name} loss differs by 2.00% over the first 5 iterations; up to 0.5% is allowed"
        for name in ("box", "obj", "cls")
    ]


def test_nan_fails(tmp_path, runs):
    nan = made_up(tmp_path, FASTDET, map50=float("nan"), loss=float("nan"), said=SAID)
    assert len(failed(runs[0], nan)) == 6


def test_run_in_which_nothing_was_replaced_fails(tmp_path, runs):
    nothing = made_up(tmp_path, FASTDET, said=SAID[2:])
    assert failed(runs[0], nothing) == ["switches that replaced something: none"]
