"""Schedules: each looks as its paper draws it, has the bubble that its paper promises, and can be executed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcomm.plan
from hpcomm._native import load
from hpcomm.errors import DeadlockError, InvalidArgument
from hpcomm.plan import SCHEDULES, ComputeAction, Table, draw, parse
from hpcomm.plan.schedules import by_name
from hpcomm.plan.table import placement_of
from hpcomm.plan.timeline import draw_ticks

_C = load()


def compiled(name: str, pp: int, m: int, per_rank: int | None = None, **options: Any) -> Any:
    return hpcomm.plan.compile(name, pp=pp, num_microbatches=m, stages_per_rank=per_rank, **options)


def ticks(name: str, pp: int, m: int, per_rank: int | None = None) -> str:
    return draw_ticks(compiled(name, pp, m, per_rank)) + "\n"


# --- As the papers draw them: one column per unit of time, forwards 1, backwards 2, their halves 1 each ---------------


def test_gpipe_as_in_figure_2c_of_its_paper() -> None:
    assert (
        ticks("gpipe", 4, 4)
        == """\
rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -
rank 1 | .  F0 F1 F2 F3 .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -  .  .
rank 2 | .  .  F0 F1 F2 F3 .  .  .  B0 -  B1 -  B2 -  B3 -  .  .  .  .
rank 3 | .  .  .  F0 F1 F2 F3 B0 -  B1 -  B2 -  B3 -  .  .  .  .  .  .
"""
    )


def test_1f1b_as_in_the_upper_half_of_megatrons_figure_4() -> None:
    assert (
        ticks("1f1b", 4, 8)
        == """\
rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -  F4 B1 -  F5 B2 -  F6 B3 -  F7 B4 -  .  B5 -  .  B6 -  .  B7 -
rank 1 | .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  F6 B4 -  F7 B5 -  .  B6 -  .  B7 -  .  .
rank 2 | .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  F5 B4 -  F6 B5 -  F7 B6 -  .  B7 -  .  .  .  .
rank 3 | .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -  F6 B6 -  F7 B7 -  .  .  .  .  .  .
"""
    )


def test_eager_1f1b_has_twice_the_warm_up_of_1f1b() -> None:
    assert (
        ticks("eager_1f1b", 4, 8)
        == """\
rank 0 | F0 F1 F2 F3 F4 F5 F6 .  .  .  B0 -  F7 B1 -  .  B2 -  .  B3 -  .  B4 -  .  B5 -  .  B6 -  .  B7 -
rank 1 | .  F0 F1 F2 F3 F4 .  .  B0 -  F5 B1 -  F6 B2 -  F7 B3 -  .  B4 -  .  B5 -  .  B6 -  .  B7 -  .  .
rank 2 | .  .  F0 F1 F2 .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  F6 B4 -  F7 B5 -  .  B6 -  .  B7 -  .  .  .  .
rank 3 | .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -  F6 B6 -  F7 B7 -  .  .  .  .  .  .
"""
    )


def test_interleaved_1f1b_as_in_the_lower_half_of_megatrons_figure_4() -> None:
    assert (
        ticks("interleaved_1f1b", 2, 4)
        == """\
rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -   0B2 -   0B3 -
rank 1 | .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -   .   .
"""
    )


def test_looped_breadth_first_goes_through_all_microbatches_of_a_stage() -> None:
    assert (
        ticks("looped_bfs", 2, 3)
        == """\
rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 -   2B1 -   2B2 -   0B0 -   0B1 -   0B2 -
rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 -   3B1 -   3B2 -   1B0 -   1B1 -   1B2 -   .   .
"""
    )


def test_zb1p_as_in_the_upper_figure_2_of_the_zero_bubble_paper() -> None:
    assert (
        ticks("zb1p", 4, 6)
        == """\
rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
"""
    )


def test_zbv_has_no_gap_between_a_ranks_first_and_last_action() -> None:
    assert (
        ticks("zbv", 3, 6)
        == """\
rank 0 | 0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0F5 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4 5I4 5W4 0I2 0W2 5F5 5I5 5W5 0I3 0W3 0I4 0W4 0I5 0W5 .   .
rank 1 | .   1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1F5 1I1 1W1 4F4 4I3 4W3 1I2 1W2 4F5 4I4 4W4 1I3 4I5 1I4 1W3 1I5 1W4 4W5 1W5 .
rank 2 | .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2F5 2I2 2W2 3F5 3I3 3W3 2I3 3I4 2I4 3I5 2I5 2W3 3W4 3W5 2W4 2W5
"""  # noqa: E501
    )


def test_dualpipev_pairs_forwards_with_backwards() -> None:
    assert (
        draw(hpcomm.plan.dualpipev(2, 5))
        == """\
rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4
rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4"""
    )


def test_forward_only_is_the_forwards_of_interleaved_1f1b() -> None:
    assert (
        ticks("forward_only", 2, 3, 2)
        == """\
rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2F2 .
rank 1 | .   1F0 1F1 3F0 3F1 1F2 .   3F2
"""
    )
    plan = compiled("forward_only", 2, 3, 2)
    assert {op.kind.name for op in plan.operations} == {"FORWARD", "TRANSFER", "LOSS"}
    with pytest.raises(InvalidArgument, match="stage 0 has buckets, but the schedule has no backwards"):
        compiled("forward_only", 2, 3, 1, bucket_bytes=[[8], []])
    with pytest.raises(InvalidArgument, match="parameters are tied, but the schedule has no backwards"):
        compiled("forward_only", 2, 3, 1, ties=[([0, 1], 8)])


# --- Their bubbles ----------------------------------------------------------------------------------------------------


def clock(
    table: Table, seconds: dict[str, float], *, in_pairs: bool = False
) -> tuple[float, list[tuple[float, float, float]]]:
    """Makespan, and per rank (begin, end, computing): a second opinion on simulate(), from the table alone.

    With ``in_pairs`` an undivided backward of another stage behind a forward is run as one with it, as DualPipe does.
    """
    placement = placement_of(table)
    ended: dict[tuple[str, int, int], float] = {}
    rows = [list(steps(row, len(table) - 1 == rank, in_pairs)) for rank, row in enumerate(table)]
    at, now, begin = [0] * len(rows), [0.0] * len(rows), [-1.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                needs = [need for action in row[at[rank]] for need in needs_of(action, len(placement))]
                if not ended.keys() >= set(needs):
                    break
                start = max([now[rank], *(ended[need] for need in needs)])
                begin[rank] = start if begin[rank] < 0 else begin[rank]
                now[rank] = start + sum(seconds[action.kind] for action in row[at[rank]])
                for kind, stage, m in row[at[rank]]:
                    ended["G" if kind in "BI" else kind, stage, m] = now[rank]
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows], "the table cannot be executed"
    busy = [sum(seconds[action.kind] for action in row) for row in table]
    return max(now), list(zip(begin, now, busy, strict=True))


def needs_of(action: ComputeAction, num_stages: int) -> Iterator[tuple[str, int, int]]:
    kind, stage, m = action
    if kind == "F" and stage > 0:
        yield "F", stage - 1, m
    if kind in "BI":
        yield "F", stage, m
        if stage + 1 < num_stages:
            yield "G", stage + 1, m
    if kind == "W":
        yield "G", stage, m


def steps(row: list[ComputeAction], last: bool, in_pairs: bool) -> Iterator[list[ComputeAction]]:
    alone = last  # the last rank runs its first such pair one after the other: its backward is the first of all
    i = 0
    while i < len(row):
        pair = in_pairs and i + 1 < len(row) and row[i].kind == "F" and row[i + 1].kind == "B"
        if pair and alone:
            pair = alone = False
        yield row[i : i + 2] if pair else row[i : i + 1]
        i += 2 if pair else 1


def model_of(stages: int, forward: float, inputs: float, weights: float) -> Any:
    costs = _C.CostModel()
    costs.stages = [_C.StageCost(forward, inputs + weights, inputs, weights)] * stages
    return costs


def bubble(name: str, pp: int, m: int, per_rank: int, cost: tuple[float, float, float]) -> tuple[float, Any]:
    """Seconds in which the rank that computes longest computes nothing, and the timeline."""
    plan = compiled(name, pp, m, per_rank)
    timeline = plan.simulate(model_of(plan.num_stages, *cost))
    assert timeline.exposed_share == 0
    return timeline.makespan_seconds - max(times.compute_seconds for times in timeline.ranks), timeline


COSTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 3, 2), (3, 3, 2)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (2, 7), (4, 4), (4, 12), (8, 32)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, pp: int, m: int, cost: tuple[int, int, int]) -> None:
    idle, timeline = bubble(name, pp, m, 1, cost)
    assert idle == pytest.approx((pp - 1) * sum(cost))
    assert timeline.bubble_share == pytest.approx((pp - 1) / (m + pp - 1))  # arXiv:1811.06965, section 2.3


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 16), (8, 32)])
def test_eager_1f1b_hides_messages_that_1f1b_waits_for(pp: int, m: int) -> None:
    """Of up to half a forward: a rank in the middle takes in one and sends one on in that time."""
    costs = model_of(pp, 2, 2, 2)
    for costs.link_latency_seconds in (0.2, 1):
        way = (pp - 1) * costs.link_latency_seconds  # there and back, once
        eager, plain = (compiled(name, pp, m, costs=costs).simulate(costs) for name in ("eager_1f1b", "1f1b"))
        assert eager.makespan_seconds == pytest.approx((m + pp - 1) * 6 + 2 * way)
        assert plain.makespan_seconds > eager.makespan_seconds + (m - 2 * pp) * costs.link_latency_seconds


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 6), (4, 4), (4, 12), (8, 32)])
@pytest.mark.parametrize("per_rank", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_bubble_of_interleaved_schedules(name: str, per_rank: int, pp: int, m: int, cost: tuple[int, int, int]) -> None:
    if name == "interleaved_1f1b" and cost[1] + cost[2] > 2 * cost[0]:
        return  # the order of the paper's figure waits at times where a backward takes more than two forwards
    idle, timeline = bubble(name, pp, m, per_rank, cost)
    ideal = timeline.makespan_seconds - idle
    # arXiv:2104.04473, section 2.2.2; arXiv:2211.05953, section 3: (p - 1) / (v m) of the ideal time.
    assert idle / ideal == pytest.approx((pp - 1) / (per_rank * m))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 4), (4, 12), (8, 32)])
def test_bubble_of_zb1p(pp: int, m: int, cost: tuple[int, int, int]) -> None:
    forward, inputs, weights = cost
    idle, _ = bubble("zb1p", pp, m, 1, cost)
    assert idle == pytest.approx((pp - 1) * (forward + inputs - weights))  # arXiv:2401.10241, table 1: ZB-H1


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 12), (8, 32)])
def test_bubble_of_zbv(pp: int, m: int) -> None:
    _, timeline = bubble("zbv", pp, m, 2, (1, 1, 1))
    # None between a rank's first action and its last, arXiv:2405.15362, figure 1; ranks begin one after the other.
    for rank, times in enumerate(timeline.ranks):
        assert times.first_seconds == rank
        assert times.last_seconds - times.first_seconds == times.compute_seconds


@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 12), (6, 20)])
def test_bubble_of_dualpipev(pp: int, m: int, cost: tuple[int, int, int]) -> None:
    forward, inputs, weights = cost
    backward = inputs + weights
    seconds = {"F": forward, "B": backward, "I": inputs, "W": weights}
    table = hpcomm.plan.dualpipev(pp, m)
    makespan, ranks = clock(table, seconds, in_pairs=True)
    # arXiv:2412.19437, table 2, with PP = 2 pp stages: (PP/2 - 1) (F&B + B - 3 W), a pair taking the sum of its parts.
    assert makespan - max(busy for _, _, busy in ranks) == (pp - 1) * (forward + backward + backward - 3 * weights)
    # Issued one after the other, a pair's forward is under way earlier, and the bubble is that of ZB1P.
    idle, _ = bubble("dualpipev", pp, m, 2, cost)
    assert idle == pytest.approx((pp - 1) * (forward + inputs - weights))


@pytest.mark.parametrize("pp", [1, 2, 4, 6])
def test_activations_held_at_a_time(pp: int) -> None:
    def peaks(name: str, per_rank: int | None = None) -> list[int]:
        result: list[int] = compiled(name, pp, 4 * pp, per_rank).peak_activations()
        return result

    ranks = range(pp)
    assert peaks("gpipe") == [4 * pp] * pp
    assert peaks("1f1b") == [pp - rank for rank in ranks]
    assert peaks("eager_1f1b") == [2 * (pp - rank) - 1 for rank in ranks]
    if pp > 1:
        assert peaks("interleaved_1f1b", 3) == [2 * pp + 2 * (pp - 1 - rank) + 1 for rank in ranks]
    assert peaks("looped_bfs", 2) == [8 * pp] * pp
    assert peaks("zb1p") == [pp] * pp  # as 1F1B's first rank
    assert peaks("zbv") == [2 * pp] * pp  # half stages: as 1F1B
    assert peaks("dualpipev") == [2 * pp + 1] * pp  # arXiv:2412.19437, table 2: PP + 1
    plan = compiled("zbv", pp, 4 * pp)
    plan.verify(max_activations=2 * pp)
    if pp > 1:
        with pytest.raises(InvalidArgument, match=f"rank 0 holds the activations of {2 * pp} microbatches at a time"):
            plan.verify(max_activations=2 * pp - 1)


# --- Any sizes --------------------------------------------------------------------------------------------------------

SHAPES = [(name, 1) for name in ("gpipe", "1f1b", "eager_1f1b", "zb1p", "forward_only")]
SHAPES += [(name, 2) for name in ("interleaved_1f1b", "looped_bfs", "zb1p", "zbv", "dualpipev", "forward_only")]
SHAPES += [("interleaved_1f1b", 3), ("zb1p", 4), ("looped_bfs", 4)]


def test_every_schedule_is_in_the_grid() -> None:
    assert {name for name, _ in SHAPES} == SCHEDULES.keys()


@pytest.mark.parametrize(("name", "per_rank"), SHAPES)
def test_all_sizes_compile_and_verify(name: str, per_rank: int) -> None:
    trains = name != "forward_only"
    for pp in range(1, 17):
        for m in sorted({1, 2, 3, max(1, pp - 1), pp, pp + 1, 2 * pp, 64}):
            stages = pp * per_rank
            if stages > 32 and m == 64:
                continue  # the largest ones below
            table, placement, _ = by_name(name, pp, m, per_rank)
            assert placement_of(table) == placement
            every = {(stage, microbatch) for stage in range(stages) for microbatch in range(m)}
            assert {(a.stage, a.microbatch) for row in table for a in row if a.kind == "F"} == every
            chain = [(stage, stage + 1, 64) for stage in range(stages - 1)]
            skips = [(0, stages - 1, 8)] if stages > 2 else []
            plan = hpcomm.plan.compile(
                name,
                pp=pp,
                dp=2 if m < 4 else 1,
                num_microbatches=m,
                stages_per_rank=per_rank,
                bucket_bytes=[[16, 8]] * stages if trains else None,
                ties=[([0, stages - 1], 32)] if trains and stages > 1 else [],
                links=chain + skips,
                reduce=("eager", "slack", "end")[(pp + m) % 3],
                schema=("frozen", "per_message")[m % 2],
            )
            plan.verify()
            for issues in plan.lists:
                numbers = [issue.op for issue in issues]
                assert numbers == sorted(numbers)


@pytest.mark.parametrize(("name", "per_rank"), SHAPES)
def test_the_largest_sizes_verify(name: str, per_rank: int) -> None:
    plan = compiled(name, 16, 64, per_rank)
    assert plan.verify().ranks == 16


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    pp=st.integers(1, 6),
    m=st.integers(1, 14),
    cost=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 3),
)
def test_simulate_agrees_with_a_walk_over_the_table(
    shape: tuple[str, int], pp: int, m: int, cost: tuple[float, float, float]
) -> None:
    forward, inputs, weights = cost
    table, placement, per_rank = by_name(shape[0], pp, m, shape[1])
    makespan, ranks = clock(table, {"F": forward, "B": inputs + weights, "I": inputs, "W": weights})
    # Slots, and lanes in an order made for other costs, would hold messages up, which the table knows nothing of.
    costs = model_of(len(placement), *cost)
    timeline = compiled(shape[0], pp, m, per_rank, costs=costs, slot_depth=0).simulate(costs)
    assert timeline.makespan_seconds == makespan
    assert [(t.first_seconds, t.last_seconds, t.compute_seconds) for t in timeline.ranks] == ranks


@pytest.mark.parametrize(("name", "per_rank"), [shape for shape in SHAPES if shape[0] != "forward_only"])
def test_on_a_gpu_no_message_waits_for_a_reduction(name: str, per_rank: int) -> None:
    costs = _C.CostModel()
    instant = _C.CostModel()
    costs.collective_bytes_per_second = 1e6
    for pp in range(1, 9):
        for m in (1, 2, 5, 8, 16):
            buckets = [[300_000, 600_000, 1_500_000]] * (pp * per_rank)  # 0.3, 0.6 and 1.5 seconds; a backward takes 2
            plan = compiled(name, pp, m, per_rank, dp=2, bucket_bytes=buckets, costs=costs, device="cuda")
            plan.verify()
            messages = [i for i, op in enumerate(plan.operations) if op.kind == _C.OpKind.TRANSFER]
            late, early = plan.simulate(costs), plan.simulate(instant)
            assert [late.end[i] for i in messages] == pytest.approx([early.end[i] for i in messages])
            # Without costs what finds no bubble is reduced when nobody waits any more.
            plan = compiled(name, pp, m, per_rank, dp=2, bucket_bytes=buckets, device="cuda")
            plan.verify()


def test_on_a_gpu_the_last_message_goes_out_ahead_of_reductions() -> None:
    def last_rank(device: str | None) -> str:
        plan = compiled("1f1b", 2, 2, dp=2, bucket_bytes=[[8, 8, 8]] * 2, device=device)
        return str(plan).splitlines()[1]

    assert last_rank("cuda").endswith("B1 s1 R0 R1 R2")
    for device in ("cpu", None):
        assert last_rank(device).endswith("B1{R0 R1 R2} s1")


# --- Tables of users --------------------------------------------------------------------------------------------------


def test_a_drawn_table_is_read_as_it_was_written() -> None:
    for name, per_rank in SHAPES:
        table, _, _ = by_name(name, 3, 4, per_rank)
        assert parse(draw(table)) == table
    assert parse("F0 B0\n\n F0 B0") == hpcomm.plan.gpipe(2, 1)
    with pytest.raises(InvalidArgument, match="row 1: 'X0' is no action"):
        parse("F0\nX0")


def test_a_users_table_with_several_stages_per_rank() -> None:
    text = """\
