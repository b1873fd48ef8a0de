"""Formulas fit the cases that benchmarks really have, and nothing is faster than its floor."""

import itertools
import json
import re
import sys

import pytest
import torch

from benchmarks import harness, report, roofline, work

FOLDERS = sorted(path for path in report.RESULTS.iterdir() if path.is_dir() and report.load(path))
IDS = [path.name for path in FOLDERS]
# More than any GPU in the results can do (989 TFLOP/s is an H200's data sheet), for folders without a measured roofline.
CEILINGS = {"fp32": 67e12, "fp16": 989e12}


def rows_of_ours(folder):
    for benchmark, rows in report.load(folder).items():
        for row in rows:
            if report.is_ours(row["variant"]):
                yield benchmark, row


def machine_of(folder) -> work.Machine | None:
    if (folder / "roofline.json").exists():
        return roofline.load_machine(folder)
    row = next(row for _, row in rows_of_ours(folder))
    return work.Machine(row["gpu"], int(row["copy_gb_per_s"]) * 1e9, CEILINGS) if row["gpu"] else None


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_every_case_of_ours_has_a_formula_or_a_reason(folder):
    cases = {(benchmark, row["case"]) for benchmark, row in rows_of_ours(folder)}
    assert cases
    for benchmark, case in cases:
        reasons = [
            why
            for (name, pattern), why in roofline.WITHOUT.items()
            if name == benchmark and re.fullmatch(pattern, case)
        ]
        assert (roofline.formula(benchmark, case) is not None) != bool(reasons), (benchmark, case)


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_nothing_is_faster_than_its_floor(folder):
    machine = machine_of(folder)
    if machine is None:
        pytest.skip("a CPU's ceilings stand in roofline.json, and this folder has none")
    placed = roofline.place(machine, report.load(folder))
    assert len(placed) > 10 or not (folder / "roofline.json").exists()
    too_fast = [(row.name, row.variant, row.share) for row in placed if row.share > 1]
    assert not too_fast


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_benchmarks_and_formulas_agree_about_the_bytes(folder):
    """A benchmark takes its bytes from benchmarks/work.py; nms alone counts the whole tensor, as rates are quoted."""
    for benchmark, row in rows_of_ours(folder):
        if benchmark in ("bbox_iou", "upsample", "multi_tensor") and row["bytes"]:
            found = roofline.formula(benchmark, row["case"], 2 if row["gpu"] else 4)
            assert found.bytes == row["bytes"], row["case"]


def row(case, variant, view, median, gpu="H200"):
    times = {"median_us": median, "low_us": median, "high_us": median, "percent_of_copy": None}
    return {"case": case, "variant": variant, "view": view, "gpu": gpu} | times


MACHINE = work.Machine("H200", 4e12, {"fp32": 60e12, "fp16": 800e12}, launch_s=1e-6)


def test_place_takes_the_fastest_of_ours_cold_where_memory_is_the_bound():
    case = "forward NCHWfp16(64,256,40,40)"  # 262 MB: 65.5 us
    rows = [
        row(case, "torch_fastdet", "graph", 60.0),
        row(case, "torch_fastdet", "cold", 131.072),
        row(case, "torch_fastdet, other", "cold", 200.0),
        row(case, "eager", "cold", 70.0),
    ]
    (placed,) = roofline.place(MACHINE, {"upsample": rows})
    assert (placed.variant, placed.view) == ("torch_fastdet", "cold")
    assert placed.share == pytest.approx(0.5)


def test_place_takes_the_graph_where_launches_are_the_bound():
    case = "CIoU loss forward+backward n=3000"
    rows = [row(case, "torch_fastdet", view, time) for view, time in (("call", 90.0), ("graph", 8.0), ("cold", 10.0))]
    (placed,) = roofline.place(MACHINE, {"bbox_iou": rows})
    assert placed.view == "graph" and placed.share == pytest.approx(0.25)  # two launches


def test_training_step_is_the_sum_of_its_kernels():
    rows = [row("yolov5s, batch 16, loop", "torch_fastdet TrainStep", "call", 13_000.0)]
    (placed,) = roofline.place(MACHINE, {"step": rows})
    assert placed.floor_s == work.yolov5_training_floor_s("s", 16, MACHINE)
    assert {step.name for step in roofline.unmeasured_steps(MACHINE, [placed])} == {
        f"yolov5{model}, batch 16, loop" for model in "nmlx"
    }


