"""to_chrome_trace(): a simulated plan for chrome://tracing and Perfetto, a process per rank, a thread per lane."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from hpcomm.plan.files import write_text
from hpcomm.plan.timeline import LANES, first_replicas, spans

if TYPE_CHECKING:
    from hpcomm._C import CostModel, StepPlan

# Names of the viewer's own palette; computation, forward messages, backward messages and gradients differ in lightness.
_COLOURS = {
    "FORWARD": "thread_state_running",
    "BACKWARD": "thread_state_iowait",
    "INPUT_GRAD": "yellow",
    "WEIGHT_GRAD": "olive",
    "forward": "rail_load",
    "backward": "terrible",
    "gradient": "rail_idle",
    "scalar": "black",
}


def to_chrome_trace(
    plan: StepPlan,
    path: str | PathLike[str],
    costs: CostModel | None = None,
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Writes the simulated time line of ``plan`` in the trace event format, times in microseconds.

    Args:
        costs: what is simulated, in seconds and bytes; without it forwards take 1 second and backwards 2.
        ranks: by default the first replica of each pipeline rank.

    Raises:
        InvalidArgument: the plan means nothing, or the costs do not fit it.
        DeadlockError: the plan cannot end.
        OSError: the file cannot be written.

    Format: "Trace Event Format", the Chromium project.
    """
    timeline = plan.simulate(costs)
    rows = list(first_replicas(plan) if ranks is None else ranks)
    events: list[dict[str, Any]] = []
    for rank in rows:
        stages = [stage for stage, home in enumerate(plan.stage_to_rank) if home == rank // (plan.world // plan.pp)]
        name = f"rank {rank}, stage {', '.join(map(str, stages))}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}
            )
    events += [
        {
            "ph": "X",
            "name": span.label,
            "cat": span.lane,
            "pid": span.rank,
            "tid": LANES.index(span.lane),
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "cname": _COLOURS[span.kind if span.lane == "compute" else span.lane],
            "args": {"operation": span.title},
        }
        for span in spans(plan, timeline, rows)
    ]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"plan": f"{plan.hash:016x}", "makespan_seconds": timeline.makespan_seconds},
    }
    write_text(path, json.dumps(document))
