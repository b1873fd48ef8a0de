"""Tables in the README and the docs are the ones that benchmarks/results/ holds."""

import pytest

from benchmarks import report

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
    rows = report.headlines()
    about = report.headline_table(rows).splitlines()[-1]
    assert report.plot_is_current(rows, report.PLOT, about), "type: python -m benchmarks.report"


def test_a_folder_of_plots_alone_is_not_listed(tmp_path, monkeypatch):
    """git ignores plots: a list that named their folder would differ from machine to machine."""
    for day in (1, 2):
        (tmp_path / f"cpu-2026-01-0{day}").mkdir()
    (tmp_path / "cpu-2026-01-01/tables.md").touch()
    (tmp_path / "cpu-2026-01-02/track.png").touch()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.folder_list() == "- CPU, 2026-01-01: [tables](cpu-2026-01-01/tables.md)\n"
