"""Times of a rank's actions: kept for a cost model, or written for ``hpcomm trace report``, a line of JSON per step."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hpcomm import _C
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import InvalidArgument
from hpcomm.plan.serialize import to_json
from hpcomm.plan.table import KIND_NAMES
from hpcomm.seats import cores_of, is_crowded, seat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpcomm._C import CostModel, StepPlan
    from hpcomm.mesh import Mesh
    from hpcomm.seats import Seat

__all__: list[str] = []

# Operation; nanoseconds of the clock: issued, begun on the lane, packed, reduced, written back.
BucketTimes = tuple[int, float, float, float, float, float]
COMPUTE = tuple(KIND_NAMES.values())
# Of no stage: each communication of a rank's list, and what a step does before and after its list.
ISSUE, STEP = (-1, "ISSUE"), (-1, "STEP")


def recorder_for(rank: int, *, on_cpu: bool) -> Recorder | None:
    """A recorder that writes to the folder ``HPCOMM_TRACE``; None where that is not set."""
    folder = os.environ.get("HPCOMM_TRACE")
    if not folder:
        return None
    try:
        return Recorder(Path(folder), rank, on_cpu=on_cpu)
    except OSError as error:
        raise InvalidArgument(f"HPCOMM_TRACE={folder!r}: no folder that this rank can write to: {error}") from error


class Times:
    """Times are those of the host, in nanoseconds of the monotonic clock, which the ranks of a host share. An action's
    time includes its wait for messages, which is noted beside it; its CPU time, this thread's, does not.

    Args:
        device: where it is a GPU, the host waits at each look at the clocks for what it was given, so that times are of
            computations. Without, they say when work was issued.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self.actions: list[tuple[int, int, int, int, int]] = []  # operation, begin, waited, end, CPU time
        self.messages: list[tuple[int, int, int]] = []  # operation, begin of the wait for it, end
        self.sizes: dict[tuple[int, int], list[int]] = {}  # bytes of the messages that this rank sent, by stages
        self.rest = 0  # CPU time of the process in the step's list, without that of actions
        self.inside = 0  # this thread's CPU time from the first action of a step to its end
        self.around = 0  # and in the rest of the step, known to whoever called it
        self._waited = (0, 0)
        self._began = (0, 0)

    @staticmethod
    def now() -> int:
        """The clock."""
        return time.monotonic_ns()

    def clocks(self) -> tuple[int, int]:
        """The clock, and this thread's CPU time."""
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()  # no lane: one may wait for what is not issued yet
        return time.monotonic_ns(), time.thread_time_ns()

    def sent(self, source: int, destination: int, size: int) -> None:
        """A message of ``size`` bytes has gone from stage to stage."""
        self.sizes.setdefault((source, destination), []).append(size)

    def waited(self, op: int, begin: tuple[int, int]) -> None:
        """The current action has waited, since ``begin``, for a message, which came by operation ``op``."""
        end = self.clocks()
        self.messages.append((op, begin[0], end[0]))
        self._waited = (self._waited[0] + end[0] - begin[0], self._waited[1] + end[1] - begin[1])

    def action(self, op: int, begin: tuple[int, int]) -> None:
        """An action that began at ``begin`` is over."""
        end = self.clocks()
        waited, spun = self._waited
        self.actions.append((op, begin[0], waited, end[0], end[1] - begin[1] - spun))
        self._waited = (0, 0)

    def begin(self, plan: StepPlan) -> int:
        """A step of ``plan`` begins; its clock."""
        self._began = (time.process_time_ns(), time.thread_time_ns())
        return self.now()

    def step(self, begin: int, issued: int, end: int, buckets: Sequence[BucketTimes]) -> None:
        """A step is over: its actions had been issued at ``issued``, and were done at ``end``."""
        self.inside = time.thread_time_ns() - self._began[1]
        actions = sum(cpu for *_, cpu in self.actions)
        # With what this thread did in waits: it receives messages there, where their receipt was put off, as a lane's
        # thread does elsewhere. Either looks for a message for some microseconds, which counts too, before it sleeps.
        self.rest = max(0, time.process_time_ns() - self._began[0] - actions)


