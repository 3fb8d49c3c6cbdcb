"""Fixtures of all tests: ranks end with the test, the launcher with the session, random state stays where it was."""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import re
import signal
import sys
from collections.abc import Generator, Iterator
from typing import NoReturn

import pytest
import ranks
import torch
from hypothesis import HealthCheck, settings

# A shell that starts a job in the background makes it ignore Ctrl-C, and all that it starts: tests send it to ranks.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Thousands of processes import hpcomm and tests: the first compiles them, whatever the shell says of writing bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes is a matter of what else runs on the machine.
settings.register_profile(
    "shared machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")


# The longest test takes a minute on a slow machine. Every wait in a test has a deadline of its own; this one is for
# what nobody has thought of.
SECONDS_OF_A_TEST = 240.0


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """What is shown and done while tests run."""
    config.pluginmanager.register(_Deadline())
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if getattr(config.option, "numprocesses", None) and terminal is not None:
        config.pluginmanager.register(_FailuresAtOnce(terminal))


class _Deadline:
    """A test that does not end fails, with the stacks of all threads; one that cannot even do that ends its process."""

    def __init__(self) -> None:
        self._terminal = os.dup(2)  # while a test runs, descriptor 2 is pytest's
        signal.signal(signal.SIGALRM, self._fail)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        faulthandler.dump_traceback_later(SECONDS_OF_A_TEST + 60.0, file=self._terminal, exit=True)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_A_TEST)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _fail(self, *_: object) -> NoReturn:
        faulthandler.dump_traceback(file=self._terminal)
        pytest.fail(f"not done after {SECONDS_OF_A_TEST:.0f} s")


class _FailuresAtOnce:
    """With -n, pytest shows failures at the end, which a run that is ended from outside does not reach."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            last = "\n".join(report.longreprtext.splitlines()[-30:])
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.when} of {report.nodeid} failed:\n{last}")


@pytest.fixture(autouse=True)
def _own_random_state() -> Iterator[None]:
    """Every test starts from the same seeds and leaves no trace in the next one's numbers."""
    python, cpu = random.getstate(), torch.get_rng_state()
    random.seed(0)
    torch.manual_seed(0)
    yield
    random.setstate(python)
    torch.set_rng_state(cpu)


@pytest.fixture(autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """Ends what a test started with ranks.spawn() and did not close."""
    yield
    ranks.close_jobs()


def pytest_sessionfinish() -> None:
    """Ends the fork server."""
    ranks.close_zygote()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of the GPU half are skipped where there is no GPU, or none for a second rank, with the reason.

    They fail where HPCOMM_REQUIRE_GPUS promises GPUs, or HPCOMM_REQUIRE_MULTIRANK two ranks on them.
    """
    if item.get_closest_marker("cuda") is None:
        return
    if not torch.cuda.is_available():
        _skip_or_fail("HPCOMM_REQUIRE_GPUS", "no GPU")
    if item.get_closest_marker("multirank") is not None:
        problem = _no_second_rank()
        if problem:
            _skip_or_fail("HPCOMM_REQUIRE_MULTIRANK", problem)


def _skip_or_fail(promise: str, problem: str) -> None:
    if os.environ.get(promise):
        pytest.fail(f"{promise} is set, but there is {problem}", pytrace=False)
    pytest.skip(problem)


@functools.cache
def _no_second_rank() -> str:
    """Why two ranks cannot have GPUs here; empty where they can."""
    from hpcomm import _C

    if tried := os.environ.get("HPCOMM_NO_SECOND_RANK"):
        return tried
    if torch.cuda.device_count() >= 2:
        return ""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", _C.nccl_version())
    if version is None:
        return "one GPU, and no NCCL that says its version"
    if tuple(map(int, version.groups())) < (2, 30, 3):
        return f"one GPU, and NCCL {version[0]} takes one rank on each (2.30.3 and newer take more)"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return "one GPU, and NCCL_MULTI_RANK_GPU_ENABLE=1 is not set"
    return ""
