"""Tables in the README and the docs show the contents of benchmarks/results/."""

import pytest

from benchmarks import report

report.pyplot()  # an import that leaves traces


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_page_shows_the_committed_results(page):
    assert report.rendered(page) == page.read_text(), f"{page.name} is out of date; type: python -m benchmarks.report"


def test_the_plot_shows_the_headlines():
    rows = report.headlines()
    about = report.headline_table(rows).splitlines()[-1]
    assert report.plot_is_current(rows, report.PLOT, about), "type: python -m benchmarks.report"
