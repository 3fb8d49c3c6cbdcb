"""The clocks of a step that is measured: on a GPU they wait for what it was given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hpcomm
from hpcomm.pipeline import recorder


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_clocks_wait_for_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: SimpleNamespace(synchronize=lambda: waited.append(of)))
    times = recorder.Times(torch.device(device))
    times.begin(hpcomm.plan.compile("1f1b", pp=1, num_microbatches=1))
    start = times.clocks()
    times.waited(7, times.clocks())
    times.action(0, start)
    assert waited == [torch.device(device)] * (0 if device == "cpu" else 4)


def test_a_trace_of_a_gpu_says_when_work_was_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: pytest.fail("the host waits"))
    recorder.Times().clocks()
