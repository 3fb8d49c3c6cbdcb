"""Reductions of a rank's gradients: a Reducer for each of its stages and ties, driven by the plan's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hpcomm import _C
from hpcomm.errors import InternalError
from hpcomm.pipeline.ordered import ReplicaSum, Tree, added
from hpcomm.pipeline.planning import lane_of, lanes_of
from hpcomm.pipeline.presence import Presence

if TYPE_CHECKING:
    from hpcomm._C import BucketPlan, Communicator, StepLoss, StepPlan
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.ordered import Terms
    from hpcomm.pipeline.recorder import BucketTimes
    from hpcomm.pipeline.sharing import Tie

__all__: list[str] = []


class _Group:
    """Parameters with one Reducer: gradients add up in ``.grad``, and go out while the last backward runs."""

    def __init__(self, lane: Communicator, parameters: Sequence[torch.nn.Parameter], buckets: BucketPlan) -> None:
        self._parameters = list(parameters)
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._reducer = _C.Reducer(lane, parameters, buckets)
        self._hooks = _C.ReadyHooks(self._reducer, parameters)
        self._presence = Presence(lane, parameters) if lane.size > 1 else None

    def arm(self, loss: StepLoss, *permitted: int) -> None:
        """The next backward is the last one; it may issue so many buckets (all, if not said)."""
        self._hooks.prepare()
        self._reducer.arm(loss, *permitted)

    def keep(self, microbatch: int, *, ended: bool) -> None:
        """A backward is over."""

    def mark(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is final; it was made outside autograd."""
        index = self._index.get(id(parameter))
        if index is not None:  # else it is tied
            self._hooks.mark(index)

    def complete(self) -> None:
        """All gradients are final."""
        self._hooks.mark_rest()

    def permit(self, buckets: int) -> None:
        """So many buckets may have been issued."""
        self._reducer.permit(buckets)

    def tell(self) -> None:
        """All buckets have been issued: the other ranks are told which gradients this one has."""
        if self._presence is not None:
            self._presence.issue()

    def finish(self) -> None:
        """Waits for all of them. What only other ranks have becomes this rank's gradient, too."""
        self._reducer.finish()
        for i in self._presence.granted() if self._presence is not None else ():
            parameter = self._parameters[i]
            parameter.grad = torch.empty_like(parameter)
            self._reducer.fetch(i, parameter.grad).wait()

    def trace(self) -> None:
        """Buckets are timed from now on."""
        self._reducer.trace()

    def times(self) -> list[list[float]]:
        """Of the last step, by bucket; see ``Reducer.times``."""
        return self._reducer.times()


class _OrderedGroup:
    """The same with one order of summation: gradients are taken away after each backward, summed as a tree, and go out
    when that is done. Sums over replicas come first, the factor after them: it depends on nothing but the batch.
    """

    def __init__(
        self,
        lane: Communicator,
        alone: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        buckets: BucketPlan,
        microbatches: int,
    ) -> None:
        self._parameters = list(parameters)
        self._tree = Tree(microbatches)
        self._halves: dict[int, Terms] = {}  # by microbatch: what the first half of a divided backward has left
        over = buckets.buckets if lane.size > 1 else []
        self._sums = [ReplicaSum(lane, [parameters[i] for i in places]) for places in over]
        self._presence = Presence(lane, parameters) if lane.size > 1 else None
        self._scaled = _Group(alone, parameters, buckets)
        self._armed: tuple[StepLoss, int]
        self.issued = 0

    def arm(self, loss: StepLoss, permitted: int) -> None:
        self._armed = (loss, permitted)
        self.issued = 0

    def keep(self, microbatch: int, *, ended: bool) -> None:
        terms: Terms = []
        for parameter in self._parameters:
            terms.append(parameter.grad)
            parameter.grad = None
        first = self._halves.pop(microbatch, None)
        terms = terms if first is None else added(first, terms)
        if ended:
            self._tree.put(microbatch, terms)
        else:
            self._halves[microbatch] = terms

    def mark(self, parameter: torch.Tensor) -> None:
        """Nothing is final before :meth:`complete`."""

    def complete(self) -> None:
        for parameter, total in zip(self._parameters, self._tree.take(), strict=True):
            parameter.grad = total
        self.permit(self._armed[1])

    def permit(self, buckets: int) -> None:
        for each in self._sums[self.issued : buckets]:
            each.start()
        self.issued = max(self.issued, buckets)

    def trace(self) -> None:
        """Not in this mode: sums are formed by the host at the end of the step, which the trace shows."""

    def times(self) -> list[list[float]]:
        """None."""
        return []

    def tell(self) -> None:
        if self._presence is not None:
            self._presence.issue()

    def finish(self) -> None:
        for each in self._sums:
            each.add()
        granted = self._presence.granted() if self._presence is not None else ()
        missing = {id(self._parameters[i]) for i in granted}
        for each in self._sums:
            each.finish(missing)
        self._scaled.arm(self._armed[0])
        self._scaled.complete()
        self._scaled.finish()


