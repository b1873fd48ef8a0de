"""What the demo concludes from two runs: verdict, table, results.json and pictures, on runs that are made up."""

from __future__ import annotations

import json

import pytest
from PIL import Image

pytest.importorskip("tabulate")

from examples.demo import report
from examples.demo.__main__ import what_it_shows
from examples.demo.training import FASTDET, STOCK, Machine, Progress, Run, Variant, read_results

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


def test_switches_that_did_not_apply_are_not_listed():
    assert list(report.replaced_by_switch(SAID)) == ["bbox_iou_optim"]


def test_runs_that_agree_pass(runs):
    assert failed(*runs) == []


def test_run_that_learnt_too_little_fails(tmp_path, runs):
    weak = [made_up(tmp_path, STOCK, map50=0.79), made_up(tmp_path, FASTDET, map50=0.79, said=SAID)]
    assert failed(*weak) == [
        "stock ends at mAP50 0.790; at least 0.8 is expected",
        "torch_fastdet ends at mAP50 0.790; at least 0.8 is expected",
    ]


def test_quick_look_does_not_ask_for_map(tmp_path):
    assert failed(made_up(tmp_path, STOCK, 2, 0.01), made_up(tmp_path, FASTDET, 2, 0.01, said=SAID)) == []


def test_runs_that_learn_differently_fail(tmp_path, runs):
    sentences = failed(runs[0], made_up(tmp_path, FASTDET, map50=0.96, said=SAID))
    assert [sentence.split(" differs")[0] for sentence in sentences] == ["mAP50"]
    sentences = failed(runs[0], made_up(tmp_path, FASTDET, map50=0.98, said=SAID))
    assert [sentence.split(" differs")[0] for sentence in sentences] == ["mAP50", "mAP50-95"]


def test_runs_that_compute_differently_fail_also_in_a_quick_look(tmp_path):
    quick = made_up(tmp_path, STOCK, 2), made_up(tmp_path, FASTDET, 2, loss=0.051, said=SAID)
    assert failed(*quick) == [
        f"train {name} loss differs by 2.00% over the first 5 iterations; up to 0.5% is allowed"
        for name in ("box", "obj", "cls")
    ]


def test_run_without_a_single_iteration_fails(tmp_path, runs):
    runs[1].progress.losses.clear()
    assert [sentence.split("; ")[0] for sentence in failed(*runs)] == [
        f"train {name} loss differs by 0.00% over the first 0 iterations" for name in ("box", "obj", "cls")
    ]


def test_nan_fails(tmp_path, runs):
    nan = made_up(tmp_path, FASTDET, map50=float("nan"), loss=float("nan"), said=SAID)
    assert len(failed(runs[0], nan)) == 6


def test_run_that_stopped_early_fails(tmp_path, runs):
    early = made_up(tmp_path, FASTDET, epochs=12, said=SAID)
    assert failed(runs[0], early) == ["stock trained 30 epochs, torch_fastdet 12"]


def test_run_in_which_nothing_was_replaced_fails(tmp_path, runs):
    nothing = made_up(tmp_path, FASTDET, said=SAID[2:])
    assert failed(runs[0], nothing) == ["switches that replaced something: none"]


def test_table(runs):
    lines = report.table(*runs).splitlines()
    assert lines[0].split() == ["after", "epoch", "30", "stock", "torch_fastdet", "difference"]
    cells = {line[: line.index("  ")]: line.split()[-3:] for line in lines[2:] if "  " in line.strip()}
    assert cells["mAP50"] == ["0.8800", "0.8700", "-0.0100"]
    assert cells["train box loss"] == ["0.0500", "0.0500", "+0.0000"]
    assert next(line for line in lines if line.startswith("seconds an iteration")).endswith("2.00x as fast")
    assert [line.strip() for line in lines[-len(SAID) :]] == SAID


def test_results_json(tmp_path, runs):
    path = tmp_path / "results.json"
    report.write_json(path, *runs, report.checks(*runs), {"machine": "abacus"})
    results = json.loads(path.read_text())
    assert results["machine"] == "abacus" and results["passed"] is True
    assert list(results["replaced"]) == ["bbox_iou_optim"] and len(results["replaced"]["bbox_iou_optim"]) == 2
    assert results["said"] == SAID
    assert results["runs"]["stock"]["final"]["mAP50"] == pytest.approx(0.88)
    assert results["runs"]["fastdet"]["seconds_an_iteration"] == pytest.approx(0.1)
    assert len(results["runs"]["fastdet"]["epochs"]) == 30
    assert results["runs"]["fastdet"]["command"][-2:] == ["-m", "yolov5.train"]


def test_curves(tmp_path, runs):
    report.plot_curves(tmp_path / "curves.png", *runs)
    with Image.open(tmp_path / "curves.png") as image:
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_a_quick_look_shows_what_two_epochs_can(tmp_path, monkeypatch):
    """The losses of each iteration: no mAP and no validation of a network that has learnt nothing."""
    quick = made_up(tmp_path, STOCK, 2), made_up(tmp_path, FASTDET, 2, said=SAID)
    text = report.table(*quick)
    assert "train box loss" in text and "mAP" not in text and "val box loss" not in text
    drawn = []
    monkeypatch.setattr(report.plt.Axes, "plot", lambda axis, x, y, **_: drawn.append((list(x), list(y))))
    report.plot_curves(tmp_path / "curves.png", *quick)
    assert len(drawn) == 6 and drawn[0] == (list(range(1, 11)), [0.05] * 10)


@pytest.mark.parametrize("device, first", [("cpu", "No GPU is used here"), ("0", "What you see")])
def test_it_says_first_what_it_shows(device, first):
    machine = Machine(device, 128, 0, "")
    assert what_it_shows(machine, 2).startswith(first) and "learns the same" in what_it_shows(machine, 30)
    assert "learns" not in what_it_shows(machine, 2)


def test_detections(tmp_path):
    for name in ("images/val", "labels/val", "found"):
        (tmp_path / name).mkdir(parents=True)
    for index in range(3):
        Image.new("RGB", (64, 64), "gray").save(tmp_path / f"images/val/{index:05d}.jpg")
        (tmp_path / f"labels/val/{index:05d}.txt").write_text("3 0.5 0.5 0.25 0.5\n")
    found = {"stock": tmp_path / "found"}
    report.draw_detections(tmp_path / "without.png", tmp_path / "data.yaml", found)
    (tmp_path / "found/00001.txt").write_text("3 0.5 0.5 0.25 0.5 0.91\n")
    report.draw_detections(tmp_path / "with.png", tmp_path / "data.yaml", found)
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_results_csv_is_read_by_name(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(
        "               epoch,      train/box_loss,     metrics/mAP_0.5\n                   0,             0.11,    0.5\n"
    )
    assert read_results(path) == [{"epoch": 0.0, "train/box_loss": 0.11, "metrics/mAP_0.5": 0.5}]
