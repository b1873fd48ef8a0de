"""Tables in the README and the docs are the ones that benchmarks/results/ holds."""

import json

import pytest

from benchmarks import memory_limits, report

report.pyplot()  # an import that leaves traces


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_page_shows_the_committed_results(page):
    assert report.rendered(page) == page.read_text(), f"{page.name} is out of date; type: python -m benchmarks.report"


FOLDERS = [folder for kind in ("gpu", "cpu") for folder in report.folders(kind) if report.load(folder)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_of_a_folder_are_made_from_its_rows(folder):
    assert (folder / "tables.md").read_text() == report.tables(folder), "type: python -m benchmarks.report"
    assert len(report.machines_in(folder)) == 1


def test_the_plot_shows_the_headlines():
    rows = report.headlines(report.load_newest("gpu"))
    about = report.headline_table(rows).splitlines()[-1]
    assert report.plot_is_current(rows, report.PLOT, about), "type: python -m benchmarks.report"


MACHINE = {
    "gpu": "H200",
    "cpu": "its CPU",
    "driver": "1",
    "cuda": "13",
    "torch": "2",
    "python": "3.11",
    "date": "2026-01-01",
}


def test_headlines_show_losses_and_days():
    found = {"title": "t", "before": 5.0, "ours": 10.0, "from": [MACHINE, MACHINE | {"date": "2026-01-02"}]}
    lines = report.headline_table([found]).splitlines()
    assert lines[2] == "| t | H200 | 5.0 us | **10.0 us** | 0.5x\\* |"
    assert lines[4] == "Medians on H200, torch 2, 2026-01-01 to 2026-01-02. \\*: the two times are of different days."


@pytest.mark.parametrize("others, shown", [({}, []), ({"compiled": 5.0}, []), ({"stock": 30.0}, [60.0])])
def test_a_headline_that_was_not_measured_is_left_out(others, shown, tmp_path, monkeypatch):
    rows = [{**MACHINE, **row(name, "call", time)} for name, time in {"torch_fastdet": 10.0, **others}.items()]
    monkeypatch.setattr(report, "HEADLINES", [report.Headline("t", "b", "c", times=2)])
    found = report.headlines({"b": rows})
    assert [line["before"] for line in found] == shown
    if found:
        report.plot_headlines(found, tmp_path / "plot.png", "one machine")
        assert report.plot_is_current(found, tmp_path / "plot.png", "one machine")


def row(variant, view, median):
    return {
        "case": "c", "variant": variant, "view": view, "median_us": median, "low_us": 0.9 * median,
        "high_us": 1.2 * median, "percent_of_copy": 91.0,
        "launches": 2, "host_syncs": 0, "peak_mib": 1.5,
    }  # fmt: skip


def test_summary_takes_the_best_alternative_and_shows_losses():
    rows = [row("eager", "call", 30.0), row("compiled", "call", 5.0), row("torch_fastdet", "call", 10.0)]
    line = report.summary_table({"b": rows}).splitlines()[2]
    assert line == "| c | compiled: 5.0 us (4.5 to 6.0 us) | 10.0 us (9.0 to 12.0 us) | 0.5x |"


@pytest.mark.parametrize("kind, name", [("gpu", "a100-2026-01-04"), ("cpu", "cpu-2026-01-04")])
def test_tables_mix_no_machines(two_days, kind, name):
    """A run of another machine does not put its rows between those of the one before."""
    earlier = two_days.parent / "cpu-2026-01-03" if kind == "cpu" else two_days
    rows = json.loads((earlier / "nms.json").read_text())
    (earlier / "loss.json").write_text(json.dumps(rows))
    (earlier / "training_truth.md").write_text("of the machine before")
    assert {"loss", "nms"} <= set(report.load_newest(kind))
    (two_days.parent / name).mkdir()
    other = [row | ({"gpu": "A100"} if kind == "gpu" else {"cpu": "another CPU"}) for row in rows]
    (two_days.parent / name / "nms.json").write_text(json.dumps(other))
    assert report.load_newest(kind) == {"nms": other}
    assert report.section(f"{kind}-loss").startswith("Not measured yet")
    assert report.section(f"{kind}-training_truth").startswith("Not measured yet") or kind == "cpu"


@pytest.fixture
def two_days(tmp_path, monkeypatch):
    """A whole run of a GPU, and one of nms alone the day after; a CPU's is newer than both."""
    for folder, names in (
        ("h200-2026-01-01", ("step", "nms", "postprocess")), ("h200-2026-01-02", ("nms",)), ("cpu-2026-01-03", ("nms",))
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        for name in names:
            about = {"gpu": "H200", "cpu": "its CPU", "driver": "1", "cuda": "13", "torch": "2", "python": "3.11"}
            about |= {"date": folder[-10:], "gpu": "" if folder.startswith("cpu") else "H200"}
            rows = [row(variant, "call", 10.0) | about | {"case": name} for variant in ("stock", "torch_fastdet")]
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(rows))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SHOWN", {})
    return tmp_path / "h200-2026-01-01"


def test_the_largest_batch_fits_and_the_next_does_not():
    peaks = (1_000.0 + 16 * 100, 1_000.0 + 64 * 100)
    batch = report.largest_batch(peaks, 8)
    assert 1_000 + batch * 100 + report.APART_MIB <= 8 * 1024 < 1_000 + (batch + 1) * 100 + report.APART_MIB


@pytest.mark.parametrize("limit", [0, 3, 4, 50, 96, 1000])
def test_the_search_for_the_largest_batch(limit):
    tried = []
    found = memory_limits.largest(lambda batch: tried.append(batch) or batch <= limit, 4, 96)
    assert found == min(limit // 4 * 4, 96) and len(tried) <= 5 and all(0 < batch <= 96 for batch in tried)
