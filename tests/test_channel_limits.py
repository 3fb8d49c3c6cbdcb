"""Limits of a receive: however long a program has looked again, no message is lost, and no wait is endless."""

from __future__ import annotations

import contextlib
import time

import pytest
import ranks
import torch
from pairs import WITH_ONE_SLOT
from patience import with_patience

import hpcomm


def looks_again_and_again(schema: str, seconds: float) -> None:
    """For longer than the mesh's time-out, which is for messages that have begun, and for waits without a limit."""
    with hpcomm.init(dp=1, pp=2, timeout=seconds) as mesh:
        ranks.tell("started")
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema=schema)
        tree = {"small": torch.full((4,), 10.0), "large": torch.full((1 << 19,), 11.0)}
        if mesh.rank == 0:
            if schema == "frozen":
                channel.send(tree).wait()
            assert mesh.control.receive(1, 997, 60) == b"polled"
            channel.send(tree)
            assert mesh.control.receive(1, 997, 60) == b"waited"
            channel.send(tree)
            if schema == "per_message":
                channel.send("another")
        else:
            if schema == "frozen":
                channel.recv()
            polled = 0
            end = time.monotonic() + 2.5 * seconds
            while time.monotonic() < end or polled < 2:
                with pytest.raises(hpcomm.TimedOut):
                    channel.recv(timeout=0.3)
                polled += 1
            mesh.control.send(0, 997, b"polled")
            assert channel.recv(timeout=30.0)["large"].sum().item() == 11.0 * (1 << 19)
            # Longer than the mesh's time-out, in one call; then without a limit, which ends at that time-out.
            with pytest.raises(hpcomm.TimedOut):
                channel.recv(timeout=2.5 * seconds)
            words = rf"no message came within {seconds:g} s.*The next call goes on with it"
            with pytest.raises(hpcomm.TimedOut, match=words):
                channel.recv()
            pending = channel.irecv()
            with pytest.raises(hpcomm.TimedOut, match="The next call goes on with it"):
                pending.wait()
            mesh.control.send(0, 997, b"waited")
            assert pending.wait(30.0)["small"].tolist() == [10.0] * 4
            if schema == "frozen":
                return
            assert channel.recv(timeout=30.0) == "another"


# Nine times the limit each, all but the start spent asleep: side by side.
CASES = {name: ("per_message", env) for name, env in WITH_ONE_SLOT.items()} | {"frozen": ("frozen", {})}


def test_a_receive_may_look_again_for_as_long_as_it_likes() -> None:
    def attempt(seconds: float) -> None:
        with contextlib.ExitStack() as stack:
            jobs = {}
            for name, (schema, env) in CASES.items():
                job = ranks.spawn(2, looks_again_and_again, schema, seconds, env=env, timeout=120)
                jobs[name] = stack.enter_context(job)
                assert [job.told(rank) for rank in range(2)] == ["started"] * 2  # the next one starts by itself
            ended = {name: job.wait(stop_at_failure=True) for name, job in jobs.items()}
            for name, outcomes in ended.items():
                if not all(outcome.ok for outcome in outcomes):
                    raise ranks.RankError(f"{name}: {ranks.outcome.report(outcomes)}")

    with_patience(attempt, 1.0)  # which the start has to keep as well


def no_number() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        pending = channel.irecv()
        for wait in (channel.recv, pending.wait):
            with pytest.raises(hpcomm.InvalidArgument, match="nan is no number of seconds"):
                wait(float("nan"))
        mesh.world.barrier().wait()  # nothing has come by then
        channel.send(mesh.rank)
        assert pending.wait() == 1 - mesh.rank


def test_a_limit_that_is_no_number_is_refused_and_nothing_ends() -> None:
    ranks.run(2, no_number)


def without_elements(message: object) -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank, schema="frozen")
        for held_back in range(3):
            if mesh.rank == 0:
                channel.send(message).wait()
                assert mesh.control.receive(1, 996, 60) == b"no more came"
                for _ in range(held_back):
                    channel.send(message).wait()
            else:
                channel.recv()
                with pytest.raises(hpcomm.TimedOut):
                    channel.recv(timeout=0.2)
                mesh.control.send(0, 996, b"no more came")
                for _ in range(held_back):
                    channel.recv()
        if mesh.rank == 0:
            for _ in range(5):
                channel.send(message)
        else:
            for _ in range(5):
                channel.recv()
            del channel
        mesh.barrier()


@pytest.mark.parametrize("env", WITH_ONE_SLOT.values(), ids=WITH_ONE_SLOT)
@pytest.mark.parametrize("message", [{"stop": False}, torch.empty(0, 3), None], ids=["a number", "empty", "None"])
def test_a_frozen_message_without_elements_is_waited_for(env: dict[str, str], message: object) -> None:
    ranks.run(2, without_elements, message, env=env)


def too_many_dimensions() -> None:
    with hpcomm.init(dp=1, pp=2) as mesh:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.rank)
        if mesh.rank == 0:
            with pytest.raises(hpcomm.InvalidArgument, match=r"message\['h'\]\[1\] has 65 dimensions.* 64 at most"):
                channel.send({"h": [torch.ones(1), torch.ones([1] * 65)]})
            channel.send(torch.ones([1] * 64))
        else:
            assert channel.recv().dim() == 64


def test_a_tensor_of_too_many_dimensions_is_named() -> None:
    ranks.run(2, too_many_dimensions)
