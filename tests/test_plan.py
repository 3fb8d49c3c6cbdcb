"""hpcomm.plan: schedules as a person draws them, and a machine that says whether verify() is right."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import outcome

import hpcomm.plan
from hpcomm._native import load
from hpcomm.errors import DeadlockError, InvalidArgument, SchemaMismatch
from hpcomm.plan import ComputeAction, from_json, gpipe, one_f_one_b, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_C = load()
ActionKind, OpKind, Payload, Lane = _C.ActionKind, _C.OpKind, _C.Payload, _C.Lane
Issue, Operation = _C.Issue, _C.Operation


def plan_of(schedule: Any, pp: int, dp: int, num_microbatches: int, buckets: int = 2, **options: Any) -> Any:
    return hpcomm.plan.compile(
        schedule,
        pp=pp,
        dp=dp,
        num_microbatches=num_microbatches,
        bucket_bytes=[[4096] * buckets] * pp,
        **options,
    )


def drawn(plan: Any) -> str:
    """The rows of a printed plan, without the legend."""
    return str(plan).split("F forward")[0]


def compute_rows(table: list[list[ComputeAction]]) -> list[str]:
    return [" ".join(map(str, actions)) for actions in table]


# --- Schedules --------------------------------------------------------------------------------


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert compute_rows(gpipe(2, 4)) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 2


def test_1f1b_of_2_stages_and_4_microbatches() -> None:
    assert compute_rows(one_f_one_b(2, 4)) == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_of_4_stages_and_8_microbatches() -> None:
    assert compute_rows(one_f_one_b(4, 8)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_of_fewer_microbatches_than_stages() -> None:
    assert compute_rows(one_f_one_b(4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


@given(num_stages=st.integers(1, 8), num_microbatches=st.integers(1, 20))
def test_1f1b_keeps_at_most_the_stages_ahead_in_memory(num_stages: int, num_microbatches: int) -> None:
    for stage, actions in enumerate(one_f_one_b(num_stages, num_microbatches)):
        alive = peak = 0
        for action in actions:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert alive == 0
        assert peak == min(num_stages - stage, num_microbatches)


def test_schedules_refuse_sizes_and_names() -> None:
    with pytest.raises(InvalidArgument, match="at least 1 stage and 1 microbatch, not 2 and 0"):
        gpipe(2, 0)
    with pytest.raises(InvalidArgument, match="at least 1 stage"):
        one_f_one_b(0, 2)
    with pytest.raises(InvalidArgument, match="unknown schedule '2f2b'; known: 1f1b, .*gpipe"):
        plan_of("2f2b", 2, 1, 4)


# --- Plans as a person draws them -------------------------------------------------------------


def test_gpipe_plan_2x4() -> None:
    assert (
        drawn(plan_of("gpipe", 2, 1, 4))
        == """\
rank 0 | F0 S0 F1 S1 F2 S2 F3 S3 L r0 B0 r1 B1 r2 B2 r3 B3{R0 R1}
rank 1 | r0 F0 r1 F1 r2 F2 r3 F3 L B0 s0 B1 s1 B2 s2 B3{R0 R1} s3
"""
    )


def test_1f1b_plan_2x4_with_two_replicas() -> None:
    assert (
        drawn(plan_of("1f1b", 2, 2, 4))
        == """\
rank 0-1 | F0 S0 F1 S1 r0 B0 F2 S2 r1 B1 F3 S3 r2 B2 L r3 B3{R0 R1}
rank 2-3 | r0 F0 r1 B0 s0 F1 B1 r2 s1 F2 B2 r3 s2 F3 L B3{R0 R1} s3
"""
    )


def test_gpipe_plan_4x8() -> None:
    assert (
        drawn(plan_of("gpipe", 4, 1, 8))
        == """\
rank 0 | F0 S0 F1 S1 F2 S2 F3 S3 F4 S4 F5 S5 F6 S6 F7 S7 L r0 B0 r1 B1 r2 B2 r3 B3 r4 B4 r5 B5 r6 B6 r7
       | B7{R0 R1}
rank 1 | r0 F0 r1 S0 F1 r2 S1 F2 r3 S2 F3 r4 S3 F4 r5 S4 F5 r6 S5 F6 r7 S6 F7 S7 L r0 B0 s0 r1 B1 s1 r2 B2 s2
       | r3 B3 s3 r4 B4 s4 r5 B5 s5 r6 B6 s6 r7 B7{R0 R1} s7
