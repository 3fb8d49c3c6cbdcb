"""The device that a test of this folder runs on: the CPU everywhere, so that its logic is proved, and the GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)
