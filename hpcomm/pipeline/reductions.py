"""Reductions of a rank's gradients: a Reducer for each of its stages and ties, driven by the plan's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpcomm import _C
from hpcomm.errors import InternalError

if TYPE_CHECKING:
    import torch

    from hpcomm._C import BucketPlan, Communicator, StepLoss, StepPlan
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.sharing import Tie

__all__: list[str] = []


class _Group:
    """Parameters with one Reducer."""

    def __init__(self, lane: Communicator, parameters: Sequence[torch.nn.Parameter], buckets: BucketPlan) -> None:
        self.index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.reducer = _C.Reducer(lane, parameters, buckets)
        self.hooks = _C.ReadyHooks(self.reducer, parameters)


class Reductions:
    """What this rank reduces in a step.

    Args:
        plan: whose list names this rank's reductions.
        parameters: by stage of this rank, those that no other stage owns.
        buckets: of those, by stage of this rank.
        ties: those that a stage of this rank owns, by their place in the plan.
    """

    def __init__(
        self,
        plan: StepPlan,
        mesh: Mesh,
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        buckets: Mapping[int, BucketPlan],
        ties: Mapping[int, Tie],
    ) -> None:
        lanes: dict[int, Communicator] = {}  # by place in plan.communicators
        for place, spec in enumerate(plan.communicators):
            if mesh.rank in spec.ranks:
                lanes[place] = mesh.lane(spec.ranks, spec.lane.name.lower())
        self._stages: dict[int, _Group] = {}
        self._ties: dict[int, _Group] = {}
        self._final: dict[int, tuple[int, int]] = {}  # stage -> its last backward, and how many buckets go out in it
        self._armed: list[_Group] = []

        placed: dict[int, list[int]] = {}
        for action in plan.actions(mesh.rank):
            if action.kind in (_C.ActionKind.BACKWARD, _C.ActionKind.WEIGHT_GRAD):
                self._final[action.stage] = (action.op, len(action.inside))
            for reduction in [*action.inside, action]:
                lane = lanes.get(reduction.communicator) or mesh.lane([mesh.rank], "alone")
                if reduction.kind == _C.ActionKind.REDUCE:
                    placed.setdefault(reduction.stage, []).append(reduction.bucket)
                    if reduction.stage not in self._stages:
                        mine = parameters[reduction.stage]
                        self._stages[reduction.stage] = _Group(lane, mine, buckets[reduction.stage])
                elif reduction.kind == _C.ActionKind.TIED:
                    tie = ties[reduction.bucket]
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
        group.reducer.arm(loss, inside)
        self._armed.append(group)
        return True

    def mark(self, stage: int, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` was made outside autograd and is final."""
        group = self._stages[stage]
        index = group.index.get(id(parameter))
        if index is not None:  # else it is tied
            group.hooks.mark(index)

    def complete(self, stage: int) -> None:
        """All contributions to the stage's gradients have been made."""
        self._stages[stage].hooks.mark_rest()

    def permit(self, stage: int, bucket: int) -> None:
        """It is the turn of ``bucket``, outside any backward."""
        self._stages[stage].reducer.permit(bucket + 1)

    def reduce_tie(self, tie: int, loss: StepLoss) -> None:
        """Issues the reduction of a tie: all its owners' backwards are over."""
        group = self._ties[tie]
        group.reducer.arm(loss)
        self._armed.append(group)
        group.hooks.mark_rest()

    def finish(self) -> None:
        """Waits for all reductions of the step."""
        armed, self._armed = self._armed, []
        first: BaseException | None = None
        for group in armed:  # all of them, also after an error: nothing may still write the gradients
            try:
                group.reducer.finish()
            except BaseException as error:  # noqa: PERF203
                first = first or error
        if first is not None:
            raise first

    def buckets_issued(self, stage: int) -> int:
        """Of the current step: what a test of overlap looks at."""
        return self._stages[stage].reducer.issued
