"""Messages that were not taken in time: what comes after them is not taken for them."""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from pairs import TRANSPORTS
from patience import with_patience

import hpcomm
from hpcomm.errors import HpcommError

MANY = 8300  # more than find room before the receiver comes
TOLD = 997  # a Control channel of the test


def has_failed(work: Any) -> bool:
    try:
        work.wait()
    except (HpcommError, RuntimeError):
        return True
    return False


def taken_in_order(receive: Any) -> None:
    """All that comes is what was sent, and it ends with an error: some of it never went."""
    value = torch.zeros(1)
    for count in range(MANY):
        try:
            receive(value)
        except (HpcommError, RuntimeError):
            return
        assert value.item() == count
    pytest.fail("what had not gone has come")


def sends_without_room() -> None:
    mesh = hpcomm.init(timeout=20.0)
    lane = mesh.world.subgroup([0, 1], "late")
    if mesh.rank == 0:
        works = []
        with contextlib.suppress(HpcommError):  # where the first that are late end before the last is issued
            works.extend(lane.send(torch.tensor([float(i)]), 1, async_op=True, timeout=0.3) for i in range(MANY))
        assert len(works) < MANY or any(map(has_failed, works))
        mesh.control.send(1, TOLD, b"late")
    else:
        assert mesh.control.receive(0, TOLD, 60.0) == b"late"
        taken_in_order(lambda value: lane.recv(value, 0, timeout=2.0))
    # Another communicator has not suffered.
    assert mesh.control.exchange(range(2), TOLD + 1, b"here", 60.0) == [b"here"] * 2
    mesh.world.all_reduce(torch.ones(1))
    mesh.close()


def test_what_follows_a_send_that_timed_out_is_not_taken_for_it() -> None:
    ranks.run(2, sends_without_room, env=TRANSPORTS["shm"], timeout=90)


def receive_that_ends() -> None:
    mesh = hpcomm.init(timeout=20.0)
    lane = mesh.world.subgroup([0, 1], "late")
    if mesh.rank == 0:
        assert mesh.control.receive(1, TOLD, 60.0) == b"late"
        for value in (1.0, 2.0, 3.0):
            with contextlib.suppress(HpcommError):  # short ones may go where nobody looks at them any more
                lane.send(torch.full((4,), value), 1, timeout=2.0)
    else:
        first = lane.recv(torch.zeros(4), 0, async_op=True, timeout=0.3)
        second = None
        with contextlib.suppress(HpcommError):  # where the first one's time is up already
            second = lane.recv(torch.zeros(4), 0, async_op=True, timeout=20.0)
        with pytest.raises(hpcomm.TimedOut, match="recv #0 on lane late"):
            first.wait()
        mesh.control.send(0, TOLD, b"late")
        assert second is None or has_failed(second)  # it would get the first one's
    assert mesh.control.exchange(range(2), TOLD + 1, b"here", 60.0) == [b"here"] * 2
    mesh.world.all_reduce(torch.ones(1))
    mesh.close()


@pytest.mark.parametrize("env", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_receive_behind_one_that_timed_out_does_not_get_its_message(env: dict[str, str]) -> None:
    ranks.run(2, receive_that_ends, env=env, timeout=90)


def backend_without_room() -> None:
    mesh = hpcomm.init(timeout=60.0)
    group = dist.new_group(backend="hpcomm", timeout=datetime.timedelta(seconds=1))
    if mesh.rank == 0:
        works = []
        with contextlib.suppress(RuntimeError):
            works.extend(dist.isend(torch.tensor([float(i)]), 1, group=group) for i in range(MANY))
        assert len(works) < MANY or any(map(has_failed, works))
        mesh.control.send(1, TOLD, b"late")
    else:
        assert mesh.control.receive(0, TOLD, 60.0) == b"late"
        taken_in_order(lambda value: dist.recv(value, 0, group=group))
    assert mesh.control.exchange(range(2), TOLD + 1, b"here", 60.0) == [b"here"] * 2
    mesh.world.all_reduce(torch.ones(1))
    mesh.close()


def test_what_follows_a_message_of_torch_that_timed_out_is_not_taken_for_it() -> None:
    ranks.run(2, backend_without_room, env=TRANSPORTS["shm"], timeout=90)


def backend_receives(limit: float, behind: str) -> list[float]:
    """With another one behind it a receive that ends takes the group along; alone it may be asked for again."""
    mesh = hpcomm.init(timeout=60.0)
    group = dist.new_group(backend="hpcomm", timeout=datetime.timedelta(seconds=limit))
    got: list[float] = []
    if mesh.rank == 0:
        assert mesh.control.receive(1, TOLD, 60.0) == b"late"
        for value in (1.0, 2.0, 3.0) if behind else (1.0,):
            with contextlib.suppress(RuntimeError):
                dist.send(torch.full((4,), value), 1, group=group)
    else:
        first = dist.irecv(torch.zeros(4), 0, group=group)
        time.sleep(limit / 2)
        value = torch.zeros(4)
        second = dist.irecv(value, 0 if behind == "of it" else None, group=group) if behind else None
        with pytest.raises(RuntimeError, match="took longer than its time-out"):
            first.wait()
        mesh.control.send(0, TOLD, b"late")
        if second is not None:
            with pytest.raises(RuntimeError):
                second.wait()
        else:
            dist.recv(value, 0, group=group)
        got = value.tolist()
    assert mesh.control.exchange(range(2), TOLD + 1, b"here", 60.0) == [b"here"] * 2
    mesh.world.all_reduce(torch.ones(1))
    mesh.close()
    return got


def test_a_receive_of_torch_that_timed_out() -> None:
    def attempt(limit: float) -> None:
        for behind, value in (("of it", 0.0), ("of anybody", 0.0), ("", 1.0)):
            got = ranks.run(2, backend_receives, limit, behind, env=TRANSPORTS["shm"], timeout=90)
            assert got[1] == [value] * 4, behind

    with_patience(attempt, 1.0)  # in half of which the second one is asked for