class Recorder(Times):
    """Writes each step to ``folder``, and on rank 0, ahead of the first step of a plan, the plan.

    The file is a new one that takes the place of an earlier recorder's. That one may still be written to: it has lost
    its name, and this one has what was recorded here only.
    """

    def __init__(self, folder: Path, rank: int, *, on_cpu: bool) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.jsonl"
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)  # whoever left it there may write to it
        self._file = unnamed.open("x")
        unnamed.replace(path)
        if on_cpu:  # elsewhere ranks do not share cores
            self._file.write(json.dumps({"seat": seat()}) + "\n")
        self._rank = rank
        self._plan: StepPlan | None = None
        self._step = 0

    def begin(self, plan: StepPlan) -> int:
        """A step of ``plan`` begins, which may be another one than the last step's; its clock."""
        if self._rank == 0 and plan is not self._plan:
            self._file.write(f'{{"plan": {to_json(plan)}}}\n')
        self._plan = plan
        return super().begin(plan)

    def step(self, begin: int, issued: int, end: int, buckets: Sequence[BucketTimes]) -> None:
        """Writes it."""
        super().step(begin, issued, end, buckets)
        row = {"step": self._step, "begin": begin, "issued": issued, "end": end, "actions": self.actions}
        row["rest"] = self.rest
        # Buckets of an earlier step: this one has reduced none.
        row |= {"messages": self.messages, "buckets": [[op, *map(round, t)] for op, *t in buckets if t[0] >= begin]}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.actions, self.messages = [], []
        self.sizes.clear()
        self._step += 1

    def close(self) -> None:
        """No more steps."""
        self._file.close()


def cost_model(
    num_stages: int, seconds: Mapping[tuple[int, str], float], seats: Sequence[Seat] | None = None
) -> CostModel:
    """Costs of stages whose computations take ``seconds``, by stage and kind of action, ``ISSUE`` for each
    communication that the host issues, and ``STEP`` around a rank's list; messages take no time.

    Args:
        seats: of all ranks, in order: where a host has more compute threads than cores, they share them.
    """
    model: CostModel = _C.CostModel()
    stages = []
    for stage in range(num_stages):
        forward, backward, first, second = (seconds.get((stage, kind)) for kind in COMPUTE)
        if backward is None:
            backward = (first or 0.0) + (second or 0.0)
        stages.append(_C.StageCost(forward or 0.0, backward, first, second))
    model.stages = stages
    model.issue_seconds, model.step_seconds = seconds.get(ISSUE, 0.0), seconds.get(STEP, 0.0)
    model.host_waits = False
    model.ranks_per_host, model.cores_per_host, model.host_copies = _shared(seats or [])
    return model


class _Shared(NamedTuple):
    """What the ranks of each host share, as the cost model's fields of these names say."""

    ranks_per_host: int = 1
    cores_per_host: int = 0
    host_copies: bool = False


