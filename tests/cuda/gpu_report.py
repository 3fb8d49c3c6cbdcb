"""A plugin of pytest (-p gpu_report): a line of JSON per test into HPCOMM_TEST_REPORT, as soon as it has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The call, or the phase that kept it from being called or failed after it."""
    if report.when != "call" and report.outcome == "passed":
        return
    path = os.environ.get("HPCOMM_TEST_REPORT")
    if not path or "PYTEST_XDIST_WORKER" in os.environ:  # its controller reports as well
        return
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.outcome == "skipped" else "xpassed"
    elif report.outcome == "failed" and report.when != "call":
        outcome = "error"
    message = "" if outcome == "passed" else report.longreprtext
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        message = report.longrepr[2]
    line = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2), "message": message[-4000:]}
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")
