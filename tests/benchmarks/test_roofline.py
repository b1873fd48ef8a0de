"""Formulas fit the cases that benchmarks really have, and nothing is faster than its floor."""

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
    rate = row.get("copy_gb_per_s")  # None of whole programs, which have no bytes
    return work.Machine(row["gpu"], int(rate) * 1e9, CEILINGS) if row["gpu"] and rate else None


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_nothing_is_faster_than_its_floor(folder):
    machine = machine_of(folder)
    if machine is None:
        pytest.skip("a CPU's ceilings stand in roofline.json, and this folder has none")
    placed = roofline.place(machine, report.load(folder))
    assert len(placed) > 10 or not (folder / "roofline.json").exists()
    too_fast = [(row.name, row.variant, row.share) for row in placed if row.share > 1]
    assert not too_fast
