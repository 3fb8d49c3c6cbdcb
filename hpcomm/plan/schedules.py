"""Schedules by name: the generator of each, and where it puts its stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcomm.errors import InvalidArgument
from hpcomm.plan.loops import eager_1f1b, forward_only, gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from hpcomm.plan.table import Table, one_stage_each, v_shaped
from hpcomm.plan.zero_bubble import dualpipev, zb1p, zbv


class Schedule(NamedTuple):
    """How a named schedule is made."""

    generate: Callable[[int, int, int], Table]  # (pp, num_microbatches, stages_per_rank)
    placement: Callable[[int, int], list[int]]  # (pp, stages_per_rank): stage -> pipeline rank
    stages_per_rank: int  # unless the caller says otherwise
    is_fixed: bool  # it exists for that number of stages per rank only


def _of_one_stage(generate: Callable[[int, int], Table]) -> Schedule:
    return Schedule(lambda pp, m, _: generate(pp, m), one_stage_each, 1, True)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": _of_one_stage(gpipe),
    "1f1b": _of_one_stage(one_f_one_b),
    "eager_1f1b": _of_one_stage(eager_1f1b),
    "interleaved_1f1b": Schedule(interleaved_1f1b, one_stage_each, 2, False),
    "looped_bfs": Schedule(looped_bfs, one_stage_each, 2, False),
    "zb1p": Schedule(zb1p, one_stage_each, 1, False),
    "zbv": Schedule(zbv, v_shaped, 2, True),
    "dualpipev": Schedule(dualpipev, v_shaped, 2, True),
    "forward_only": Schedule(forward_only, one_stage_each, 1, False),
}


def by_name(
    name: str, pp: int, num_microbatches: int, stages_per_rank: int | None = None
) -> tuple[Table, list[int], int]:
    """The table of the schedule called ``name``, the pipeline rank of each stage, and the stages per rank.

    Raises:
        InvalidArgument: an unknown name, a size below 1, or stages per rank that the schedule has not.
    """
    if name not in SCHEDULES:
        raise InvalidArgument(f"unknown schedule {name!r}; known: {', '.join(sorted(SCHEDULES))}")
    schedule = SCHEDULES[name]
    stages = schedule.stages_per_rank if stages_per_rank is None else stages_per_rank
    if schedule.is_fixed and stages != schedule.stages_per_rank:
        raise InvalidArgument(f"schedule {name!r} has {schedule.stages_per_rank} stages per rank, not {stages}")
    return schedule.generate(pp, num_microbatches, stages), schedule.placement(pp, stages), stages