def test_table_and_plot_name_every_case(tmp_path):
    rows = [
        row("forward NCHWfp16(64,256,40,40)", "torch_fastdet", "cold", 131.0),
        row("backward NCHWfp16(64,256,40,40)", "torch_fastdet", "cold", 131.0),
    ]
    placed = roofline.place(MACHINE, {"upsample": rows})
    text = roofline.table(MACHINE, placed)
    assert text.startswith("H200: copy 4,000 GB/s") and "15.0 and 200 FLOP/B" in text
    assert (
        "| 1 | forward NCHWfp16(64,256,40,40) | 262.14 | 0.0 | 0.00 | memory | 65.5 | 131.0 (cold) | torch_fastdet | 50% |"
        in text
    )
    roofline.plot(MACHINE, placed, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_a_cpu_has_bf16_where_a_gpu_has_fp16():
    cpu = work.Machine("CPU", 25e9, {"fp32": 0.3e12, "fp16": 1.7e12}, 0.0, {1 << 14: 24e9})
    assert "and bf16 1.7 TFLOP/s" in roofline.ceilings(cpu) and "fp16" not in roofline.ceilings(cpu)
    assert "and fp16 800 TFLOP/s" in roofline.ceilings(MACHINE)


def test_again_measures_nothing(tmp_path, monkeypatch):
    for file in report.newest("cpu", "roofline.json").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = roofline.load_machine(tmp_path)
    monkeypatch.setattr(roofline, "measure_machine", None)
    monkeypatch.setattr(sys, "argv", ["roofline", "--again", "--device", "cpu", "--results", str(tmp_path)])
    roofline.main()
    assert roofline.load_machine(tmp_path) == before
    text = (tmp_path / "roofline.md").read_text()
    assert text.startswith(roofline.ceilings(roofline.load_machine(tmp_path))) and "and bf16 " in text
    assert (tmp_path / "roofline.png").exists()


WITH_ROOFLINE = [folder for folder in FOLDERS if (folder / "roofline.json").exists()]


@pytest.mark.parametrize("folder", WITH_ROOFLINE, ids=lambda folder: folder.name)
def test_a_committed_roofline_is_derived_from_its_ceilings_and_rows(folder):
    machine = roofline.load_machine(folder)
    rows, text = roofline.derive(machine, folder)
    again = "type: python -m benchmarks.roofline --again --results " + str(folder)
    assert roofline.plain(machine, rows) == json.loads(
        (folder / "roofline.json").read_text(), object_hook=sizes_are_numbers
    ), again
    assert (folder / "roofline.md").read_text() == text, again


def sizes_are_numbers(found):
    return {int(key) if key.isdecimal() else key: value for key, value in found.items()}


@pytest.mark.parametrize("leave", [False, True])
def test_roofline_says_what_the_pages_lack(leave, tmp_path, monkeypatch, capsys):
    """make bench brings the pages after it, and asks it to leave them."""
    (tmp_path / "nms.json").write_text("[]")
    monkeypatch.setattr(roofline, "measure_machine", lambda device: MACHINE)
    monkeypatch.setattr(report, "bring_pages", lambda folder: "no row")
    monkeypatch.setattr(
        sys, "argv", ["roofline", "--device", "cpu", "--results", str(tmp_path), *["--leave-pages"] * leave]
    )
    monkeypatch.setattr(report, "load_to", lambda folder: {})
    assert roofline.main() == (0 if leave else 1)
    assert ("no row" in capsys.readouterr().out) != leave


def test_steps_of_a_cpu_are_derived():
    """In fp32, so that they move twice the bytes of a GPU's, but for the optimizer's."""
    cpu = work.Machine("CPU", 25e9, {"fp32": 0.3e12, "fp16": 1.7e12})
    steps = roofline.unmeasured_steps(cpu, [])
    assert [step.name[:7] for step in steps] == [f"yolov5{model}" for model in work.YOLOV5_MULTIPLES]
    assert all(step.work.unit == "fp32" and step.measured_s is None for step in steps)
    half, optimizer = roofline.training_step("n", 16), work.yolov5_training_pieces("n", 16)["optimizer"][0]
    assert steps[0].work.bytes == 2 * half.bytes - optimizer.bytes
    assert "A training step's floor is the sum" in roofline.table(cpu, steps)


def test_bare_roofline_finds_the_rows_of_this_machine(tmp_path, monkeypatch):
    """It neither begins an empty folder of today nor asks for one."""
    environment = harness.environment(torch.device("cpu"))
    folder, other = tmp_path / "cpu-2026-01-01", tmp_path / "cpu-2026-01-02"
    case = "forward NCHWfp32(4,128,40,40)"
    for path, cpu in ((folder, environment["cpu"]), (other, "another CPU")):
        path.mkdir()
        about = environment | {"cpu": cpu}
        path.joinpath("upsample.json").write_text(json.dumps([row(case, "torch_fastdet", "call", 900.0, "") | about]))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    cpu = work.Machine("CPU", 25e9, {"fp32": 0.3e12, "fp16": 1.7e12}, 0.0, {1 << 14: 90e9})
    monkeypatch.setattr(roofline, "measure_machine", lambda device: cpu)
    monkeypatch.setattr(sys, "argv", ["roofline", "--device", "cpu"])
    brought = []
    monkeypatch.setattr(report, "bring", lambda: brought.append((folder / "roofline.md").exists()) or [])
    assert roofline.main() == 0
    assert brought == [True] and (folder / "roofline.md").read_text() in (folder / "tables.md").read_text()
    assert case in (folder / "roofline.md").read_text() and (folder / "roofline.png").exists()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, other.name}
    assert not (other / "roofline.md").exists()


def test_numbers_beside_points_do_not_overlap():
    plt = report.pyplot()
    figure, axes = plt.subplots()
    roofline._label(axes, [(str(number), 0.5, 0.5, "C0") for number in range(12)])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    plt.close(figure)


def test_every_family_has_a_title():
    """The picture takes its color from there."""
    assert {family for family, _, _ in roofline.FORMULAS} == set(roofline.TITLES)
