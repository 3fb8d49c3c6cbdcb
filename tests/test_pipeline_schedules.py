"""Every schedule trains: one step equals one process, with every kind of link, tie and reduction."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pipeline_models as models
import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hpcomm
from hpcomm.pipeline import runner
from hpcomm.pipeline.links import Link, Messages
from hpcomm.plan import compile as compile_plan
from hpcomm.seats import host_name, is_crowded

if TYPE_CHECKING:
    from collections.abc import Callable

CROSS = nn.functional.cross_entropy


def make(mesh: hpcomm.Mesh, name: str, microbatches: int, **options: Any) -> hpcomm.Pipeline:
    options.setdefault("loss_fn", CROSS)
    return hpcomm.Pipeline(models.MODELS[name](), mesh=mesh, num_microbatches=microbatches, **options)


def all_schedules(dp: int, pp: int, counts: list[int]) -> None:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        for microbatches in counts:
            for i, schedule in enumerate(models.SCHEDULES):
                for name in models.MODELS:
                    reduce = ("slack", "eager", "end")[(i + microbatches) % 3]
                    pipe = make(mesh, name, microbatches, schedule=schedule, reduce=reduce, bucket_cap_mb=0.0002)
                    models.require_equal(pipe, name, microbatches)
                    models.require_equal(pipe, name, microbatches)  # state of the first step is gone


@pytest.mark.parametrize(
    ("dp", "pp", "counts"),
    [(1, 1, [1, 3]), (1, 2, [1, 5]), (2, 2, [3]), (1, 3, [2, 7]), (1, 4, [2, 8]), (2, 1, [2])],
)
def test_a_step_equals_one_process(dp: int, pp: int, counts: list[int]) -> None:
    ranks.run(dp * pp, all_schedules, dp, pp, counts, timeout=120)


def one_of_them(dp: int, pp: int, options: dict[str, Any], name: str, microbatches: int, cuts: list[int]) -> None:
    with hpcomm.init(dp=dp, pp=pp) as mesh:
        stages = hpcomm.plan.SCHEDULES[options["schedule"]].stages_per_rank * pp
        layers = len(models.MODELS[name]())
        # Any cut: the drawn places, filled up with the first free ones.
        places = sorted({1 + cut % (layers - 1) for cut in cuts})[: stages - 1]
        places += [place for place in range(1, layers) if place not in places][: stages - 1 - len(places)]
        pipe = make(mesh, name, microbatches, split_at=sorted(places), **options)
        models.require_equal(pipe, name, microbatches)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(1, 2), (2, 2), (1, 3), (1, 4), (3, 1)]),
    schedule=st.sampled_from(models.SCHEDULES),
    reduce=st.sampled_from(["slack", "eager", "end"]),
    name=st.sampled_from(sorted(models.MODELS)),
    microbatches=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    cap=st.sampled_from([0.0001, 0.001, 25.0]),
)
def test_whatever_is_asked_for(
    shape: tuple[int, int], schedule: str, reduce: str, name: str, microbatches: int, cuts: list[int], cap: float
) -> None:
    options = {"schedule": schedule, "reduce": reduce, "bucket_cap_mb": cap}
    ranks.run(shape[0] * shape[1], one_of_them, *shape, options, name, microbatches, cuts, timeout=60)


@given(
    schedule=st.sampled_from(models.SCHEDULES),
    pp=st.integers(2, 5),
    microbatches=st.integers(1, 12),
    everywhere=st.booleans(),
)
@settings(deadline=None, derandomize=True)
def test_receipts_that_are_put_off_keep_the_order_of_their_lane(
    schedule: str, pp: int, microbatches: int, everywhere: bool
) -> None:
    plan = compile_plan(schedule, pp=pp, num_microbatches=microbatches)
    for rank in range(pp):
        actions = plan.actions(rank)
        off = runner.put_off(actions, everywhere=everywhere)
        planned: dict[int, list[int]] = {}
        issued: dict[int, list[int]] = {}
        wanted = set()  # messages that a computation waits for: is it a forward, stage, microbatch
        later: dict[tuple[bool, int, int], Any] = {}  # the receipts that are put off, by the same
        for action in actions:
            kind = action.kind.name
            if kind == "RECV":
                key = (action.payload.name == "ACTIVATION", action.stage, action.microbatch)
                wanted.add(key)
                planned.setdefault(action.communicator, []).append(action.op)
                if action.op in off:
                    later[key] = action
                else:
                    issued.setdefault(action.communicator, []).append(action.op)
            elif kind == "SEND":
                planned.setdefault(action.communicator, []).append(action.op)
                issued.setdefault(action.communicator, []).append(action.op)
            elif kind in ("FORWARD", "BACKWARD", "INPUT_GRAD"):
                key = (kind == "FORWARD", action.stage, action.microbatch)
                if key in wanted:
                    mine = [later.pop(key)] if key in later else []
                    for receipt in [*later.values(), *mine]:
                        issued.setdefault(receipt.communicator, []).append(receipt.op)
                    later.clear()
        assert issued == planned
        if schedule == "1f1b" and pp == 2 and everywhere:
            assert len(off) == microbatches


def test_ranks_are_crowded_where_all_of_them_have_fewer_cores_than_threads() -> None:
    own = [[4 * rank + core for core in range(4)] for rank in range(8)]
    crowded = {
        "cores of their own": [("a", cores, 1) for cores in own],
        "as many, shared": [("a", list(range(32)), 1)] * 8,
        "as many threads as cores": [("a", cores, 3) for cores in own],
        "a thread more": [("a", cores, 4 if rank == 0 else 3) for rank, cores in enumerate(own)],
        "a core each": [("a", [rank], 1) for rank in range(8)],
        "the same four": [("a", own[0], 1)] * 8,
        "one rank on a core": [("a", [3], 1)],
        "one rank on two": [("a", [3, 9], 1)],
    }
    assert {name: is_crowded(seats) for name, seats in crowded.items()} == {
        "cores of their own": False,
        "as many, shared": False,
        "as many threads as cores": False,
        "a thread more": True,
        "a core each": True,
        "the same four": True,
        "one rank on a core": True,
        "one rank on two": False,
    }


def seats_seen() -> tuple[list[Any], list[Any]]:
    cores = sorted(os.sched_getaffinity(0))
    with hpcomm.init(pp=2) as mesh:
        mine = {cores[mesh.rank % len(cores)]}  # a core of its own where there are two
        os.sched_setaffinity(0, mine)
        torch.set_num_threads(1 + mesh.rank)
        pipe = make(mesh, "rich", 2)
        board = pipe._runner.board
        assert all(its[0] == host_name() for its in board.seats_of_this_host())
        return [sorted(mine), 1 + mesh.rank], [list(its[1:]) for its in board.seats_of_this_host()]


def test_every_rank_knows_the_cores_and_threads_of_its_host() -> None:
    told = ranks.run(2, seats_seen)
    assert [seen for _, seen in told] == [[mine for mine, _ in told]] * 2


class Recording:
    """A receiver, and what it was asked for, that writes down what happens."""

    def __init__(self, name: str, happened: list[str]) -> None:
        self.name, self.happened = name, happened

    def recv(self, microbatch: int) -> Recording:
        self.happened.append(f"{self.name} issues {microbatch}")
        return Recording(f"{self.name} {microbatch}", self.happened)

    def take(self, microbatch: int) -> str:
        self.happened.append(f"{self.name} takes {microbatch}")
        return "taken"

    def wait(self) -> str:
        self.happened.append(f"{self.name} is waited for")
        return "waited for"


@pytest.mark.parametrize("put_off", [True, False])
def test_whoever_waits_has_issued_all_that_was_put_off(put_off: bool) -> None:
    happened: list[str] = []
    # Of lanes of their own, as those of all receipts that are put off at a time: these stand around the needed one.
    others = {
        runner.Key(False, 2, 1, 0): "before",
        runner.Key(True, 5, 6, 4): "after",
        runner.Key(False, 7, 6, 1): "last",
    }
    needed = runner.Key(True, 0, 1, 3)
    walker = runner.Runner.__new__(runner.Runner)
    walker._walk = walk = runner._Walk(runner.Batch([], [], [], [], None), autocast=False)
    for key, name in [*list(others.items())[:1], (needed, "needed"), *list(others.items())[1:]]:
        if key != needed or put_off:
            walk.later[key] = Recording(name, happened)
        else:
            walk.mail[needed] = Recording("needed 3", happened)
    assert walker._wait_for(needed) == ("taken" if put_off else "waited for")
    last = "needed takes 3" if put_off else "needed 3 is waited for"
    assert happened == ["before issues 0", "after issues 4", "last issues 1", last]
    assert {key: pending.name for key, pending in walk.mail.items()} == {
        key: f"{name} {key.microbatch}" for key, name in others.items()
    }
    assert walk.later == {}


def put_off_or_not(places: str) -> None:
    original = runner.put_off
    chosen = {
        "never": lambda actions, everywhere: [],
        "where nothing is computed": lambda actions, everywhere: original(actions, False),
        "everywhere": lambda actions, everywhere: original(actions, True),
    }
    runner.put_off = chosen[places]
    with hpcomm.init(pp=2) as mesh:
        for schedule in models.SCHEDULES:
            for name in models.MODELS:
                pipe = make(mesh, name, 9, schedule=schedule)  # more microbatches than an edge has blocks
                models.require_equal(pipe, name, 9)


@pytest.mark.parametrize("places", ["never", "where nothing is computed", "everywhere"])
def test_steps_are_right_wherever_receipts_are_put_off(places: str) -> None:
    ranks.run(2, put_off_or_not, places, timeout=120)


def buffers(depths: list[int]) -> list[int]:
    """Of the edges of a rank, by what its plan lets be under way."""
    made: list[int] = []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            made.append(options["slots"])
            return make(*arguments, **options)

        return noted

    for name in ("Sender", "Receiver"):
        setattr(runner, name, noting(getattr(runner, name)))
    with hpcomm.init(pp=2) as mesh:
        for depth in depths:
            plan = compile_plan("1f1b", pp=2, num_microbatches=8, slot_depth=depth)
            link = Link(source=0, target=1, output=None, skips=(), loads=False, lone=False)
            runner._edges(plan, mesh, plan.actions(mesh.rank), [link], Messages("per_message", None))
    return made


def test_an_edge_has_a_buffer_for_each_message_that_the_plan_has_under_way() -> None:
    assert ranks.run(2, buffers, [2, 9, 0]) == [[4, 4, 9, 9, 4, 4]] * 2