rank 2 | r0 F0 r1 S0 F1 r2 S1 F2 r3 S2 F3 r4 S3 F4 r5 S4 F5 r6 S5 F6 r7 S6 F7 S7 L r0 B0 s0 r1 B1 s1 r2 B2 s2
       | r3 B3 s3 r4 B4 s4 r5 B5 s5 r6 B6 s6 r7 B7{R0 R1} s7
rank 3 | r0 F0 r1 F1 r2 F2 r3 F3 r4 F4 r5 F5 r6 F6 r7 F7 L B0 s0 B1 s1 B2 s2 B3 s3 B4 s4 B5 s5 B6 s6 B7{R0 R1}
       | s7
"""
    )


def test_1f1b_plan_4x8() -> None:
    assert (
        drawn(plan_of("1f1b", 4, 1, 8))
        == """\
rank 0 | F0 S0 F1 S1 F2 S2 F3 S3 r0 B0 F4 S4 r1 B1 F5 S5 r2 B2 F6 S6 r3 B3 F7 S7 r4 B4 r5 L B5 r6 B6 r7
       | B7{R0 R1}
rank 1 | r0 F0 r1 S0 F1 r2 S1 F2 r3 S2 r0 B0 s0 F3 S3 r1 B1 r4 s1 F4 S4 r2 B2 r5 s2 F5 S5 r3 B3 r6 s3 F6 S6 r4
       | B4 r7 s4 F7 S7 r5 B5 s5 L r6 B6 s6 r7 B7{R0 R1} s7
rank 2 | r0 F0 r1 S0 F1 r2 S1 r0 B0 s0 F2 S2 r1 B1 r3 s1 F3 S3 r2 B2 r4 s2 F4 S4 r3 B3 r5 s3 F5 S5 r4 B4 r6 s4
       | F6 S6 r5 B5 r7 s5 F7 S7 r6 B6 L s6 r7 B7{R0 R1} s7
rank 3 | r0 F0 r1 B0 s0 F1 B1 r2 s1 F2 B2 r3 s2 F3 B3 r4 s3 F4 B4 r5 s4 F5 B5 r6 s5 F6 B6 r7 s6 F7 L B7{R0 R1}
       | s7
"""
    )


def test_legend_names_size_and_hash() -> None:
    plan = plan_of("1f1b", 2, 2, 4)
    last = str(plan).splitlines()[-1]
    assert last == (
        f"pp 2 x dp 2, 2 stages, 4 microbatches, {len(plan.operations)} operations, "
        f"communicators: 2 forward, 2 backward, 2 gradient, 1 scalar, hash {plan.hash:016x}"
    )


def test_plan_of_a_users_table() -> None:
    # One forward, its backward, then the next: no pipelining at all.
    table = [[ComputeAction(kind, stage, m) for m in range(2) for kind in ("F", "B")] for stage in range(2)]
    plan = plan_of(table, 2, 1, 2, buckets=1)
    assert (
        drawn(plan)
        == """\
