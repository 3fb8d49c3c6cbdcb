"""Ranks that stay, on the CPU: one process for many runs, another one after a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import living
import pytest
import ranks
import torch

import hpcomm


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    living.close()


def where(key: str) -> tuple[int, str | None, int, float]:
    """The process, what the last run left in its environment, and a sum over a mesh of its own."""
    left = os.environ.get(key)
    os.environ[key] = "left behind"
    with hpcomm.init(dp=-1, device="cpu", timeout=20.0) as mesh:
        value = torch.full((3,), 10.0**mesh.rank)
        mesh.dp.all_reduce(value)
    return os.getpid(), left, torch.randint(1 << 30, ()).item(), float(value[0])


def fails_in_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("a batch that cannot be read")
    time.sleep(100.0)


def sleeps() -> None:
    time.sleep(100.0)


def dies() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(100.0)


def skips() -> None:
    pytest.skip("not here")


def test_runs_share_processes_and_nothing_else() -> None:
    first = living.run(2, where, "HPCOMM_TEST_LEFT", timeout=30.0)
    second = living.run(2, where, "HPCOMM_TEST_LEFT", timeout=30.0)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    for (_, left, drawn, total), (_, also_left, also_drawn, also_total) in zip(first, second, strict=True):
        assert (left, also_left) == (None, None)
        assert drawn == also_drawn
        assert total == also_total == 11.0


@pytest.mark.parametrize(
    ("fn", "words"),
    [(fails_in_rank_1, "a batch that cannot be read"), (sleeps, "not done after"), (dies, "ended without telling")],
)
def test_after_a_failure_there_are_new_ones(monkeypatch: pytest.MonkeyPatch, fn: object, words: str) -> None:
    monkeypatch.setattr(living, "GRACE", 0.5)
    before = living.run(2, where, "HPCOMM_TEST_LEFT", timeout=30.0)
    with pytest.raises(ranks.RankError, match=words):
        living.run(2, fn, timeout=3.0 if fn is sleeps else 30.0)  # type: ignore[arg-type]
    after = living.run(2, where, "HPCOMM_TEST_LEFT", timeout=30.0)
    assert not {pid for pid, *_ in before} & {pid for pid, *_ in after}


def skips_or_fails() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("a batch that cannot be read")
    pytest.skip("not here")


def test_a_skip_hides_no_failure() -> None:
    with pytest.raises(ranks.RankError, match="a batch that cannot be read"):
        living.run(2, skips_or_fails, timeout=30.0)


def test_a_rank_may_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        living.run(1, skips, timeout=30.0)