class Reductions:
    """What this rank reduces in a step.

    Args:
        plan: whose list names this rank's reductions.
        parameters: by stage of this rank, those that no other stage owns.
        buckets: of those, by stage of this rank.
        ties: those that a stage of this rank owns, by their place in the plan.
        ordered: sums are formed in one order, whatever the mesh.
    """

    def __init__(
        self,
        plan: StepPlan,
        mesh: Mesh,
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        buckets: Mapping[int, BucketPlan],
        ties: Mapping[int, Tie],
        *,
        ordered: bool,
    ) -> None:
        self._on_host = mesh.device.type == "cpu"
        lanes = lanes_of(plan, mesh)
        self._stages: dict[int, _Group | _OrderedGroup] = {}
        self._ties: dict[int, _Group] = {}
        self._final: dict[int, tuple[int, int]] = {}  # stage -> its last backward, and how many buckets go out in it
        self._armed: list[_Group | _OrderedGroup] = []

        self._traced = False
        placed: dict[int, list[int]] = {}
        self._ops: dict[tuple[int, int], int] = {}  # operations by (stage, bucket)
        self._tie_ops: dict[int, int] = {}
        for action in plan.actions(mesh.rank):
            if action.kind in (_C.ActionKind.BACKWARD, _C.ActionKind.WEIGHT_GRAD):
                self._final[action.stage] = (action.op, len(action.inside))
            for reduction in [*action.inside, action]:
                lane = lane_of(reduction.communicator, lanes, mesh)
                if reduction.kind == _C.ActionKind.REDUCE:
                    placed.setdefault(reduction.stage, []).append(reduction.bucket)
                    self._ops[reduction.stage, reduction.bucket] = reduction.op
                    if reduction.stage not in self._stages:
                        mine, theirs = parameters[reduction.stage], buckets[reduction.stage]
                        alone = mesh.lane([mesh.rank], "alone")
                        self._stages[reduction.stage] = (
                            _OrderedGroup(lane, alone, mine, theirs, plan.num_microbatches)
                            if ordered
                            else _Group(lane, mine, theirs)
                        )
                elif reduction.kind == _C.ActionKind.TIED:
                    tie = ties[reduction.bucket]
                    self._tie_ops[reduction.bucket] = reduction.op
                    self._ties[reduction.bucket] = _Group(lane, tie.parameters, tie.buckets)
        # A Reducer issues buckets in its own order; the plan must say the same.
        for stage, order in placed.items():
            if order != list(range(len(buckets[stage].buckets))):
                raise InternalError(f"the plan reduces the buckets of stage {stage} in the order {order}")

    def arm(self, stage: int, op: int, loss: StepLoss) -> bool:
        """Whether operation ``op`` makes the stage's last contributions; its gradients count as ready from now on."""
        final, inside = self._final[stage]
        group = self._stages.get(stage)
        if op != final or group is None:
            return False
        group.arm(loss, inside)
        self._armed.append(group)
        return True

    def keep(self, stage: int, microbatch: int, *, ended: bool) -> None:
        """The backward of ``microbatch`` is over; not ``ended``: the first half of it."""
        group = self._stages.get(stage)
        if group is not None:
            group.keep(microbatch, ended=ended)

    def mark(self, stage: int, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` was made outside autograd and is final."""
        self._stages[stage].mark(parameter)

    def complete(self, stage: int) -> None:
        """All contributions to the stage's gradients have been made."""
        self._stages[stage].complete()

    def permit(self, stage: int, bucket: int) -> None:
        """It is the turn of ``bucket``, outside any backward."""
        self._stages[stage].permit(bucket + 1)

    def reduce_tie(self, tie: int, loss: StepLoss) -> None:
        """Issues the reduction of a tie: all its owners' backwards are over."""
        group = self._ties[tie]
        group.arm(loss)
        self._armed.append(group)
        group.complete()

    def finish(self) -> None:
        """Waits for all reductions of the step."""
        armed, self._armed = self._armed, []
        first: Exception | None = None
        # All of them, also after an error: nothing may still write the gradients. But not after Ctrl-C.
        for finish in (*(group.tell for group in armed), *(group.finish for group in armed)):
            try:
                finish()
            except Exception as error:  # noqa: PERF203
                first = first or error
        if first is not None:
            raise first

    def trace(self) -> None:
        """Buckets are timed from the next step on, where their lane is a thread of the host."""
        if not self._traced and self._on_host:
            for group in (*self._stages.values(), *self._ties.values()):
                group.trace()
        self._traced = True

    def times(self) -> list[BucketTimes]:
        """When the buckets of the last step were issued, begun, packed, reduced, and written back."""
        found = [((stage, i), row) for stage, group in self._stages.items() for i, row in enumerate(group.times())]
        of_ties = [(self._tie_ops[tie], row) for tie, group in self._ties.items() for row in group.times()]
        rows = [(self._ops[key], row) for key, row in found] + of_ties
        return [(op, *(1e9 * moment for moment in row)) for op, row in rows]  # type: ignore[misc]
