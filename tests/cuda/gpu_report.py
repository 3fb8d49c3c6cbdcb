"""A plugin of pytest (-p gpu_report): a line of JSON per test into HPCOMM_TEST_REPORT, as soon as it has ended.

GPU time is dear, and tests that hang wait for their deadlines: after three of them it ends the session.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HUNG = "not done after"  # tests/ranks, at the deadline of a run
MOST_HANGS = 3

_hangs = 0
_is_worker = False  # of pytest-xdist, whose controller reports as well


def pytest_configure(config: pytest.Config) -> None:
    """Asks pytest itself: a session that a worker's test starts has the worker's environment."""
    global _is_worker  # noqa: PLW0603 - one session per process
    _is_worker = hasattr(config, "workerinput")


@pytest.hookimpl
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Counts the runs that hung, and ends the session after the third."""
    global _hangs  # noqa: PLW0603 - one session per process
    if call.excinfo is not None and HUNG in str(call.excinfo.value):
        _hangs += 1
        if _hangs >= MOST_HANGS:
            item.session.shouldstop = f"{_hangs} tests hung until their deadline; the rest would as well"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The call, or the phase that kept it from being called or failed after it."""
    if report.when != "call" and report.outcome == "passed":
        return
    path = os.environ.get("HPCOMM_TEST_REPORT")
    if not path or _is_worker:
        return
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.outcome == "skipped" else "xpassed"
    elif report.outcome == "failed" and report.when != "call":
        outcome = "error"
    message = "" if outcome == "passed" else report.longreprtext
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        message = report.longrepr[2]
    message = message.replace(f"{ROOT}/", "")[-4000:]
    line = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2), "message": message}
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")
