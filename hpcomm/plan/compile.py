"""compile(): plain arguments in, a StepPlan out."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpcomm._native import load
from hpcomm.errors import DeadlockError, InvalidArgument
from hpcomm.plan.schedules import by_name
from hpcomm.plan.table import KIND_NAMES, ComputeAction, one_stage_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcomm._C import CompileSpec, CostModel, StepPlan

DEFAULT_FORWARD_COST = 1.0
# Input gradients and weight gradients cost about one forward each.
DEFAULT_BACKWARD_COST = 2.0
_MOST_BYTES = 2**63 - 1
_START_ORDER = {None: "EITHER", "cuda": "ISSUE_ORDER", "cpu": "SLOTS"}


def compile(  # noqa: A001 - the name in hpcomm.plan; the builtin has no place there
    schedule: str | Sequence[Sequence[ComputeAction]],
    *,
    pp: int,
    dp: int = 1,
    tp: int = 1,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    bucket_bytes: Sequence[Sequence[int]] | None = None,
    forward_cost: Sequence[float] | None = None,
    backward_cost: Sequence[float] | None = None,
    activation_bytes: int | Sequence[int] = 0,
    links: Sequence[tuple[int, int, int] | tuple[int, int, int, bool]] | None = None,
    ties: Sequence[tuple[Sequence[int], int]] = (),
    loss_stages: Sequence[int] | None = None,
    opaque_stages: Sequence[int] = (),
    link_latency: float = 0.0,
    link_bandwidth: float = math.inf,
    costs: CostModel | None = None,
    stage_to_rank: Sequence[int] | None = None,
    slot_depth: int | None = None,
    reduce: str = "slack",
    schema: str = "frozen",
    max_communicators: int | None = None,
    group: bool = False,
    device: str | None = None,
) -> StepPlan:
    """Compile the communication of one training step; nothing is communicated, no rank needs to exist.

    Args:
        schedule: a name in ``hpcomm.plan.SCHEDULES``, or per pipeline rank its compute actions in order.
        pp, dp, tp: ranks on the pipeline axis (outermost), the data axis and the tensor axis:
            ``rank = (pipeline_rank * dp + replica) * tp + shard``. With ``tp`` above 1 a computation is one operation
            of all shards of its replica, since it issues collectives among them; messages and buckets are those of one
            shard.
        num_microbatches: of each replica.
        stages_per_rank: of a named schedule; its own number by default.
        bucket_bytes: per stage, the bytes of each gradient bucket; the bucket that is ready first stands first. None
            where nothing is reduced.
        forward_cost, backward_cost: seconds per stage and microbatch (default 1 and 2, halves of a backward 1 each:
            only ratios matter without link costs). They decide the order of independent operations, never whether the
            plan is right.
        activation_bytes: bytes of one microbatch's message, for every boundary of the chain or for each.
        links: (from_stage, to_stage, bytes) instead of the chain of neighbours, for models with skip connections; with
            a fourth entry False no gradient comes back (token ids, masks, what the first stage loads for later ones).
        ties: (stages, bytes) of parameters that several stages own; their gradients are added up over the owners.
        loss_stages: stages whose outputs go into the loss; the last one by default.
        opaque_stages: stages whose computations issue collectives among all their replicas (synchronised batch
            normalisation): each is one operation of all of them.
        link_latency, link_bandwidth: seconds, bytes per second.
        costs: a cost model instead of ``forward_cost``, ``backward_cost`` and the two of links.
        stage_to_rank: the pipeline rank of each stage, for a table of your own. Default: stage ``s`` on rank
            ``s % pp``.
        slot_depth: messages in flight per edge before the first of them is consumed; 0 for no bound. Default: 2 for
            each stage that a rank holds, doubled until the compute order can be executed (a skip connection holds its
            slots for long).
        reduce: where buckets are reduced: "eager", inside the stage's last backward; "slack", in bubbles that follow it
            on its rank, or else as "eager"; "end", after the rank's last computation. With ``device="cuda"`` "slack"
            has no message wait for a reduction, by the costs, and without costs of reductions puts what finds no bubble
            behind the rank's last message, as "end" does.
        schema: "frozen", or "per_message": a header runs ahead of every message.
        max_communicators: of a rank. By default one per direction of the pipeline, one for its gradients (more for
            ties) and one for the loss; with fewer, both directions share one, then the loss as well.
        group: issue messages as one that are neighbours in the order, ready at the same time and on one communicator.
        device: "cuda" or "cpu": where the plan will run, so that it says who guarantees that what is issued starts.
            With "cuda" communication starts in issue order, which decides where reductions go, and what ``simulate()``
            has wait.

    Raises:
        InvalidArgument: an unknown name, lengths that do not fit, arguments that contradict each other.
        DeadlockError: a compute order that contradicts its data, or needs more slots than ``slot_depth``.
    """
    pp, num_microbatches = _whole(pp, "pp"), _whole(num_microbatches, "num_microbatches")
    if pp < 1:
        raise InvalidArgument(f"pp is {pp}; a plan has at least one pipeline rank")
    table, placement, per_rank = _placed(schedule, pp, num_microbatches, stages_per_rank, stage_to_rank)
    num_stages = len(placement)

    native = load()
    spec: CompileSpec = native.CompileSpec()
    spec.pp = pp
    spec.dp = _whole(dp, "dp")
    spec.tp = _whole(tp, "tp")
    spec.opaque_stages = [_whole(stage, "an opaque stage") for stage in sorted(opaque_stages)]
    spec.num_microbatches = num_microbatches
    spec.stage_to_rank = placement
    spec.buckets = [
        [_whole(size, f"bucket_bytes of stage {stage}", _MOST_BYTES) for size in sizes]
        for stage, sizes in enumerate([()] * num_stages if bucket_bytes is None else bucket_bytes)
    ]
    spec.reduce = _member(native.ReducePolicy, "reduce", reduce)
    spec.schema = _member(native.Schema, "schema", schema)
    if device not in _START_ORDER:
        raise InvalidArgument(f"device={device!r}; use 'cpu', 'cuda' or None")
    spec.start_order = getattr(native.StartOrder, _START_ORDER[device])
    spec.max_communicators = 0 if max_communicators is None else _whole(max_communicators, "max_communicators")
    spec.group = group
    spec.ties = [
        native.Tie([_whole(stage, "a stage of a tie") for stage in sorted(stages)], _whole(size, "a tie", _MOST_BYTES))
        for stages, size in ties
    ]
    spec.loss_stages = [_whole(stage, "a loss stage") for stage in loss_stages or ()]
    for link in _chain(num_stages, activation_bytes) if links is None else links:
        _add_link(spec, link, "activation_bytes" if links is None else "a link")
    if costs is None:
        spec.cost = _costs(
            link_latency,
            link_bandwidth,
            _per_stage("forward_cost", forward_cost, DEFAULT_FORWARD_COST, num_stages),
            _per_stage("backward_cost", backward_cost, DEFAULT_BACKWARD_COST, num_stages),
        )
    elif forward_cost is not None or backward_cost is not None or link_latency or not math.isinf(link_bandwidth):
        raise InvalidArgument("give costs, or forward_cost, backward_cost, link_latency and link_bandwidth, not both")
    else:
        spec.cost = costs
    kinds = {letter: native.OpKind.__members__[name] for letter, name in KIND_NAMES.items()}
    for actions in table:
        spec.add_compute([(kinds[kind], stage, microbatch) for kind, stage, microbatch in actions])
    if slot_depth is not None:
        return _compile(spec, _whole(slot_depth, "slot_depth"), 0)
    return _compile(spec, 2 * max(per_rank, 1), num_microbatches * (num_stages + 1))


def _placed(
    schedule: str | Sequence[Sequence[ComputeAction]],
    pp: int,
    num_microbatches: int,
    stages_per_rank: int | None,
    stage_to_rank: Sequence[int] | None,
) -> tuple[Sequence[Sequence[ComputeAction]], list[int], int]:
    """The table of a schedule, the pipeline rank of each stage, and how many stages a rank holds at most."""
    if isinstance(schedule, str):
        table, placement, per_rank = by_name(schedule, pp, num_microbatches, stages_per_rank)
        if stage_to_rank is not None and list(stage_to_rank) != placement:
            raise InvalidArgument(
                f"schedule {schedule!r} puts its stages on {placement}; stage_to_rank is {stage_to_rank}"
            )
        return table, placement, per_rank
    if not any(schedule):
        raise InvalidArgument("the schedule has no computations")
    named = {action.stage for actions in schedule for action in actions}
    num_stages = max(named) + 1
    if num_stages > len(named):
        missing = next(stage for stage in range(len(named) + 1) if stage not in named)
        raise InvalidArgument(f"the schedule has an action of stage {num_stages - 1} and none of stage {missing}")
    per_rank = -(-num_stages // pp)
    placement = one_stage_each(pp, per_rank)[:num_stages] if stage_to_rank is None else list(stage_to_rank)
    return schedule, placement, per_rank


def _add_link(spec: CompileSpec, link: Sequence[Any], what: str) -> None:
    """A link as the caller of :func:`compile` gave it; ``what`` names its bytes."""
    if not 3 <= len(link) <= 4:
        raise InvalidArgument(f"a link is (from_stage, to_stage, bytes) or has True or False behind, not {link!r:.60}")
    source, target = (_whole(stage, "a link's stage") for stage in link[:2])
    spec.add_link(source, target, _whole(link[2], what, _MOST_BYTES), *link[3:])


def _costs(latency: float, bandwidth: float, forward: Sequence[float], backward: Sequence[float]) -> CostModel:
    """One latency, in seconds, and one bandwidth, in bytes per second, of messages and collectives alike."""
    native = load()
    costs: CostModel = native.CostModel()
    costs.link_latency_seconds = costs.collective_latency_seconds = latency
    costs.link_bytes_per_second = costs.collective_bytes_per_second = bandwidth
    costs.stages = [native.StageCost(f, b) for f, b in zip(forward, backward, strict=True)]
    return costs


def _compile(spec: CompileSpec, slot_depth: int, enough: int) -> StepPlan:
    """With the first of ``slot_depth``, twice that, ... that suffices; without a bound from ``enough`` on."""
    native = load()
    spec.slot_depth = slot_depth
    try:
        plan: StepPlan = native.compile_plan(spec)
    except DeadlockError:
        if enough == 0 or slot_depth == 0:
            raise
        return _compile(spec, 0 if 2 * slot_depth >= enough else 2 * slot_depth, enough)
    return plan


def _whole(value: object, what: str, most: int = 2**31 - 1) -> int:
    """``value`` as a number that the native part can count to; what is negative is refused there."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = most + 1
    if abs(number) > most:
        expected = "whole bytes" if most == _MOST_BYTES else "a whole number"
        raise InvalidArgument(f"{what} is {value!r:.40}; give {expected}, at most {most}")
    return number


def _member(enum: Any, name: str, value: str) -> Any:
    known = {key.lower(): member for key, member in enum.__members__.items()}
    if value not in known:
        raise InvalidArgument(f"{name}={value!r}; use one of {', '.join(known)}")
    return known[value]


def _chain(num_stages: int, activation_bytes: int | Sequence[int]) -> list[tuple[int, int, int]]:
    boundaries = num_stages - 1
    sizes = list(activation_bytes) if isinstance(activation_bytes, Iterable) else [activation_bytes] * boundaries
    if len(sizes) != boundaries:
        raise InvalidArgument(
            f"activation_bytes has {len(sizes)} sizes; {num_stages} stages have {boundaries} boundaries"
        )
    return [(stage, stage + 1, size) for stage, size in enumerate(sizes)]


def _per_stage(name: str, seconds: Sequence[float] | None, default: float, num_stages: int) -> list[float]:
    values = [default] * num_stages if seconds is None else list(seconds)
    if len(values) != num_stages:
        raise InvalidArgument(f"{name} has {len(values)} costs; there are {num_stages} stages")
    return values
