"""Where lanes have no cores of their own: buckets are reduced at the end of the backward, by its thread."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import ranks
import torch
from test_ddp import loss_of, model, one_process, shard
from torch import nn

import hpcomm
from hpcomm.ddp import meeting as meeting_module
from hpcomm.ddp.meeting import nobody_has_a_core_left

SMALL = 0.002  # MiB of a bucket: the model has several
_PEER = 10  # a Control channel of these tests


def lacking(*answers: bool) -> None:
    """From now on, what ranks say when asked whether they lack cores: by rank, whatever cores the machine has."""
    meeting_module.core = lambda _: (answers[int(os.environ["RANK"])], ("here", [0], 1))


def last_made(wrapped: hpcomm.DistributedDataParallel) -> nn.Parameter:
    return next(wrapped.module.parameters())  # of the first layer, weights before biases


def issued_in_hook(wrapped: hpcomm.DistributedDataParallel) -> list[int]:
    """Buckets that were issued when the last gradient of a backward was made."""
    seen: list[int] = []
    last_made(wrapped).register_hook(lambda _: seen.append(wrapped.reducer.counts["issued"]))
    return seen


def agreed(*answers: bool) -> int:
    lacking(*answers)
    with hpcomm.init(dp=-1) as mesh:
        torch.manual_seed(0)
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=SMALL)
        plain = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=SMALL, check_finite=True)
        x, y = shard(mesh.rank)
        early = issued_in_hook(wrapped)
        for _ in range(3):
            for module in (wrapped, plain):
                module.zero_grad()
                loss_of(module(x), y).backward()
            for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
        assert wrapped.buckets > 1
        assert wrapped.reducer.counts["issued"] == wrapped.buckets
        return early[-1]


@pytest.mark.parametrize("answers", [(True, True), (True, False), (True, True, True, True)])
def test_all_ranks_reduce_at_the_end_or_none(answers: tuple[bool, ...]) -> None:
    early = ranks.run(len(answers), agreed, *answers)
    assert all((issued == 0) == all(answers) for issued in early), early


@pytest.mark.parametrize(
    ("lacking", "seats", "expected"),
    [
        ([True, True], [[0, 1]] * 2, True),
        ([True, True], [[0], [1]], True),  # pinned
        ([True, False], [[0, 1]] * 2, False),
        ([True] * 8, [list(range(8 * rank, 8 * rank + 8)) for rank in range(8)], False),  # pinned to eight each
    ],
)
def test_cores_that_only_others_may_use_count_as_well(
    lacking: list[bool], seats: list[list[int]], expected: bool
) -> None:
    told = [(lacks, ("here", cores, 1)) for lacks, cores in zip(lacking, seats, strict=True)]
    assert nobody_has_a_core_left(told) == expected


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16).double() for _ in range(6))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number != skip else x
        return x


def uneven() -> None:
    """Ranks whose gradients are in place, foreign, kept or missing, each on its own."""
    with hpcomm.init(dp=-1) as mesh:
        results = []
        for at_end in (True, False):
            lacking(*[at_end] * mesh.size)
            wrapped = hpcomm.DistributedDataParallel(
                Uneven(), mesh=mesh, bucket_cap_mb=SMALL, find_unused_parameters=True
            )
            found = []
            for step in range(4):
                if step % 2 == 0:
                    wrapped.zero_grad()  # else gradients of the step before are added to, in place
                if mesh.rank == 1 and step == 2:
                    for p in wrapped.module.layers[2].parameters():
                        p.grad = torch.full_like(p, 0.5)  # the caller's own memory
                x = torch.full((3, 16), 10.0**-mesh.rank, dtype=torch.float64)
                wrapped(x, skip=(mesh.rank + step) % 7).square().sum().backward()
                found.append([None if p.grad is None else p.grad.clone() for p in wrapped.parameters()])
            results.append(found)
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_what_is_not_in_place_is_reduced_as_well() -> None:
    ranks.run(3, uneven)


def two_wrappers(in_turn: bool) -> None:
    """Each with a lane of its own; `in_turn`: one is through first on one rank, and the other one on the other rank."""
    with hpcomm.init(dp=2) as mesh:
        lacking(True, True)
        group = mesh.group("dp")
        pair = [hpcomm.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=SMALL) for _ in range(2)]
        x, y = shard(mesh.rank)
        for steps in range(1, 5):
            losses = [loss_of(module(x), y) for module in (reversed(pair) if in_turn and mesh.rank == 1 else pair)]
            sum(losses).backward()
            for module in pair:
                for p, expected in zip(module.parameters(), one_process(2), strict=True):
                    torch.testing.assert_close(p.grad, steps * expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_turn", [False, True])
def test_two_wrappers_in_one_backward(in_turn: bool) -> None:
    ranks.run(2, two_wrappers, in_turn)


def interrupt(loss: torch.Tensor, behind: torch.Tensor, later: float = 0.0) -> None:
    """Ctrl-C in the backward, so many seconds after the gradient of ``behind`` was made."""
    made = threading.Event()
    behind.register_hook(lambda _: made.set())

    def press() -> None:
        made.wait()
        time.sleep(later)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    thread.join()


def interrupted(megabytes: float) -> None:
    with hpcomm.init(dp=2) as mesh:
        lacking(True, True)
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=megabytes)
        assert (wrapped.buckets == 1) == (megabytes == 25)
        whole = hpcomm.DistributedDataParallel(model(), mesh=mesh, check_finite=True)
        x, y = shard(mesh.rank)
        loss_of(wrapped(x), y).backward()
        wrapped.zero_grad()
        loss = loss_of(wrapped(x), y)
        if mesh.rank == 0:
            # Once main has left Python for good: it keeps the lock until its last hook returns.
            sys.setswitchinterval(1000)
            interrupt(loss, last_made(wrapped))
            mesh.control.send(1, _PEER, b"interrupted")
        else:
            mesh.control.receive(0, _PEER, 20)
            loss.backward()  # the lane of the other one takes part
        for module in (wrapped, whole):
            module.zero_grad()
            loss_of(module(x), y).backward()
        for p, q in zip(wrapped.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("megabytes", [25, 0.0002])
def test_ctrl_c_at_the_end_leaves_the_lane_as_it_is(megabytes: float) -> None:
    """One is enough, however many buckets there are to wait for."""
    ranks.run(2, interrupted, megabytes)


def stuck() -> None:
    with hpcomm.init(dp=2) as mesh:
        lacking(True, True)
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        x, y = shard(mesh.rank)
        loss_of(wrapped(x), y).backward()
        loss = loss_of(wrapped(x), y)
        if mesh.rank == 1:
            waits = wrapped._hpcomm_lane.recv(torch.empty(1), 0, async_op=True)  # for what is never sent
        mesh.control.exchange([0, 1], _PEER, b"", 20)
        if mesh.rank == 0:
            interrupt(
                loss, last_made(wrapped), 0.2
            )  # most likely all have met by then, and main waits for the other one's bucket
            wrapped._hpcomm_lane.abort("given up")  # an interrupted wait has done so, but for one on the lane
        else:
            with contextlib.suppress(hpcomm.HpcommError):  # unless the other one's part had come before
                loss.backward()
            assert waits.done()


def test_ctrl_c_ends_a_reduction_that_a_peer_does_not_join() -> None:
    ranks.run(2, stuck)


def interrupted_before() -> None:
    with hpcomm.init(dp=2) as mesh:
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh)
        x, y = shard(mesh.rank)
        if mesh.rank == 0:
            loss = loss_of(wrapped(x), y)
            interrupt(loss, loss, 0.2)  # nothing is reduced before the other one is heard
            assert wrapped.reducer.counts["issued"] == 0
        mesh.control.exchange([0, 1], _PEER, b"", 20)
        wrapped.zero_grad()
        loss_of(wrapped(x), y).backward()
        for p, expected in zip(wrapped.parameters(), one_process(2), strict=True):
            torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)


def test_ctrl_c_before_the_first_reduction_leaves_the_wrapper_as_it_is() -> None:
    ranks.run(2, interrupted_before)


def refused() -> None:
    with hpcomm.init(dp=2) as mesh:
        lacking(True, True)
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=SMALL)
        x, y = shard(mesh.rank)
        loss = loss_of(wrapped(x), y)
        wrapped._hpcomm_lane.close()
        with pytest.raises(hpcomm.HpcommError, match="closed"):
            loss.backward()
        assert wrapped.reducer._native.state == "reducing"
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            wrapped(x)


def test_a_bucket_that_is_refused_is_not_forgotten() -> None:
    ranks.run(2, refused)


def late() -> float:
    with hpcomm.init(dp=2) as mesh:
        lacking(True, True)
        wrapped = hpcomm.DistributedDataParallel(model(), mesh=mesh, bucket_cap_mb=SMALL)
        x, y = shard(mesh.rank)
        for number in range(4):
            wrapped.zero_grad()
            loss = loss_of(wrapped(x), y)
            if mesh.rank == number % 2:
                time.sleep(0.1)  # longer than the other one waits for it before its lane does
            loss.backward()
            for p, expected in zip(wrapped.parameters(), one_process(2), strict=True):
                torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)
        return float(sum(p.grad.sum() for p in wrapped.parameters()))


def test_a_late_rank_finds_the_lanes_of_the_others() -> None:
    first, second = ranks.run(2, late)
    assert first == second