rank 0 | F0 S0 r0 B0 F1 S1 L r1 B1{R0}
rank 1 | r0 F0 B0 s0 r1 F1 L B1{R0} s1
"""
    )
    plan.verify()


def test_actions_are_what_a_runner_needs() -> None:
    plan = plan_of("1f1b", 2, 2, 4, activation_bytes=512)
    assert (plan.world, plan.pp, plan.dp, plan.num_stages) == (4, 2, 2, 2)
    first = plan.actions(3)[0]
    assert (first.kind, first.payload, first.lane) == (ActionKind.RECV, Payload.ACTIVATION, Lane.FORWARD)
    assert (first.peer, first.stage, first.peer_stage, first.microbatch, first.bytes) == (1, 1, 0, 0, 512)
    backward = plan.actions(3)[-2]
    assert backward.kind == ActionKind.BACKWARD
    assert [(inner.kind, inner.bucket, inner.bytes) for inner in backward.inside] == [
        (ActionKind.REDUCE, 0, 4096),
        (ActionKind.REDUCE, 1, 4096),
    ]
    assert [inner.lane for inner in backward.inside] == [Lane.GRADIENT] * 2
    with pytest.raises(InvalidArgument, match="no issue list for rank 4"):
        plan.actions(4)


def test_compile_refuses_lengths_that_do_not_fit() -> None:
    with pytest.raises(InvalidArgument, match="activation_bytes has 2 sizes; 2 stages have 1 boundaries"):
        plan_of("1f1b", 2, 1, 4, activation_bytes=[8, 8])
    with pytest.raises(InvalidArgument, match="has an action of stage 999999991 and none of stage 1$"):
        hpcomm.plan.compile(hpcomm.plan.parse("0F0 0B0 999999991F1"), pp=1, dp=1, num_microbatches=2)
    with pytest.raises(InvalidArgument, match="device='tpu'"):
        plan_of("1f1b", 2, 1, 4, device="tpu")
    with pytest.raises(InvalidArgument, match="forward_cost has 1 costs; there are 2 stages"):
        plan_of("1f1b", 2, 1, 4, forward_cost=[1.0])
    with pytest.raises(InvalidArgument, match=r"puts its stages on \[0, 1\]; stage_to_rank is \[0, 1, 0, 1\]"):
        plan_of("1f1b", 2, 1, 4, stage_to_rank=[0, 1, 0, 1])
    with pytest.raises(InvalidArgument, match="buckets are given for 1 stages"):
        hpcomm.plan.compile("1f1b", pp=2, num_microbatches=4, bucket_bytes=[[8]])


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ({"activation_bytes": 8.4e6}, "activation_bytes is 8400000.0; give whole bytes, at most 9223372036854775807"),
        ({"bucket_bytes": [[10**30]] * 2}, "bucket_bytes of stage 0 is 1000000000000000000000000000000; give whole"),
        ({"ties": [([0, 1], 10**30)]}, "a tie is 1000000000000000000000000000000; give whole bytes"),
        ({"links": [(0, 1, 10**30)]}, "a link is 1000000000000000000000000000000; give whole bytes"),
        ({"links": [(0, 1)]}, r"a link is \(from_stage, to_stage, bytes\) or has True or False behind, not \(0, 1\)"),
        ({"dp": 2.5}, "dp is 2.5; give a whole number, at most 2147483647"),
        ({"num_microbatches": "2"}, "num_microbatches is '2'; give a whole number"),
        ({"slot_depth": 2**31}, "slot_depth is 2147483648; give a whole number"),
        ({"opaque_stages": [2**40]}, "an opaque stage is 1099511627776; give a whole number"),
    ],
)
def test_compile_refuses_what_no_plan_can_count(size: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        hpcomm.plan.compile("1f1b", **{"pp": 2, "num_microbatches": 2, **size})


def test_import_does_not_load_the_native_module() -> None:
    code = "import sys, hpcomm.plan; hpcomm.plan.gpipe(2, 2); sys.exit('hpcomm._C' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert hpcomm.plan.StepPlan is _C.StepPlan
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = hpcomm.plan.Nonsense


# --- Against the reference machine (tests/machine.py) -----------------------------------------------------------------


shapes = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["gpipe", "1f1b"]),
        "pp": st.integers(1, 6),
        "dp": st.integers(1, 3),
        "num_microbatches": st.integers(1, 12),
        "buckets": st.integers(0, 3),
        "slot_depth": st.integers(0, 3),
        "link_latency": st.sampled_from([0.0, 0.5, 3.0]),
    }
)
costs = st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0, 7.0]), min_size=6, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, forward=costs, backward=costs, seed=st.integers(0, 2**32))
def test_compiled_plans_verify_and_end(
    shape: dict[str, Any], forward: list[float], backward: list[float], seed: int
) -> None:
    pp = shape["pp"]
    plan = plan_of(**shape, forward_cost=forward[:pp], backward_cost=backward[:pp])
    result = plan.verify()
    assert (result.operations, result.ranks) == (len(plan.operations), plan.world)
    assert outcome(plan, seed) == "done"
    back = from_json(to_json(plan))
    assert back == plan
    assert back.hash == plan.hash
    # The order that every rank issues in is the one global order.
    for issues in plan.lists:
        numbers = [issue.op for issue in issues]
        assert numbers == sorted(numbers)


def judge(plan: Any) -> str:
    try:
        plan.verify()
    except (DeadlockError, SchemaMismatch, InvalidArgument) as error:
        return type(error).__name__
    return "accepted"


def entries(plan: Any, rank: int) -> list[list[Any]]:
    """The list of a rank as it is printed: a backward and its issue points are one entry."""
    result: list[list[Any]] = []
    for issue in plan.lists[rank]:
        if issue.host == -1:
            result.append([])
        result[-1].append(issue)
    return result


def with_list(plan: Any, rank: int, issues: list[Any]) -> Any:
    edited = plan.copy()
    edited.lists = [issues if r == rank else old for r, old in enumerate(plan.lists)]
    return edited


def swapped(plan: Any, rank: int, position: int) -> Any:
    units = entries(plan, rank)
    units[position], units[position + 1] = units[position + 1], units[position]
    return with_list(plan, rank, list(itertools.chain.from_iterable(units)))


def dropped(plan: Any, rank: int, position: int) -> Any:
    return with_list(plan, rank, plan.lists[rank][:position] + plan.lists[rank][position + 1 :])


def check_verdict(plan: Any, seed: int) -> str:
    verdict = judge(plan)
    if verdict == "accepted":
        assert outcome(plan, seed) == "done"
    elif verdict != "InvalidArgument":
        assert outcome(plan, seed) in ("hang", "mismatch")
    return verdict


def is_compute(plan: Any, op: int) -> bool:
    return plan.operations[op].kind in (OpKind.FORWARD, OpKind.BACKWARD)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "dp"), [(3, 1), (2, 2)])
def test_every_swap_of_neighbours_gets_the_machines_verdict(schedule: str, pp: int, dp: int) -> None:
    plan = plan_of(schedule, pp, dp, 4)
    verdicts: Counter[str] = Counter()
    for rank in range(plan.world):
        for position in range(len(entries(plan, rank)) - 1):
            verdicts[check_verdict(swapped(plan, rank, position), seed=position)] += 1
    # Neither verdict is a constant, and no such swap makes the plan meaningless.
    assert verdicts["accepted"] > 0
    assert verdicts["DeadlockError"] > 0
    assert verdicts.keys() == {"accepted", "DeadlockError"}


@pytest.mark.parametrize(
    ("dp", "verdict", "on_the_machine"), [(1, "accepted", "done"), (2, "SchemaMismatch", "mismatch")]
)
def test_swapped_reductions_matter_where_replicas_meet(dp: int, verdict: str, on_the_machine: str) -> None:
    plan = plan_of("1f1b", 2, dp, 2)
    *others, first, second = plan.lists[0]
    assert first.host == second.host != -1
    edited = with_list(plan, 0, [*others, second, first])
    assert judge(edited) == verdict
    assert outcome(edited) == on_the_machine


def test_an_issue_point_that_leaves_its_backward_is_refused() -> None:
    plan = plan_of("1f1b", 2, 1, 2)
    issues = plan.lists[1]
    assert plan.operations[issues[-1].op].kind == OpKind.TRANSFER
    with pytest.raises(InvalidArgument, match="must follow that operation or another entry inside it"):
        with_list(plan, 1, [*issues[:-2], issues[-1], issues[-2]]).verify()


def test_a_reduction_before_the_last_gradient_is_refused() -> None:
    plan = plan_of("gpipe", 1, 2, 2, buckets=1)
    # F0 F1 L B0 B1{R0}: the machine is content with B1{R0} B0, the gradients are not.
    edited = plan
    for rank in (0, 1):
        edited = swapped(edited, rank, 3)
    assert drawn(edited) == "rank 0-1 | F0 F1 L B1{R0} B0\n"
    assert outcome(edited) == "done"
    with pytest.raises(InvalidArgument, match="before BACKWARD mb 0 of stage 0 has added to its gradients"):
        edited.verify()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_dropped_entry_is_rejected(schedule: str) -> None:
    plan = plan_of(schedule, 2, 2, 3)
    for rank, issues in enumerate(plan.lists):
        for position, issue in enumerate(issues):
            edited = dropped(plan, rank, position)
            verdict = check_verdict(edited, seed=position)
            if is_compute(plan, issue.op):
                assert verdict == "InvalidArgument"
            else:
                assert verdict in ("DeadlockError", "SchemaMismatch")
                assert outcome(edited, position) != "done"


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    edits=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 999)), max_size=4),
    seed=st.integers(),
)
def test_random_swaps_get_the_machines_verdict(shape: dict[str, Any], edits: list[tuple[int, int]], seed: int) -> None:
    plan = plan_of(**shape)
    for some_rank, position in edits:
        rank = some_rank % plan.world
        plan = swapped(plan, rank, position % (len(entries(plan, rank)) - 1))
    check_verdict(plan, seed)


# --- Files ------------------------------------------------------------------------------------


def test_json_names_what_is_damaged() -> None:
    text = to_json(plan_of("1f1b", 2, 2, 2))
    document = json.loads(text)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(InvalidArgument, match=match):
            from_json(json.dumps({**document, **changes}))

    for broken, match in [
        ("", "not JSON"),
        (text[:-1], "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", '"format" must be "hpcomm.StepPlan"'),
        ("{}", '"format" must be'),
        ('{"format":"hpcomm.StepPlan"}', "version: expected an integer of 32 bits, found None"),
    ]:
        with pytest.raises(InvalidArgument, match=match):
            from_json(broken)
    refused("version 2; this hpcomm reads version 3", version=2)
    refused('"columns" must be', columns=[])
    refused("its hash is", hash="0" * 16)
    refused("its hash is .*, the text says None", hash=None)
    refused("its hash is", slot_depth=9)
    refused("pp: expected an integer of 32 bits, found True", pp=True)
    refused("dp: expected an integer of 32 bits, found 2.0", dp=2.0)
    refused("num_microbatches: expected an integer of 32 bits, found 99999999999", num_microbatches=99999999999)
    refused("stage_to_rank: expected a list, found None", stage_to_rank=None)
    refused(r"buckets\[0\]: expected an integer of 64 bits", buckets=[[2**63]])
    refused(r"communicators\[0\]: expected one of COMPUTE, .*found 'WARP'", communicators=[["WARP", [0, 1]]])
    refused(r"operations\[0\]: expected a list of 10, found \[\]", operations=[[]])
    refused(
        r"operations\[0\]: expected one of FORWARD, .*found 7",
        operations=[[7, *document["operations"][0][1:]]],
    )
    refused(r"lists\[1\]: expected a list of 2, found \[1\]", lists=[[], [[1]]])
    refused(r"dependencies\[0\]: expected a list of 2, found 'ab'", dependencies=["ab"])


def test_json_keeps_everything_of_a_plan() -> None:
    plan = hpcomm.plan.compile(
        "zbv",
        pp=2,
        dp=2,
        num_microbatches=4,
        bucket_bytes=[[8, 4]] * 4,
        links=[(0, 1, 8), (1, 2, 8), (2, 3, 8), (0, 2, 4, False)],
        ties=[([0, 3], 16), ([1, 2, 3], 32)],
        schema="per_message",
        max_communicators=5,
        device="cuda",
        group=True,
    )
    plan.verify()
    assert len(plan.ties) == 2
    back = from_json(to_json(plan))
    assert back == plan
    assert (back.ties, back.schema) == (plan.ties, plan.schema)
    for field in ("ties", "schema", "tp", "start_order"):
        document = json.loads(to_json(plan))
        document[field] = {
            "ties": [[[0, 3], 17], [[1, 2, 3], 32]],
            "schema": "FROZEN",
            "tp": 2,
            "start_order": "SLOTS",
        }[field]
        with pytest.raises(InvalidArgument, match="its hash is"):
            from_json(json.dumps(document))


def test_json_of_a_meaningless_plan_is_refused_even_with_its_own_hash() -> None:
    plan = plan_of("1f1b", 2, 2, 2)
    lists = plan.lists
    lists[0][0] = Issue(10_000)
    plan.lists = lists
    with pytest.raises(InvalidArgument, match="not a well-formed StepPlan: entry 0 of rank 0's list names"):
        from_json(to_json(plan))


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(child, (*path, key))
    yield path


SMALL = json.loads(to_json(plan_of("1f1b", 2, 1, 2)))
PATHS = [path for path in leaves(SMALL) if path]


@settings(max_examples=200, deadline=None)
@given(
    path=st.sampled_from(PATHS),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([[], {}]),
)
def test_json_with_any_one_value_replaced_is_refused_or_the_same(path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(json.dumps(SMALL))
    node = document
    for key in path[:-1]:
        node = node[key]
    same = type(node[path[-1]]) is type(value) and node[path[-1]] == value
    node[path[-1]] = value
    if same:
        from_json(json.dumps(document))
    else:
        with pytest.raises(InvalidArgument, match=r"."):
            from_json(json.dumps(document))
