"""Machines that execute plans: written from the definition in docs/explanation/plan.md, they know no graph.

On all of them an operation ends only when all its participants have started it (nothing is buffered), the n-th message
of an edge of a communicator meets the n-th, and the n-th collective of a communicator the n-th.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcomm._native import load

_C = load()
COMPUTE = (_C.OpKind.FORWARD, _C.OpKind.BACKWARD, _C.OpKind.INPUT_GRAD, _C.OpKind.WEIGHT_GRAD)


class Step(NamedTuple):
    """What one thread of a rank does next, once the rank's host has done ``gate`` steps."""

    verb: str  # "run", or for a backward with issue points "begin" and "end"; "meet" starts ops and waits for their end
    ops: tuple[int, ...]  # one, or the members of a group
    gate: int = 0


class Machine:
    """Executes a plan step by step, the ranks in random order, each held up at random.

    ``lanes=False``: the reference machine. Every rank executes its list one operation at a time, each to its end.
    ``lanes=True``: the host computes and issues in the order of its list; every lane of a rank carries out what was
    issued on it, one operation at a time, beside the others.
    """

    def __init__(self, plan: Any, seed: int = 0, *, lanes: bool = False) -> None:
        self.operations = plan.operations
        self.communicators = plan.communicators
        self.slot_depth = plan.slot_depth
        self.random = random.Random(seed)
        self.needs: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for before, after in plan.dependencies:
            self.needs[after].append(before)
            self.readers[before].append(after)
        # Threads are (rank, lane); that of the host has lane "".
        self.programs: dict[tuple[int, str], list[Step]] = {}
        for rank, issues in enumerate(plan.lists):
            self.programs[rank, ""] = []
            for lane, step in self.steps(issues, lanes):
                self.programs.setdefault((rank, lane), []).append(step)
        self.at = dict.fromkeys(self.programs, 0)
        self.arrived = dict.fromkeys(self.programs, False)  # at the meeting that stands at self.at
        self.ended: set[int] = set()
        self.issued: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)  # (rank, stream) -> how many
        self.meetings: dict[tuple[tuple[int, ...], int], dict[int, int]] = defaultdict(dict)
        self.numbers: dict[tuple[int, int], int] = {}  # (rank, op) -> its number in its stream
        self.messages: dict[tuple[int, ...], list[int]] = defaultdict(list)
        # Of computations of several ranks: the pieces that a rank has behind it, and who has come to a piece.
        self.pieces: dict[tuple[int, int], int] = defaultdict(int)
        self.here: dict[tuple[int, int], set[int]] = defaultdict(set)

    def steps(self, issues: list[Any], lanes: bool) -> Iterator[tuple[str, Step]]:
        host = None
        done = 0  # by the host
        group: list[int] = []
        for issue, following in itertools.zip_longest(issues, issues[1:]):
            op = self.operations[issue.op]
            opens = following is not None and following.host != -1
            if op.kind in COMPUTE:
                if opens:
                    host = issue.op
                yield "", Step("begin" if opens else "run", (issue.op,))
                done += 1
            else:
                group.append(issue.op)
                same = following is not None and op.group != -1 and self.operations[following.op].group == op.group
                if not same:
                    lane = op.communicator != -1 and self.communicators[op.communicator].lane.name
                    verb = "meet" if op.communicator != -1 else "run"
                    # A collective of one rank has no communicator; its lane is that of its kind.
                    yield (str(lane or op.kind.name) if lanes else ""), Step(verb, tuple(group), done if lanes else 0)
                    group = []
            if host is not None and not group and issue.host != -1:
                # Ranks that compute together do so again between any two of its issue points.
                if not opens or self.operations[host].communicator != -1:
                    yield "", Step("piece" if opens else "end", (host,))
                    done += 1
                host = host if opens else None

    def run(self) -> str:
        """One of "done", "hang" and "mismatch"."""
        while True:
            running = [thread for thread, program in self.programs.items() if self.at[thread] < len(program)]
            if not running:
                return "done"
            self.random.shuffle(running)
            # Some are held up; who hangs is seen only when nobody is.
            held = {thread for thread in running if self.random.random() < 0.3}
            progress = [self.step(thread) for thread in running if thread not in held]
            if not any(progress):
                progress = [self.step(thread) for thread in running]
            if "mismatch" in progress:
                return "mismatch"
            if not any(progress):
                return "hang"

    def step(self, thread: tuple[int, str]) -> str | bool:
        rank, lane = thread
        verb, ops, gate = self.programs[thread][self.at[thread]]
        if lane and self.at[rank, ""] < gate:
            return False
        if verb == "meet":
            return self.meet(thread, ops)
        if self.operations[ops[0]].communicator != -1:
            return self.together(thread, verb, ops[0])
        if verb == "end":
            self.ended.add(ops[0])
        else:
            if not self.ended.issuperset(need for op in ops for need in self.needs[op]):
                return False
            if verb == "run":
                self.ended.update(ops)
        self.at[thread] += 1
        return True

    def together(self, thread: tuple[int, str], verb: str, index: int) -> str | bool:
        """A piece of a computation that issues collectives of its own: its ranks meet in it."""
        rank = thread[0]
        piece = (index, self.pieces[rank, index])
        begins = verb in ("run", "begin")
        if rank not in self.here[piece]:
            self.here[piece].add(rank)
            if begins:
                stream = self.stream(index)
                self.numbers[rank, index] = self.issued[rank, stream]
                self.issued[rank, stream] += 1
                self.meetings[stream, self.numbers[rank, index]][rank] = index
            return True
        if begins:
            if len(set(self.meetings[self.stream(index), self.numbers[rank, index]].values())) > 1:
                return "mismatch"
            if not self.ended.issuperset(self.needs[index]):
                return False
        if len(self.here[piece]) < len(self.operations[index].participants):
            return False
        if verb in ("run", "end"):
            self.ended.add(index)
        self.pieces[rank, index] += 1
        self.at[thread] += 1
        return True

    def stream(self, index: int) -> tuple[int, ...]:
        op = self.operations[index]
        return (op.communicator, *op.participants) if op.kind == _C.OpKind.TRANSFER else (op.communicator,)

    def members(self, index: int) -> list[int]:
        op = self.operations[index]
        result: list[int] = (
            op.participants if op.kind == _C.OpKind.TRANSFER else self.communicators[op.communicator].ranks
        )
        return result

    def meet(self, thread: tuple[int, str], ops: tuple[int, ...]) -> str | bool:
        rank = thread[0]
        if not self.arrived[thread]:
            self.arrived[thread] = True
            for index in ops:
                stream = self.stream(index)
                number = self.issued[rank, stream]
                self.issued[rank, stream] += 1
                self.numbers[rank, index] = number
                self.meetings[stream, number][rank] = index
                if len(stream) == 3 and rank == stream[1]:
                    self.messages[stream].append(index)
            return True
        # A group is one operation: all members on all their ranks, whoever this rank shares them with.
        everybody = self.whole_group(ops[0]) if self.operations[ops[0]].group != -1 else ops
        for index in ops:
            meeting = self.meetings[self.stream(index), self.numbers[rank, index]]
            if len(set(meeting.values())) > 1:
                return "mismatch"
        for index in everybody:
            if index in self.ended:
                continue
            if any(
                self.meetings[self.stream(index), self.numbers.get((r, index), -1)].get(r) != index
                for r in self.members(index)
            ):
                return False
            if not self.ended.issuperset(self.needs[index]) or not self.has_slot(index):
                return False
        self.ended.update(everybody)
        self.arrived[thread] = False
        self.at[thread] += 1
        return True

    def has_come(self, rank: int, index: int) -> bool:
        number = self.numbers.get((rank, index), -1)
        return self.meetings[self.stream(index), number].get(rank) == index

    def whole_group(self, index: int) -> list[int]:
        group = self.operations[index].group
        return [i for i, op in enumerate(self.operations) if op.group == group]

    def has_slot(self, index: int) -> bool:
        stream = self.stream(index)
        if len(stream) == 1 or self.slot_depth == 0:
            return True
        # Activations and gradients have slots of their own.
        payload = self.operations[index].payload
        alike = [other for other in self.messages[stream] if self.operations[other].payload == payload]
        number = alike.index(index)
        if number < self.slot_depth:
            return True
        oldest = alike[number - self.slot_depth]
        # Consumed on the rank that it went to.
        readers = [r for r in self.readers[oldest] if stream[2] in self.operations[r].participants]
        return self.ended.issuperset(readers)


