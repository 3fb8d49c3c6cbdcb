"""Fixtures of all tests: ranks end with the test, the launcher with the session, random state stays where it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import ranks
import torch


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
    """Tests of the GPU half: skipped on a machine without GPUs, failed where HPCOMM_REQUIRE_GPUS promises some."""
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if os.environ.get("HPCOMM_REQUIRE_GPUS"):
        pytest.fail("HPCOMM_REQUIRE_GPUS is set, but torch sees no GPU", pytrace=False)
    pytest.skip("no GPU")
