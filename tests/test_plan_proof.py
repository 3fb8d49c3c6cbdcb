"""The proof: what verify() accepts ends on the machines, what it rejects hangs there; the known hangs of others."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from machine import hand_made, message, outcome, outcomes

import hpcomm.plan
from hpcomm._native import load
from hpcomm.errors import DeadlockError, InvalidArgument, SchemaMismatch
from hpcomm.plan.schedules import SCHEDULES

_C = load()
Issue, Operation, OpKind = _C.Issue, _C.Operation, _C.OpKind


def judge(plan: Any, **options: Any) -> str:
    try:
        plan.verify(**options)
    except (DeadlockError, SchemaMismatch, InvalidArgument) as error:
        return type(error).__name__
    return "accepted"


# --- The known hangs of others, as plans ------------------------------------------------------------------------------


def test_send_first_on_both_sides_hangs() -> None:
    plan = hand_made(2, 2, [message(0, 1, 1), message(1, 0, 0)], [[0, 1], [1, 0]])
    assert outcome(plan) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value) == (
        "the plan cannot end:\n"
        "  rank 1 waits to RECV act mb 1 on edge 0->1, behind SEND grad mb 0 on edge 1->0,\n"
        "  which waits for rank 0: it waits to RECV grad mb 0 on edge 1->0, behind SEND act mb 1 on edge 0->1,\n"  # noqa: E501
        "  where the circle closes"
    )
    plan.lists = [[Issue(0), Issue(1)]] * 2
    assert outcome(plan) == "done"
    plan.verify()


def test_all_reduce_and_message_in_different_orders_hang() -> None:
    # Each communicator is used consistently; they hang only together, where one operation runs at a time.
    loss = Operation(OpKind.LOSS, communicator=2, participants=[0, 1], bytes=8)
    plan = hand_made(2, 1, [loss, message(0, 1, 0)], [[0, 1], [1, 0]])
    assert outcome(plan) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value) == (
        "the plan cannot end:\n"
        "  rank 1 waits to REDUCE loss, behind RECV act mb 0 on edge 0->1,\n"
        "  which waits for rank 0: it waits to SEND act mb 0 on edge 0->1, behind REDUCE loss,\n"
        "  where the circle closes"
    )


def test_front_loaded_receives_hang() -> None:
    # Rank 1 posts all its receives before it returns the first gradient; rank 0 sends the second after that.
    plan = hand_made(2, 2, [message(0, 1, 0), message(0, 1, 1), message(1, 0, 0)], [[0, 2, 1], [0, 1, 2]])
    assert outcome(plan) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value) == (
        "the plan cannot end:\n"
        "  rank 0 waits to SEND act mb 1 on edge 0->1, behind RECV grad mb 0 on edge 1->0,\n"
        "  which waits for rank 1: it waits to SEND grad mb 0 on edge 1->0, behind RECV act mb 1 on edge 0->1,\n"  # noqa: E501
        "  where the circle closes"
    )


def test_a_ring_of_three_that_all_send_first_hangs() -> None:
    # 0 -> 1 -> 2 -> 0: no pair of ranks is at fault, only all three together.
    ring = [message(0, 1, 0), message(1, 2, 0), message(2, 0, 0)]
    plan = hand_made(3, 1, ring, [[0, 2], [1, 0], [2, 1]])
    assert outcome(plan) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value).splitlines()[1:] == [
        "  rank 1 waits to RECV act mb 0 on edge 0->1, behind SEND act mb 0 on edge 1->2,",
        "  which waits for rank 2: it waits to RECV act mb 0 on edge 1->2, behind SEND grad mb 0 on edge 2->0,",  # noqa: E501
        "  which waits for rank 0: it waits to RECV grad mb 0 on edge 2->0, behind SEND act mb 0 on edge 0->1,",  # noqa: E501
        "  where the circle closes",
    ]
    plan.lists = [[Issue(0), Issue(2)], [Issue(0), Issue(1)], [Issue(1), Issue(2)]]
    assert outcome(plan) == "done"
    plan.verify()


def pair_collective(tie: int, a: int, b: int, communicator: int) -> Any:
    return Operation(OpKind.TIED, bucket=tie, communicator=communicator, participants=[a, b])


def test_pair_communicators_made_at_their_first_use_hang() -> None:
    # Making a communicator is a collective of its ranks. Three ranks that each make the one they need first, lazily,
    # wait for each other in a ring. (The collectives of the pairs stand in for it: reductions of tied parameters.)
    pairs = [(0, 1), (1, 2), (0, 2)]
    plan = hand_made(
        3, 1, [pair_collective(i, a, b, 3 + i) for i, (a, b) in enumerate(pairs)], [[0, 2], [1, 0], [2, 1]]
    )
    plan.ties = [_C.Tie([a, b], 0) for a, b in pairs]
    plan.communicators = [*plan.communicators, *(_C.CommunicatorSpec([a, b], _C.Lane.GRADIENT) for a, b in pairs)]
    assert outcomes(plan) == {"hang"}
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value).splitlines()[1:] == [
        "  rank 1 waits to REDUCE tie 0, behind REDUCE tie 1,",
        "  which waits for rank 2: it waits to REDUCE tie 1, behind REDUCE tie 2,",
        "  which waits for rank 0: it waits to REDUCE tie 2, behind REDUCE tie 0,",
        "  where the circle closes",
    ]
    # All made before the first step, in one order, as a plan lists its communicators.
    plan.lists = [[Issue(0), Issue(2)], [Issue(0), Issue(1)], [Issue(1), Issue(2)]]
    assert outcomes(plan) == {"done"}
    plan.verify()


def test_a_hidden_item_between_two_groups_hangs() -> None:
    # Rank 0 receives a gradient, then sends an activation; rank 1 receives the activation, then sends the gradient.
    # With a slot for every lane both can be under way together, until the host reads what it received: `.item()`.
    act, grad = message(0, 1, 0), message(1, 0, 0)
    lists = [[1, 0], [0, 1]]
    plan = hand_made(2, 1, [act, grad], lists)
    assert outcome(plan) == "hang"
    assert outcome(plan, lanes=True) == "done"
    assert judge(plan) == "DeadlockError"
    assert judge(plan, slots=True) == "accepted"
    items = [Operation(OpKind.FORWARD, stage=rank, microbatch=0, participants=[rank]) for rank in (0, 1)]
    plan = hand_made(2, 1, [act, grad, *items], [[1, 2, 0], [0, 3, 1]])
    plan.dependencies = [(1, 2), (0, 3)]
    assert outcome(plan, lanes=True) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify(slots=True)
    assert str(error.value).splitlines()[1:] == [
        "  rank 0 waits to SEND act mb 0 on edge 0->1, behind FORWARD mb 0 of stage 0,",
        "  which needs the result of RECV grad mb 0 on edge 1->0,",
        "  which waits for rank 1: it waits to SEND grad mb 0 on edge 1->0, behind FORWARD mb 0 of stage 1,",
        "  which needs the result of RECV act mb 0 on edge 0->1,",
        "  where the circle closes",
    ]


# --- Every small plan -------------------------------------------------------------------------------------------------

# What ranks can do with each other; a plan takes each at most once.
UNIVERSE = [
    message(0, 1, 0),
    message(0, 1, 1),
    message(1, 0, 0),
    message(1, 2, 0),
    message(2, 0, 0),
    Operation(OpKind.LOSS, communicator=2, participants=[0, 1, 2], bytes=8),
]
COLLECTIVE = [Operation(OpKind.LOSS, communicator=2, participants=[0, 1], bytes=8)]


def all_plans(pp: int, operations: list[Any], most: int) -> Iterator[Any]:
    """Every choice of at most ``most`` operations, in every order on every rank."""
    for count in range(1, most + 1):
        for chosen in itertools.combinations(operations, count):
            mine = [[i for i, op in enumerate(chosen) if rank in op.participants] for rank in range(pp)]
            for orders in itertools.product(*(itertools.permutations(ops) for ops in mine)):
                yield hand_made(pp, 2, list(chosen), [list(order) for order in orders])


@pytest.mark.parametrize(
    ("pp", "operations", "most", "least_plans"), [(2, UNIVERSE[:3] + COLLECTIVE, 4, 700), (3, UNIVERSE, 4, 3000)]
)
def test_every_small_plan_gets_the_verdict_of_every_interleaving(
    pp: int, operations: list[Any], most: int, least_plans: int
) -> None:
    verdicts: Counter[str] = Counter()
    for plan in all_plans(pp, operations, most):
        found = outcomes(plan)
        verdict = judge(plan)
        verdicts[verdict] += 1
        # Whatever the order in which ranks get ahead: what ends always ends, what hangs always hangs. A mismatch may be
        # met before or behind a hang.
        if verdict == "accepted":
            assert found == {"done"}
        else:
            assert "done" not in found
            assert verdict != "SchemaMismatch" or found <= {"mismatch", "hang"}
            assert verdict != "DeadlockError" or found == {"hang"}
    assert verdicts.total() > least_plans
    assert verdicts.keys() == {"accepted", "DeadlockError", "SchemaMismatch"}


def test_data_that_comes_too_late_in_every_small_plan() -> None:
    # A computation on each side of a message and of its answer, in every order.
    operations = [
        Operation(OpKind.FORWARD, stage=0, microbatch=0, participants=[0]),
        message(0, 1, 0),
        Operation(OpKind.FORWARD, stage=1, microbatch=0, participants=[1]),
        message(1, 0, 0),
        Operation(OpKind.BACKWARD, stage=0, microbatch=0, participants=[0]),
    ]
    verdicts: Counter[str] = Counter()
    for first, second in itertools.product(itertools.permutations([0, 1, 3, 4]), itertools.permutations([1, 2, 3])):
        plan = hand_made(2, 1, operations, [list(first), list(second)])
        plan.dependencies = [(0, 1), (1, 2), (2, 3), (3, 4)]
        verdicts[judge(plan)] += 1
        assert outcomes(plan) == ({"done"} if judge(plan) == "accepted" else {"hang"})
    assert verdicts == {"accepted": 1, "DeadlockError": 24 * 6 - 1}


def opaque(microbatch: int, communicator: int, ranks: list[int]) -> Any:
    return Operation(OpKind.FORWARD, stage=0, microbatch=microbatch, communicator=communicator, participants=ranks)


def test_every_small_plan_of_computations_that_ranks_share() -> None:
    # Three replicas of one stage: all pairs compute something together, one of them twice, and all reduce the loss.
    pairs = [[0, 1], [1, 2], [0, 2]]
    universe = [opaque(i, i, pair) for i, pair in enumerate(pairs)]
    universe += [opaque(3, 0, pairs[0]), Operation(OpKind.LOSS, communicator=3, participants=[0, 1, 2], bytes=8)]
    verdicts: Counter[str] = Counter()
    for count in range(1, 5):
        for chosen in itertools.combinations(universe, count):
            mine = [[i for i, op in enumerate(chosen) if rank in op.participants] for rank in range(3)]
            for orders in itertools.product(*(itertools.permutations(ops) for ops in mine)):
                plan = hand_made(1, 4, list(chosen), [list(order) for order in orders])
                plan.dp = 3
                plan.communicators = [_C.CommunicatorSpec(pair, _C.Lane.TENSOR) for pair in pairs]
                plan.communicators = [*plan.communicators, _C.CommunicatorSpec([0, 1, 2], _C.Lane.SCALAR)]
                verdict, found = judge(plan), outcomes(plan)
                verdicts[verdict] += 1
                assert (found == {"done"}) == (verdict == "accepted")
                assert "done" not in found or verdict == "accepted"
                assert verdict != "DeadlockError" or found == {"hang"}
    assert verdicts.total() > 600
    assert verdicts.keys() == {"accepted", "DeadlockError", "SchemaMismatch"}


def test_synchronised_batch_normalisation_beside_a_reduction_hangs() -> None:
    # Two replicas of one stage: the forward's statistics are a collective among them. One replica issues the reduction
    # of the step before behind its forward, the other before it; each communicator is used in one order.
    plan = hand_made(1, 2, [opaque(0, 0, [0, 1]), Operation(OpKind.LOSS, communicator=1, participants=[0, 1])], [[]])
    plan.dp = 2
    plan.communicators = [_C.CommunicatorSpec([0, 1], lane) for lane in (_C.Lane.TENSOR, _C.Lane.SCALAR)]
    plan.lists = [[Issue(0), Issue(1)], [Issue(1), Issue(0)]]
    assert outcomes(plan) == {"hang"}
    assert outcome(plan) == "hang"
    with pytest.raises(DeadlockError) as error:
        plan.verify()
    assert str(error.value).splitlines()[1:] == [
        "  rank 1 waits to FORWARD mb 0 of stage 0, behind REDUCE loss,",
        "  which waits for rank 0: it waits to REDUCE loss, behind FORWARD mb 0 of stage 0,",
        "  where the circle closes",
    ]
    plan.lists = [[Issue(0), Issue(1)]] * 2
    assert outcomes(plan) == {"done"}
    plan.verify()


# --- Thousands of random plans ----------------------------------------------------------------------------------------

NAMES = sorted(SCHEDULES)


def random_plan(choose: random.Random) -> Any:
    """Any schedule, any sizes, with reductions, skips, ties, and any costs."""
    name = choose.choice(NAMES)
    pp, dp, m = choose.randint(1, 4), choose.randint(1, 2), choose.randint(1, 5)
    schedule = SCHEDULES[name]
    per_rank = schedule.stages_per_rank if schedule.is_fixed else choose.randint(1, 2)
    stages = pp * per_rank
    trains = name != "forward_only"
    links: list[Any] = [(stage, stage + 1, 64) for stage in range(stages - 1)]
    if stages > 2 and choose.random() < 0.5:
        first, last = sorted(choose.sample(range(stages), 2))
        if last > first + 1:
            links.append((first, last, 8, choose.random() < 0.5))
    ties = [(sorted(choose.sample(range(stages), 2)), 32)] if trains and stages > 1 and choose.random() < 0.4 else []
    costs = _C.CostModel()
    costs.stages = [_C.StageCost(choose.choice([0, 1, 3]), choose.choice([0, 2, 5])) for _ in range(stages)]
    costs.link_latency_seconds = choose.choice([0.0, 0.5])
    # Some compute together: shards of a replica, replicas of a stage, or both.
    tp = 2 if pp < 4 and choose.random() < 0.2 else 1
    together = [stage for stage in range(stages) if choose.random() < 0.3] if choose.random() < 0.2 else []
    return hpcomm.plan.compile(
        name,
        pp=pp,
        dp=dp,
        tp=tp,
        opaque_stages=together,
        num_microbatches=m,
        stages_per_rank=per_rank,
        bucket_bytes=[[16] * choose.randint(0, 2) for _ in range(stages)] if trains else None,
        links=links,
        ties=ties,
        costs=costs,
        reduce=choose.choice(["eager", "slack", "end"]),
        schema=choose.choice(["frozen", "per_message"]),
        group=choose.random() < 0.4,
        max_communicators=None if tp > 1 or together else choose.choice([None, 3]),
    )


def units(plan: Any, rank: int) -> list[list[Any]]:
    """The list of a rank as it is printed: a backward and its issue points are one entry."""
    result: list[list[Any]] = []
    for issue in plan.lists[rank]:
        if issue.host == -1:
            result.append([])
        result[-1].append(issue)
    return result


def with_units(plan: Any, rank: int, changed: list[list[Any]]) -> Any:
    edited = plan.copy()
    edited.lists = [list(itertools.chain(*changed)) if r == rank else old for r, old in enumerate(plan.lists)]
    return edited


def mutated(plan: Any, choose: random.Random) -> tuple[str, Any]:
    """One change that a person could make by mistake, and its name."""
    rank = choose.randrange(plan.world)
    entries = units(plan, rank)
    kind = choose.choice(["swap", "move", "drop", "early", "alone", "slots"])
    if kind == "swap" and len(entries) > 1:
        at = choose.randrange(len(entries) - 1)
        entries[at : at + 2] = reversed(entries[at : at + 2])
    elif kind == "move":
        entry = entries.pop(choose.randrange(len(entries)))
        entries.insert(choose.randrange(len(entries) + 1), entry)
    elif kind == "drop":
        del entries[choose.randrange(len(entries))]
    elif kind in ("early", "alone"):
        # A reduction leaves its backward, to the place before it, or behind it on its own.
        hosts = [i for i, entry in enumerate(entries) if len(entry) > 1]
        if hosts:
            at = choose.choice(hosts)
            *rest, reduction = entries[at]
            entries[at : at + 1] = [[Issue(reduction.op)], rest] if kind == "early" else [rest, [Issue(reduction.op)]]
    edited = with_units(plan, rank, entries)
    if kind == "slots":
        edited.slot_depth = 1
    return kind, edited


CASES, BATCHES = 180, 12


@pytest.mark.parametrize("batch", range(BATCHES))
def test_thousands_of_random_plans_get_the_machines_verdict(batch: int) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for case in range(CASES):
        seed = batch * CASES + case
        choose = random.Random(seed)
        plan = random_plan(choose)
        assert judge(plan) == "accepted", seed
        assert outcome(plan, seed) == "done", seed
        kind, edited = mutated(plan, choose)
        for _ in range(choose.randrange(3)):
            kind, edited = "several", mutated(edited, choose)[1]
        verdict = judge(edited)
        seen[kind, verdict] += 1
        if verdict == "accepted":
            assert outcome(edited, seed) == "done", seed
        elif verdict != "InvalidArgument":  # a plan that means something else: the machine may well end
            assert outcome(edited, seed) in ("hang", "mismatch"), seed
        # And with a slot for every lane: more ends, nothing that is accepted hangs.
        relaxed = judge(edited, slots=True)
        if relaxed == "accepted":
            assert outcome(edited, seed, lanes=True) == "done", seed
        elif relaxed != "InvalidArgument":
            assert outcome(edited, seed, lanes=True) in ("hang", "mismatch"), seed
        assert verdict != "accepted" or relaxed == "accepted", seed
    verdicts = Counter({name: sum(n for (_, v), n in seen.items() if v == name) for _, name in seen})
    assert min(verdicts[name] for name in ("accepted", "DeadlockError", "SchemaMismatch", "InvalidArgument")) > 0
    assert {verdict for (kind, verdict) in seen if kind == "drop"} <= {
        "DeadlockError",
        "SchemaMismatch",
        "InvalidArgument",
    }