def _shared(seats: Sequence[Seat]) -> _Shared:
    """Nothing where there is a core for every thread, or where hosts differ, which no model knows. Where only the
    threads that communicate lack one, these share the cores with computations.
    """
    hosts: dict[str, list[int]] = {}
    for rank, (host, _, _) in enumerate(seats):
        hosts.setdefault(host, []).append(rank)
    found = set()
    for ranks in hosts.values():
        here = [seats[rank] for rank in ranks]
        threads = max(its for _, _, its in here)
        at_a_time = max(1, cores_of(here) // threads)
        copies = threads == 1 and at_a_time >= len(ranks) and is_crowded(here)
        shared = _Shared(len(ranks), at_a_time, copies) if copies or at_a_time < len(ranks) else _Shared()
        found.add((shared, ranks[-1] - ranks[0] + 1 == len(ranks)))
    return found.pop()[0] if len(found) == 1 and next(iter(found))[1] else _Shared()


def with_rest(
    plan: StepPlan, actions: Sequence[tuple[int, float, float]], rest: float, seats: Sequence[Seat] | None
) -> Iterable[tuple[int, float, float]]:
    """The actions of a rank's step with ``rest``, the CPU time of its other threads and of its end, shared out among
    its communications, which it serves: where ranks share cores, it takes time from computations. Not where messages
    themselves share the cores in the simulation.
    """
    if _shared(seats or []).host_copies:
        return actions
    moving = [plan.operations[op].kind.name not in COMPUTE for op, _, _ in actions]
    share = rest / max(1, sum(moving))
    return [(op, seconds, cpu + share * moves) for (op, seconds, cpu), moves in zip(actions, moving, strict=True)]


def seconds_of(
    plan: StepPlan, actions: Iterable[tuple[int, float, float]], seats: Sequence[Seat] | None
) -> dict[tuple[int, str], float]:
    """What a stage's computations take, by stage and kind, and under ``ISSUE`` what a communication takes the host to
    issue, from operations, their times without waits, and their CPU times.

    Where ranks share cores, actions take longer because another rank had the core, which the simulation adds by itself.
    There it is the CPU time that counts, or, with several threads in each rank, whose CPU times are not known, a median
    instead of the mean. Means otherwise: a step is a sum.

    Args:
        seats: of all ranks; None where a device computes, ahead of which the host runs: issuing costs nothing then.
    """
    shared, single = _shared(seats or []).cores_per_host > 0, all(threads == 1 for _, _, threads in seats or [])
    found: dict[tuple[int, str], list[float]] = {}
    for op, seconds, cpu_seconds in actions:
        operation = plan.operations[op]
        computes = operation.kind.name in COMPUTE
        if not computes and seats is None:
            continue
        key = (operation.stage, operation.kind.name) if computes else ISSUE
        found.setdefault(key, []).append(cpu_seconds if shared and single else seconds)
    typical = statistics.median if shared and not single else statistics.fmean
    return {key: typical(samples) for key, samples in found.items()}


def gathered_costs(mesh: Mesh, plan: StepPlan, times: Sequence[Times]) -> CostModel:
    """The cost model of what all ranks measured, means over those that measured the same (collective)."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for step in times:
        for ends, some in step.sizes.items():
            sizes.setdefault(ends, []).extend(some)
    mine_is = json.dumps([seat(), [[*ends, statistics.fmean(some)] for ends, some in sizes.items()]])
    told = [
        json.loads(it)
        for it in mesh.control.exchange(range(mesh.size), ControlChannel.SEATS, mine_is.encode(), mesh.timeout)
    ]
    seats = [tuple(its) for its, _ in told] if mesh.device.type == "cpu" else None
    mine = [
        action
        for step in times
        for action in with_rest(
            plan,
            [(op, (end - begin - waited) / 1e9, cpu / 1e9) for op, begin, waited, end, cpu in step.actions],
            step.rest / 1e9,
            seats,
        )
    ]
    around = statistics.fmean(step.around for step in times) / 1e9
    keys = [ISSUE, STEP, *((stage, kind) for stage in range(plan.num_stages) for kind in COMPUTE)]
    table = torch.zeros(len(keys), 2, dtype=torch.float64, device=mesh.device)  # sum, number of ranks
    for key, seconds in {**seconds_of(plan, mine, seats), **({STEP: around} if seats else {})}.items():
        table[keys.index(key)] = torch.tensor([seconds, 1.0], dtype=torch.float64, device="cpu")
    mesh.world.all_reduce(table)
    means = {key: total / ranks for key, (total, ranks) in zip(keys, table.tolist(), strict=True) if ranks > 0}
    model = cost_model(plan.num_stages, means, seats)
    # Replicas send messages of about the same size: any of them.
    model.message_bytes = {(source, target): size for _, sizes in told for source, target, size in sizes}
    return model
