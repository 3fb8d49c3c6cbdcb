"""From a Pipeline's arguments to its plans: the schedule's table, the training plan, the plan of evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from hpcomm import _C
from hpcomm.communicator import agree, while_waiting
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import DeadlockError, InvalidArgument, SchemaMismatch
from hpcomm.plan.compile import compile as compile_plan
from hpcomm.plan.files import read_text
from hpcomm.plan.schedules import SCHEDULES, by_name
from hpcomm.plan.serialize import from_json, to_json
from hpcomm.plan.table import ComputeAction, Table, num_microbatches_of, placement_of
from hpcomm.plan.torch_csv import table_from_csv

if TYPE_CHECKING:
    from hpcomm._C import Communicator, CostModel, StepPlan
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.links import Link

__all__: list[str] = []


# A name, a table, or a file with one.
ScheduleLike = str | PathLike[str] | Sequence[Sequence[ComputeAction]]


class Schedule(NamedTuple):
    """What every pipeline rank computes, and the pipeline rank of each stage."""

    table: Table
    placement: list[int]

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.placement)

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(action.kind != "F" for row in self.table for action in row)

    def divided(self, stage: int) -> set[int]:
        """The microbatches whose backward of ``stage`` is run in two halves."""
        return {a.microbatch for row in self.table for a in row if a.kind == "I" and a.stage == stage}

    def forwards(self) -> Schedule:
        """Evaluation: the same forwards in the same order."""
        return Schedule([[action for action in row if action.kind == "F"] for row in self.table], self.placement)


def _table_of(path: str | PathLike[str]) -> Table:
    try:
        return table_from_csv(read_text(path))
    except ValueError as error:
        raise InvalidArgument(f"{os.fspath(path)}: {error}") from error


def schedule_of(schedule: ScheduleLike, pp: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The table of a named schedule, of a table, or of a file that ``torch.distributed.pipelining`` reads (CSV).

    Raises:
        InvalidArgument: an unknown name, or a table for another number of ranks or microbatches.
    """
    try:
        if isinstance(schedule, str) and schedule in SCHEDULES:
            table, placement, _ = by_name(schedule, pp, num_microbatches, stages_per_rank)
            return Schedule(table, placement)
        if isinstance(schedule, str) and not schedule.endswith(".csv"):
            raise InvalidArgument(f"schedule {schedule!r} is unknown; use one of {', '.join(SCHEDULES)}, or a table")
        table = _table_of(schedule) if isinstance(schedule, (str, PathLike)) else [list(row) for row in schedule]
        found = Schedule(table, placement_of(table))
    except (ValueError, OSError) as error:
        raise InvalidArgument(f"Pipeline: {error}") from error
    if len(table) != pp:
        raise InvalidArgument(f"Pipeline: the schedule's table has rows for {len(table)} pipeline ranks, the mesh {pp}")
    if num_microbatches_of(table) != num_microbatches:
        raise InvalidArgument(
            f"Pipeline: the schedule's table has {num_microbatches_of(table)} microbatches, "
            f"num_microbatches is {num_microbatches}"
        )
    return found


class Wishes(NamedTuple):
    """What a plan is compiled from beside its schedule."""

    links: Sequence[Link]
    bucket_bytes: Sequence[Sequence[int]]
    ties: Sequence[tuple[Sequence[int], int]]  # owners, bytes
    reduce: str
    schema: str
    costs: CostModel | None


def plan_together(mesh: Mesh, schedule: Schedule, wishes: Wishes) -> StepPlan:
    """Rank 0 compiles; everybody else takes its plan, and all verify it (collective over the mesh).

    Raises:
        SchemaMismatch: ranks hold different plans.
        InvalidArgument: on every rank, what :func:`hpcomm.plan.compile` says.
    """
    control, world = mesh.control, mesh.size
    problem = ""
    if control.rank == 0:
        try:
            plan = _compile(mesh, schedule, wishes)
        except (ValueError, DeadlockError) as error:  # InvalidArgument is a ValueError
            problem = str(error)
        text = "!" + problem if problem else to_json(plan)
        for peer in range(1, world):
            control.send(peer, ControlChannel.PLAN, text.encode())
    else:
        with while_waiting("for the plan of this Pipeline's steps or evaluations"):
            text = control.receive(0, ControlChannel.PLAN, mesh.timeout).decode()
        if text.startswith("!"):
            problem = text[1:]
        else:
            plan = from_json(text)
    if problem:
        raise InvalidArgument(f"Pipeline: the schedule cannot be run: {problem}")
    if plan.world != world:
        raise SchemaMismatch(f"rank 0 sent a plan for {plan.world} ranks; the mesh has {world}", rank=control.rank)
    plan.verify()
    agree(control, "plan", [f"{plan.hash:016x}"], timeout=mesh.timeout)
    return plan


def _compile(mesh: Mesh, schedule: Schedule, wishes: Wishes) -> StepPlan:
    trains = schedule.trains
    return compile_plan(
        schedule.table,
        stage_to_rank=schedule.placement,
        pp=mesh.shape["pp"],
        dp=mesh.shape["dp"],
        num_microbatches=num_microbatches_of(schedule.table),
        bucket_bytes=wishes.bucket_bytes if trains else None,
        links=[(link.source, link.target, 0, link.differentiable) for link in wishes.links],
        ties=wishes.ties if trains else (),
        reduce=wishes.reduce,
        schema=wishes.schema,
        costs=wishes.costs,
        device=mesh.device.type,
        loss_stages=[schedule.stages - 1],
    )


def lanes_of(plan: StepPlan, mesh: Mesh) -> list[Communicator | None]:
    """By place in ``plan.communicators``; None where this rank takes no part (collective).

    New ones are made in the plan's order: no two ranks may make those that they share in different orders.
    """
    return [
        mesh.lane(spec.ranks, spec.lane.name.lower()) if mesh.rank in spec.ranks else None
        for spec in plan.communicators
    ]


def lane_of(place: int, lanes: Sequence[Communicator | None], mesh: Mesh) -> Communicator:
    """That of an operation, by its place in ``plan.communicators``; -1: of this rank alone."""
    return (lanes[place] if place >= 0 else None) or mesh.lane([mesh.rank], "alone")


def scalar_lane(plan: StepPlan, mesh: Mesh) -> Communicator:
    """That of the plan's loss, or one of this rank alone where the mesh has one rank."""
    lanes = lanes_of(plan, mesh)
    place = next(op.communicator for op in plan.operations if op.kind == _C.OpKind.LOSS)
    return lane_of(place, lanes, mesh)