rank 0 | 0F0 2F0 2B0 0B0
rank 1 | 1F0 3F0 3I0 3W0 1B0
"""
    plan = hpcomm.plan.compile(parse(text), pp=2, num_microbatches=1)
    plan.verify()
    assert str(plan).split("F forward")[0] == (
        "rank 0 | 0F0 0S0 2r0 2F0 2S0 L 2r0 2B0 2s0 0r0 0B0\nrank 1 | 1r0 1F0 1S0 3r0 3F0 L 3I0 3s0 3W0 1r0 1B0 1s0\n"
    )
    with pytest.raises(InvalidArgument, match="leaves out WEIGHT_GRAD mb 0 of stage 3"):
        hpcomm.plan.compile(parse(text.replace("3W0", "")), pp=2, num_microbatches=1)
    with pytest.raises(InvalidArgument, match="BACKWARD mb 0 of stage 1 and also INPUT_GRAD mb 0 of stage 1, a half"):
        hpcomm.plan.compile(parse(text.replace("1B0", "1B0 1I0 1W0")), pp=2, num_microbatches=1)
    with pytest.raises(
        DeadlockError, match="WEIGHT_GRAD mb 0 of stage 3 needs the result of INPUT_GRAD mb 0 of stage 3"
    ):
        hpcomm.plan.compile(parse(text.replace("3I0 3W0", "3W0 3I0")), pp=2, num_microbatches=1)


def test_sizes_and_names_that_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="schedule '1f1b' has 1 stages per rank, not 2"):
        by_name("1f1b", 2, 2, 2)
    with pytest.raises(InvalidArgument, match="schedule 'zbv' has 2 stages per rank, not 3"):
        by_name("zbv", 2, 2, 3)
    with pytest.raises(InvalidArgument, match="V-shaped schedule puts 2 stages on each rank, not 3"):
        hpcomm.plan.zbv(2, 2, 3)
    for generate in (hpcomm.plan.interleaved_1f1b, hpcomm.plan.zb1p, hpcomm.plan.dualpipev, hpcomm.plan.forward_only):
        with pytest.raises(InvalidArgument, match="at least 1 stage and 1 microbatch"):
            generate(2, 0)
    with pytest.raises(InvalidArgument, match="reduce='late'; use one of eager, slack, end"):
        compiled("1f1b", 2, 2, reduce="late")
    with pytest.raises(InvalidArgument, match="no row names stage 1"):
        placement_of(parse("0F0 2F0"))
    with pytest.raises(InvalidArgument, match="stage 0 stands in the rows of ranks 0 and 1"):
        placement_of(parse("0F0\n0F1"))
    with pytest.raises(InvalidArgument, match="tick=0"):
        draw_ticks(compiled("1f1b", 2, 2), tick=0)


def test_every_action_is_drawn_however_long_a_tick_is() -> None:
    plan = compiled("gpipe", 2, 3)
    assert draw_ticks(plan, tick=5).splitlines()[0] == "rank 0 | F0F1F2   B0B1     B2"
    costs = hpcomm.plan.CostModel()
    costs.stages = [hpcomm.plan.StageCost(1.0, 0.4)]
    alone = hpcomm.plan.compile("1f1b", pp=1, num_microbatches=1, costs=costs)
    assert draw_ticks(alone, costs) == "rank 0 | F0 B0"
    for tick in (0.3, 0.7, 1.0, 2.5, 100.0):
        text = draw_ticks(plan, tick=tick)
        assert all(text.count(f"{kind}{m}") == 2 for kind in "FB" for m in range(3)), text
