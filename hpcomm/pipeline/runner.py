"""Runner: walks this rank's list of a StepPlan and issues. It decides nothing and reorders nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcomm import _C
from hpcomm.channel import Pending, Receiver, Sender
from hpcomm.errors import InternalError, InvalidArgument
from hpcomm.pipeline.microbatch import split
from hpcomm.pipeline.stage import LossFn, Stage

if TYPE_CHECKING:
    from hpcomm._C import Action, BucketPlan, Communicator, ReadyHooks, Reducer, StepLoss, StepPlan, Work
    from hpcomm.mesh import Mesh

__all__: list[str] = []


class StepResult(NamedTuple):
    """What a step leaves behind on this rank."""

    loss: torch.Tensor  # 0-dim float64, the same on every rank
    outputs: list[Any]  # of each microbatch, on the last stage; empty elsewhere


class Runner:
    """One rank's execution of a plan.

    Args:
        plan: verified, the same on every rank.
        module: the local stage.
        bucket_plan: of the local parameters that require a gradient; equal on all replicas.
        schema: of the messages, see :class:`hpcomm.Channel`.

    Making one is collective over the mesh: lanes are made here, in the plan's order of communicators.
    """

    def __init__(
        self,
        plan: StepPlan,
        mesh: Mesh,
        module: torch.nn.Module,
        bucket_plan: BucketPlan,
        loss_fn: LossFn,
        *,
        schema: str,
    ) -> None:
        self._actions: list[Action] = plan.actions(mesh.rank)
        self._kind = _C.ActionKind
        self._activation = _C.Payload.ACTIVATION
        self._num_microbatches = plan.num_microbatches
        self._is_first = mesh.coordinate["pp"] == 0
        self._is_last = mesh.coordinate["pp"] == mesh.shape["pp"] - 1
        self.stage = Stage(module, loss_fn if self._is_last else None)

        backwards = [action for action in self._actions if action.kind == self._kind.BACKWARD]
        # The Reducer issues buckets in its own order; the plan must say the same.
        final = backwards[-1]
        if [inner.bucket for inner in final.inside] != list(range(len(bucket_plan.buckets))):
            raise InternalError(
                f"the plan reduces buckets {[inner.bucket for inner in final.inside]} in the last backward"
            )
        self._final_backward = final.op

        lanes = [
            mesh.lane(spec.ranks, spec.lane.name.lower()) if mesh.rank in spec.ranks else None
            for spec in plan.communicators
        ]
        self._edges: dict[tuple[bool, int], Sender | Receiver] = {}
        for action in self._actions:
            if action.kind in (self._kind.SEND, self._kind.RECV):
                key = (action.payload == self._activation, action.peer)
                lane = lanes[action.communicator]
                assert lane is not None
                end = Sender if action.kind == self._kind.SEND else Receiver
                if key not in self._edges:
                    self._edges[key] = end(lane, lane.ranks.index(action.peer), schema=schema)

        scalar = self._lane_named(lanes, "scalar", mesh)
        self._parameters = _identity(module)
        self._loss: StepLoss = _C.StepLoss(scalar)
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradient = self._lane_named(lanes, "gradient", mesh)
        self._reducer: Reducer = _C.Reducer(gradient, parameters, bucket_plan)
        self._hooks: ReadyHooks = _C.ReadyHooks(self._reducer, parameters)

    @staticmethod
    def _lane_named(lanes: list[Communicator | None], name: str, mesh: Mesh) -> Communicator:
        """That of the plan, or one of this rank alone where the plan needs none."""
        planned = next((lane for lane in lanes if lane is not None and lane.lane == name), None)
        return planned or mesh.lane([mesh.rank], "alone")

    def forget_accumulated(self) -> None:
        """The gradients of steps with ``reduce=False`` were dropped, so their weight must not count."""
        self._loss.forget()

    def step(self, inputs: Any, target: Any, *, reduce: bool, keep_outputs: bool) -> StepResult:
        """One training step; gradients are in ``.grad`` when it returns.

        Raises:
            InvalidArgument: parameters were replaced, frozen, unfrozen or converted since the buckets were laid out.
        """
        if _identity(self.stage.module) != self._parameters:
            raise InvalidArgument(
                "the stage's parameters changed since the Pipeline was made (replaced, frozen, unfrozen or converted); "
                "make a new Pipeline of the changed model"
            )
        step = _Step(self, inputs, target, reduce, keep_outputs)
        for action in self._actions:
            step.run(action)
        return step.finish()


def _identity(module: torch.nn.Module) -> list[tuple[int, bool, torch.dtype]]:
    return [(id(p), p.requires_grad, p.dtype) for p in module.parameters()]


class _Step:
    """The state of one walk over the list."""

    def __init__(self, runner: Runner, inputs: Any, target: Any, reduce: bool, keep_outputs: bool) -> None:
        self._runner = runner
        self._keep_outputs = keep_outputs
        self._reduce = reduce
        parts = runner._num_microbatches
        self._inputs = split(inputs if runner._is_first else None, parts, "input")
        self._targets = split(target if runner._is_last else None, parts, "target")
        self._pending: dict[tuple[bool, int], Pending] = {}
        self._outgoing: dict[tuple[bool, int], Any] = {}
        self._outputs: list[Any] = []
        self._sent: list[Work] = []
        self._armed = False
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._weight_sum = 0.0

    def run(self, action: Action) -> None:
        """Issues one action."""
        runner, kind, microbatch = self._runner, action.kind, action.microbatch
        try:
            if kind == runner._kind.FORWARD:
                self._forward(microbatch)
            elif kind == runner._kind.BACKWARD:
                self._backward(microbatch, final=action.op == runner._final_backward)
            elif kind == runner._kind.SEND:
                key = (action.payload == runner._activation, microbatch)
                sender = runner._edges[key[0], action.peer]
                assert isinstance(sender, Sender)
                self._sent.append(sender.send(self._outgoing.pop(key), microbatch))
            elif kind == runner._kind.RECV:
                is_activation = action.payload == runner._activation
                receiver = runner._edges[is_activation, action.peer]
                assert isinstance(receiver, Receiver)
                self._pending[is_activation, microbatch] = receiver.recv(microbatch)
            elif kind == runner._kind.LOSS:
                runner._loss.issue(self._loss_sum, self._weight_sum, not self._reduce)
            else:
                raise AssertionError(f"the runner has no {kind.name}")
        except Exception as error:
            what = kind.name.lower()
            where = f"in {what}" if microbatch < 0 else f"in {what} of microbatch {microbatch}, stage {action.stage}"
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(where)
            raise

    def finish(self) -> StepResult:
        """Waits for everything issued."""
        runner = self._runner
        loss = runner._loss.wait()
        if self._armed:
            runner._reducer.finish()
        for work in self._sent:
            work.wait()
        return StepResult(loss, self._outputs)

    def _forward(self, microbatch: int) -> None:
        runner = self._runner
        inputs = self._inputs[microbatch] if runner._is_first else self._pending.pop((True, microbatch)).wait()
        output = runner.stage.forward(microbatch, inputs)
        if not runner._is_last:
            self._outgoing[True, microbatch] = output
            return
        loss = runner.stage.loss(microbatch, output, self._targets[microbatch])
        # In microbatch order. A zero on the CPU plus a number on a GPU is a number there; moved there, the zero would
        # make the host wait for the device.
        self._loss_sum = self._loss_sum + loss.weighted.detach().double()
        self._weight_sum += loss.weight
        if self._keep_outputs:  # without their graphs: those are the microbatch's to free
            self._outputs.append(output.detach() if isinstance(output, torch.Tensor) else output)

    def _backward(self, microbatch: int, *, final: bool) -> None:
        runner = self._runner
        gradients = None if runner._is_last else self._pending.pop((False, microbatch)).wait()
        armed = final and self._reduce
        if armed:
            runner._reducer.arm(runner._loss)
            self._armed = True
        input_gradients = runner.stage.backward(microbatch, gradients)
        if armed:
            runner._hooks.mark_rest()
        if not runner._is_first:
            self._outgoing[False, microbatch] = input_gradients