def outcome(plan: Any, seed: int = 0, *, lanes: bool = False) -> str:
    return Machine(plan, seed, lanes=lanes).run()


def outcomes(plan: Any) -> set[str]:
    """What the reference machine can do with a plan without groups, issue points and slots: every interleaving of the
    ranks is tried. A state is how far each rank has come.
    """
    lists = [[issue.op for issue in issues] for issues in plan.lists]
    operations = plan.operations
    needs: dict[int, list[int]] = defaultdict(list)
    for before, after in plan.dependencies:
        needs[after].append(before)

    def stream(index: int) -> tuple[int, ...]:
        op = operations[index]
        return (op.communicator, *op.participants) if op.kind == _C.OpKind.TRANSFER else (op.communicator,)

    found, seen, todo = set(), set(), [tuple(0 for _ in lists)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        ended = {op for ops, at in zip(lists, state, strict=True) for op in ops[:at]}
        heads = [ops[at] if at < len(ops) else None for ops, at in zip(lists, state, strict=True)]
        if not any(head is not None for head in heads):
            found.add("done")
            continue
        moved = False
        for rank, head in enumerate(heads):
            if head is None:
                continue
            op = operations[head]
            ranks = [rank] if op.communicator == -1 else op.participants
            if op.communicator != -1:
                number = sum(stream(other) == stream(head) for other in lists[rank][: state[rank]])
                partners = [heads[r] for r in ranks if heads[r] is not None and stream(heads[r]) == stream(head)]
                numbers = {
                    sum(stream(other) == stream(head) for other in lists[r][: state[r]])
                    for r in ranks
                    if heads[r] is not None and stream(heads[r]) == stream(head)
                }
                if len(set(partners)) > 1 and numbers == {number}:
                    found.add("mismatch")
                    moved = True
                    continue
                if len(partners) < len(ranks):
                    continue
            if not ended.issuperset(needs[head]):
                continue
            moved = True
            todo.append(tuple(at + (r in ranks) for r, at in enumerate(state)))
        if not moved:
            found.add("hang")
    return found


def hand_made(pp: int, num_microbatches: int, operations: list[Any], lists: list[list[int]]) -> Any:
    """One stage per rank; communicators 0, 1 and 2: pipeline forward, pipeline backward, loss."""
    plan = _C.StepPlan()
    plan.pp, plan.num_microbatches = pp, num_microbatches
    plan.stage_to_rank = list(range(pp))
    plan.buckets = [[] for _ in range(pp)]
    lanes = (_C.Lane.FORWARD, _C.Lane.BACKWARD, _C.Lane.SCALAR)
    plan.communicators = [_C.CommunicatorSpec(list(range(pp)), lane) for lane in lanes]
    plan.operations = operations
    plan.lists = [[_C.Issue(op) for op in ops] for ops in lists]
    return plan


def message(source: int, destination: int, microbatch: int) -> Any:
    forward = source < destination
    return _C.Operation(
        _C.OpKind.TRANSFER,
        stage=source,
        peer_stage=destination,
        microbatch=microbatch,
        payload=_C.Payload.ACTIVATION if forward else _C.Payload.GRADIENT,
        communicator=0 if forward else 1,
        participants=[source, destination],
    )
