"""Show each failure at once, as a plugin of pytest: a run that is stopped, or that breaks, still says what had failed."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}\n{report.capstderr}", flush=True)
