"""Formulas fit the cases that benchmarks really have, and nothing is faster than its floor."""

import json
import re

import pytest

from benchmarks import report, roofline, work

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
