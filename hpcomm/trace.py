"""A trace that ``HPCOMM_TRACE`` has left: the steps of one plan, as every rank has recorded them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcomm.errors import InvalidArgument
from hpcomm.plan.files import read_text
from hpcomm.plan.serialize import from_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from hpcomm._C import StepPlan
    from hpcomm.seats import Seat

__all__: list[str] = []


class Timed(NamedTuple):
    """One action of a step: seconds since the step's first action on any rank."""

    op: int
    begin: float
    waited: float  # of that time, for a message
    end: float
    cpu: float  # seconds of the thread, without those of waits


class Message(NamedTuple):
    """A receiver's wait for a message."""

    op: int
    begin: float
    end: float


class Bucket(NamedTuple):
    """One rank's part in a reduction."""

    op: int
    issued: float
    begun: float  # on the lane
    packed: float
    reduced: float
    ended: float  # written back


class Rank(NamedTuple):
    """One rank's step."""

    begin: float
    issued: float
    end: float
    actions: list[Timed]
    messages: list[Message]
    buckets: list[Bucket]
    rest: float  # CPU seconds of the process beside those of actions, waits for messages included


class Trace(NamedTuple):
    """The steps of one plan that all ranks have recorded, by number."""

    plan: StepPlan
    steps: dict[int, dict[int, Rank]]
    seats: list[Seat]  # of all ranks


def read(folder: str | PathLike[str], step: int | None = None) -> Trace:
    """What ``HPCOMM_TRACE=folder`` has left.

    Args:
        step: its number. The trace has the steps of its plan, which ``Pipeline.replan()`` ends; the last one by
            default.

    Raises:
        InvalidArgument: no step that all ranks have recorded, or not that one; a trace of an earlier version, or that
            is damaged.
    """
    try:
        return _read(Path(folder), step)
    except InvalidArgument:
        raise
    except (KeyError, TypeError, IndexError, ValueError) as error:  # of rows that are not as the recorder writes them
        raise InvalidArgument(f"{folder}: the trace is damaged ({error!r:.80}); record it anew") from error


def _read(folder: Path, step: int | None) -> Trace:
    plans, plan_of = _plans(folder)
    world = plans[0].world  # as many in all of them
    rows: dict[int, dict[int, Any]] = {}
    seats: dict[int, Seat] = {}
    for path in folder.glob("rank-*.jsonl"):
        match = re.fullmatch(r"rank-(\d+)", path.stem)
        if match is None or int(match[1]) >= world:  # an earlier, larger job left it there
            continue
        for row in _rows(path):
            if "seat" in row:
                seats[int(match[1])] = _seat_of(path, row["seat"])
            elif "step" in row:
                rows.setdefault(row["step"], {})[int(match[1])] = row
    whole = {number: by_rank for number, by_rank in sorted(rows.items()) if len(by_rank) == world}
    if not whole:
        raise InvalidArgument(f"{folder}: no step was recorded by all {world} ranks")
    if step is not None and step not in whole:
        raise InvalidArgument(f"no step {step}; recorded by all ranks: {', '.join(map(str, whole))}")
    chosen = plan_of[max(whole) if step is None else step]
    steps = {}
    for number, by_rank in whole.items():
        if plan_of[number] != chosen:
            continue
        zero = min(row["begin"] for row in by_rank.values())

        def seconds(nanoseconds: int, zero: int = zero) -> float:
            return (nanoseconds - zero) / 1e9

        steps[number] = {
            rank: Rank(
                seconds(row["begin"]),
                seconds(row["issued"]),
                seconds(row["end"]),
                [
                    Timed(op, seconds(begin), waited / 1e9, seconds(end), cpu / 1e9)
                    for op, begin, waited, end, cpu in row["actions"]
                ],
                [Message(op, seconds(begin), seconds(end)) for op, begin, end in row["messages"]],
                [Bucket(op, *map(seconds, times)) for op, *times in row["buckets"]],
                row["rest"] / 1e9,
            )
            for rank, row in sorted(by_rank.items())
        }
    _require_of_plan(folder, plans[chosen], steps)
    return Trace(plans[chosen], steps, [seats[rank] for rank in sorted(seats)])


def _seat_of(path: Path, found: Any) -> Seat:
    host, cores, threads = found
    if not (isinstance(host, str) and all(isinstance(core, int) for core in cores) and isinstance(threads, int)):
        raise InvalidArgument(f"{path}: the trace is damaged (a seat of {found!r:.60}); record it anew")
    return host, list(cores), threads


def _require_of_plan(folder: Path, plan: StepPlan, steps: dict[int, dict[int, Rank]]) -> None:
    """What is recorded is what the plan has its rank do."""
    own = {rank: {action.op for action in plan.actions(rank)} for rank in range(plan.world)}
    inside = {rank: {a.op for action in plan.actions(rank) for a in action.inside} for rank in range(plan.world)}
    for number, step in steps.items():
        sent = {(rank, timed.op) for rank, found in step.items() for timed in found.actions}
        for rank, found in step.items():
            kinds = {
                "actions": [timed.op for timed in found.actions],
                "messages": [message.op for message in found.messages],
                "buckets": [bucket.op for bucket in found.buckets],
            }
            strange = [(what, op) for what, ops in kinds.items() for op in ops if op not in own[rank] | inside[rank]]
            for message in found.messages if not strange else ():
                operation = plan.operations[message.op]
                peers = set(operation.participants) - {rank}
                if operation.kind.name != "TRANSFER" or any((peer, message.op) not in sent for peer in peers):
                    strange.append(("messages", message.op))
            if strange:
                what, op = strange[0]
                raise InvalidArgument(
                    f"{folder / f'rank-{rank}.jsonl'}: the trace is damaged: {what} of step {number} has operation "
                    f"{op!r:.40}, which the plan does not have there; record it anew"
                )


def _plans(folder: Path) -> tuple[list[StepPlan], dict[int, int]]:
    """The plans of a trace, and which of them a step was of."""
    path = folder / "rank-0.jsonl"
    if not path.exists():
        raise InvalidArgument(f"{folder} holds no trace: run a pipeline's steps with HPCOMM_TRACE={folder}")
    plans: list[StepPlan] = []
    plan_of: dict[int, int] = {}
    for row in _rows(path):
        if "plan" in row:
            try:
                plans.append(from_json(json.dumps(row["plan"])))
            except InvalidArgument as error:
                raise InvalidArgument(f"{path}: {error}") from error
        elif "step" in row:
            plan_of[row["step"]] = len(plans) - 1
    if -1 in plan_of.values():
        raise InvalidArgument(f"{path}: steps without their plan, recorded by an earlier hpcomm; record it anew")
    if not plans:
        raise InvalidArgument(f"{folder}: no step was recorded by rank 0")
    return plans, plan_of


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_text(path).splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return  # of a rank that was killed while it wrote
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InvalidArgument(f"{path}, line {number}: expected an object, found {row!r:.40}")
        yield row
