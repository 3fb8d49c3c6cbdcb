"""Runner: walks this rank's list of a StepPlan and issues. It decides nothing and reorders nothing.

A receipt may be put off until its message is needed, as far as no rank can tell the difference (csrc/plan/put_off.h).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpcomm import _C
from hpcomm._C import put_off
from hpcomm.channel import SLOTS, Receiver, Sender
from hpcomm.pipeline.board import Board
from hpcomm.pipeline.links import Messages, handed_over
from hpcomm.pipeline.microbatch import require_same_rows, samples
from hpcomm.pipeline.planning import lanes_of
from hpcomm.pipeline.stage import evaluate
from hpcomm.seats import is_crowded
from hpcomm.tree import mapped

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hpcomm._C import Action, StepLoss, StepPlan, Work
    from hpcomm.mesh import Mesh
    from hpcomm.pipeline.links import Link
    from hpcomm.pipeline.ordered import OrderedLoss
    from hpcomm.pipeline.randomness import Draws
    from hpcomm.pipeline.recorder import Times
    from hpcomm.pipeline.reductions import Reductions
    from hpcomm.pipeline.stage import Loss, LossFn, Stage
    from hpcomm.pipeline.unit import Unit

__all__: list[str] = []


@dataclass
class Batch:
    """What one step computes on, on this rank, by microbatch."""

    inputs: Sequence[tuple[Any, ...]]  # of the model's first layer; used on the first stage's rank
    targets: Sequence[Any]  # of loss_fn; used on the last stage's rank
    keywords: Sequence[dict[str, Any]]
    rows: Sequence[int]  # of the model's input, as far as this rank knows them; else 0
    loss_fn: LossFn | None  # None: no loss is wanted
    draws: Draws | None = None
    loss_place: int | None = None  # under which loss_fn draws; None where it does not
    unit: float = 1.0  # losses and weights are counted in these
    agreed: Unit | None = None  # where the unit is to come from, with the first loss
    needs_target: bool = False  # for a loss
    scale: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda loss: loss)  # of the backward's start
    reduce: bool = True
    keeps: bool = False  # gradients of steps that did not reduce
    keep_outputs: bool = False


class StepResult(NamedTuple):
    """What a step leaves behind on this rank."""

    loss: torch.Tensor  # 0-dim float64, the same on every rank
    outputs: list[Any]  # of each microbatch, on the last stage's rank; empty elsewhere


class Key(NamedTuple):
    """Which message."""

    is_activation: bool
    source: int  # stage that makes it
    target: int  # stage that takes it
    microbatch: int

    @property
    def edge(self) -> tuple[bool, int, int]:
        """On which it travels."""
        return self[:3]


@dataclass
class _Walk:
    """The state of one walk over the list."""

    batch: Batch
    autocast: bool
    # Messages that were made here and not sent yet, asked for and not taken yet, or handed over from stage to stage of
    # this rank.
    mail: dict[Key, Any] = field(default_factory=dict)
    # Receivers of messages whose receipt is put off until they are needed.
    later: dict[Key, Receiver] = field(default_factory=dict)
    sent: list[Work] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Loss] = field(default_factory=dict)
    counted: list[tuple[float, int]] = field(default_factory=list)  # weights and samples of losses, for the unit


_NOTHING = nullcontext()


class Runner:
    """One rank's execution of a plan.

    Args:
        plan: verified, the same on every rank.
        stages: those of this rank, by index.
        links: of the whole model, in the same order on every rank.
        reductions: of the gradients; None for a plan without backwards.
        loss: of the mesh; steps of several plans may share it.
        ordered: sums losses in one order, as ``reductions`` does with gradients; None: in that of the transport.
        first_rank: of this replica, which has the first stage.
        messages: how they travel.

    Making one is collective over the mesh: edges are made in the order of ``links``.
    """

    def __init__(
        self,
        plan: StepPlan,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        links: Sequence[Link],
        reductions: Reductions | None,
        loss: StepLoss,
        ordered: OrderedLoss | None,
        first_rank: int,
        messages: Messages,
    ) -> None:
        self.plan = plan
        self.board = Board(mesh)
        self.recorder: Times | None = None  # whoever has one hangs it in
        self._stages = stages
        self._last_stage = plan.num_stages - 1
        self._loads_from_first = any(link.loads for link in links)
        self._device = mesh.device
        self._rank, self._first_rank = mesh.rank, first_rank
        self._reductions = reductions
        self._loss = loss
        self._ordered = ordered
        actions = plan.actions(mesh.rank)
        self._edges = _edges(plan, mesh, actions, links, messages)
        self._messages = messages
        self._loading = {(True, link.source, link.target) for link in links if link.loads}
        self._local = {(link.source, link.target) for link in links if link.source in stages and link.target in stages}
        crowded = is_crowded(self.board.seats_of_this_host())
        # By operation. Where a receipt belongs to an order that all ranks keep, as NCCL's, it stays where it is.
        self._put_off = set(put_off(actions, everywhere=crowded)) if mesh.pp.transport == "shm" else set()
        # Functions, not bound methods: those would be a circle, and a Pipeline that is dropped must be gone at once.
        self._program = [(*self._instruction(action), action) for action in actions]
        # Operations by message, as ``mail`` knows them: for the recorder.
        self._arrivals = {_received(action): action.op for action in actions if action.kind == _C.ActionKind.RECV}
        self._walk: _Walk
        self.position = 0  # in the list: what a failed step was about to do

    def step(self, batch: Batch) -> StepResult:
        """One walk over the list; gradients are in ``.grad`` when it returns. Any exception leaves ``position`` at the
        action that raised it.
        """
        walk = self._walk = _Walk(batch, torch.is_autocast_enabled(self._device.type))
        place, recorder = self.board.write, self.recorder
        if recorder is not None and self._reductions is not None:
            self._reductions.trace()
        begin = 0 if recorder is None else recorder.begin(self.plan)
        for position, (function, arguments, action) in enumerate(self._program):
            self.position = position
            place(position)
            if recorder is None:
                function(self, *arguments)
            else:
                start = recorder.clocks()
                function(self, *arguments)
                recorder.action(action.op, start)
        self.position = len(self._program)
        place(self.position)
        issued = 0 if recorder is None else recorder.now()
        loss = self._loss.wait()
        if self._ordered is not None:
            loss = self._ordered.wait()
        if self._reductions is not None:
            self._reductions.finish()
        for work in walk.sent:
            work.wait()
        if recorder is not None:
            end = recorder.now()
            recorder.step(begin, issued, end, self._reductions.times() if self._reductions is not None else [])
        del self._walk  # with the batch and the outputs
        return StepResult(loss, [walk.outputs[i] for i in sorted(walk.outputs)])

    def where(self) -> Action | None:
        """The action that the last step has reached; None before the first and when all were issued."""
        return self._program[self.position][2] if 0 <= self.position < len(self._program) else None

    def clear(self) -> None:
        """Forgets what a failed step left behind."""
        for stage in self._stages.values():
            stage.clear()
        if hasattr(self, "_walk"):
            del self._walk

    # --- What an action does ---

    def _instruction(self, action: Action) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """An action with everything looked up that does not change from step to step."""
        kind, stage, microbatch = action.kind.name, action.stage, action.microbatch
        if kind == "FORWARD":
            return Runner._forward, (self._stages[stage], microbatch)
        if kind in {"BACKWARD", "INPUT_GRAD"}:
            # A first half never completes its stage's gradients.
            reductions = self._reductions if kind == "BACKWARD" else None
            return Runner._backward, (self._stages[stage], microbatch, reductions, action.op)
        if kind == "WEIGHT_GRAD":
            return Runner._weight_gradients, (self._stages[stage], microbatch, action.op)
        if kind == "SEND":
            key = Key(action.payload == _C.Payload.ACTIVATION, stage, action.peer_stage, microbatch)
            return Runner._send, (self._edges[key.edge].send, key)
        if kind == "RECV":
            key = _received(action)
            edge = self._edges[key.edge]
            if action.op in self._put_off:
                return Runner._receive_later, (edge, key)
            return Runner._receive, (edge.recv, key)
        if kind == "LOSS":
            return Runner._issue_loss, ()
        assert self._reductions is not None
        if kind == "REDUCE":
            return Runner._reduce, (self._reductions.permit, stage, action.bucket)
        assert kind == "TIED", kind
        return Runner._reduce, (self._reductions.reduce_tie, action.bucket, self._loss)

    def _send(self, send: Callable[[Any, int], Work], key: Key) -> None:
        message = self._walk.mail.pop(key)
        if self.recorder is not None:
            size = self._messages.bytes(message, loads=key.edge in self._loading)
            self.recorder.sent(key.source, key.target, size)
        self._walk.sent.append(send(message, key.microbatch))

    def _receive(self, receive: Callable[[int], Any], key: Key) -> None:
        self._walk.mail[key] = receive(key.microbatch)

    def _receive_later(self, edge: Receiver, key: Key) -> None:
        self._walk.later[key] = edge

    def _reduce(self, issue: Callable[..., None], *arguments: Any) -> None:
        if self._walk.batch.reduce:
            issue(*arguments)

    def _take(self, is_activation: bool, source: int, target: int, microbatch: int) -> Any:
        key = Key(is_activation, source, target, microbatch)
        if ((source, target) if is_activation else (target, source)) in self._local:
            return self._walk.mail.pop(key)
        recorder = self.recorder
        if recorder is None:
            return self._wait_for(key)
        start = recorder.clocks()
        message = self._wait_for(key)
        recorder.waited(self._arrivals[key], start)
        return message

    def _wait_for(self, key: Key) -> Any:
        walk = self._walk
        edge = walk.later.pop(key, None)
        # Whoever waits has issued all that stands before in its list: without it the others might never come so far.
        for other, receiver in walk.later.items():
            walk.mail[other] = receiver.recv(other.microbatch)
        walk.later.clear()
        return walk.mail.pop(key).wait() if edge is None else edge.take(microbatch=key.microbatch)

    def _forward(self, stage: Stage, microbatch: int) -> None:
        walk, index = self._walk, stage.index
        batch = walk.batch
        messages = {link.source: self._take(True, link.source, index, microbatch) for link in stage.incoming}
        rows = batch.rows[microbatch]
        if index != 0:
            came = stage.incoming[0].rows(messages[stage.incoming[0].source])
            require_same_rows(came, rows, batch.targets[microbatch], self._first_rank, self._rank)
            rows = came
        inputs = batch.inputs[microbatch] if index == 0 else ()
        keywords = batch.keywords[microbatch]
        loaded: dict[int, Any] = {}
        target = batch.targets[microbatch]
        if self._loads_from_first:
            if index == 0:
                loaded = {
                    link.target: (target if link.target == self._last_stage else None, keywords)
                    for link in stage.outgoing
                    if link.loads
                }
            else:
                target = next((messages[link.source][2][0] for link in stage.incoming if link.loads), None)
        output, outgoing = stage.forward(microbatch, inputs, messages, keywords, loaded, batch.draws, rows)
        for target_stage, message in outgoing.items():
            local = (index, target_stage) in self._local
            walk.mail[Key(True, index, target_stage, microbatch)] = handed_over(message) if local else message
        if index != self._last_stage:
            return
        if batch.loss_fn is not None and not (batch.needs_target and target is None):
            if batch.draws is not None and batch.loss_place is not None:
                batch.draws.enter(microbatch, batch.loss_place)
            loss = evaluate(batch.loss_fn, output, target)
            if batch.agreed is not None:
                self._count(loss, target, output)
            if batch.unit != 1.0:
                loss.weighted, loss.weight = loss.weighted / batch.unit, loss.weight / batch.unit
                loss.borrowed = False
            stage.start_from(microbatch, loss, output, batch.scale)
            kept = loss.weighted.detach()
            loss.weighted = kept.clone() if loss.borrowed else kept
            walk.losses[microbatch] = loss
        if batch.keep_outputs:  # without their graphs: those are the microbatch's to free
            walk.outputs[microbatch] = detached(output)

    def _count(self, loss: Loss, target: Any, output: Any) -> None:
        """Of the weights of a batch, and of its samples. With the first loss the unit is agreed on."""
        walk, batch = self._walk, self._walk.batch
        rows = samples(target) or samples(output) or 1
        unit = batch.agreed
        assert unit is not None
        if not walk.counted:
            total = sum(samples(each) for each in batch.targets) or rows * len(batch.targets)
            batch.unit = unit.agree(loss.weight, rows, total)
        walk.counted.append((loss.weight, rows))
        if len(walk.counted) == len(batch.targets):
            unit.note(sum(weight for weight, _ in walk.counted), sum(count for _, count in walk.counted))

    def _backward(self, stage: Stage, microbatch: int, reductions: Reductions | None, op: int) -> None:
        walk, index = self._walk, stage.index
        gradients = {
            link.target: self._take(False, link.target, index, microbatch)
            for link in stage.outgoing
            if link.differentiable
        }
        final = reductions is not None and walk.batch.reduce and reductions.arm(index, op, self._loss)
        if walk.autocast:
            with self._without_autocast():
                arrived = stage.backward(microbatch, gradients)
        else:
            arrived = stage.backward(microbatch, gradients)
        if self._ordered is not None:
            self._keep(index, microbatch, ended=reductions is not None)
        if final:
            assert reductions is not None
            reductions.complete(index)
        for link in stage.incoming:
            if link.differentiable:
                walk.mail[Key(False, index, link.source, microbatch)] = arrived[link.source]

    def _weight_gradients(self, stage: Stage, microbatch: int, op: int) -> None:
        reductions = self._reductions
        assert reductions is not None
        final = self._walk.batch.reduce and reductions.arm(stage.index, op, self._loss)
        with self._without_autocast():
            stage.weight_gradients(microbatch, partial(reductions.mark, stage.index) if final else None)
        if self._ordered is not None:
            self._keep(stage.index, microbatch, ended=True)
        if final:
            reductions.complete(stage.index)

    def _keep(self, stage: int, microbatch: int, *, ended: bool) -> None:
        assert self._reductions is not None
        self._reductions.keep(stage, microbatch, ended=ended)

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Backwards run in the dtypes that their forwards chose."""
        return torch.autocast(self._device.type, enabled=False) if self._walk.autocast else _NOTHING

    def _issue_loss(self) -> None:
        # In microbatch order, whatever the schedule's.
        losses = [self._walk.losses[microbatch] for microbatch in sorted(self._walk.losses)]
        if self._ordered is not None:
            total, weight = self._ordered.issue(losses, self._walk.batch.unit)
        else:
            weight = sum(loss.weight for loss in losses)
            total = (
                torch.stack([loss.weighted.reshape(()) for loss in losses]).sum(dtype=torch.float64)
                if losses
                else torch.zeros((), dtype=torch.float64, device="cpu")  # of no device that the host would wait for
            )
        training = self._reductions is not None
        batch = self._walk.batch
        self._loss.issue(total, weight, training and not batch.reduce, batch.keeps)


def _received(action: Action) -> Key:
    """The message of a RECV."""
    return Key(action.payload == _C.Payload.ACTIVATION, action.peer_stage, action.stage, action.microbatch)


def _edges(
    plan: StepPlan, mesh: Mesh, actions: Sequence[Action], links: Sequence[Link], messages: Messages
) -> dict[tuple[bool, int, int], Any]:
    """One end of an edge for each link and direction that crosses this rank, and all lanes of the plan.

    Links have edges of their own, since a frozen edge has one schema. They share the lane, where the plan orders them.
    An edge has a buffer for each message that the plan may have under way.
    """
    slots = max(SLOTS, plan.slot_depth)
    lanes = lanes_of(plan, mesh)
    ends: dict[tuple[bool, int, int], Action] = {}
    for action in actions:
        if action.kind in (_C.ActionKind.SEND, _C.ActionKind.RECV):
            pair = (action.stage, action.peer_stage)
            if action.kind == _C.ActionKind.RECV:
                pair = pair[::-1]
            ends.setdefault((action.payload == _C.Payload.ACTIVATION, *pair), action)
    edges: dict[tuple[bool, int, int], Any] = {}
    for is_activation in (True, False):
        for link in links:
            pair = (link.source, link.target) if is_activation else (link.target, link.source)
            key = (is_activation, *pair)
            end = ends.get(key)
            if end is None:
                continue
            lane = lanes[end.communicator]
            assert lane is not None
            peer = lane.ranks.index(end.peer)
            if end.kind == _C.ActionKind.SEND:
                cast = messages.cast(link) if is_activation else messages.wire_dtype
                edges[key] = Sender(lane, peer, schema=messages.schema, wire_dtype=cast, slots=slots)
            else:
                edges[key] = Receiver(lane, peer, schema=messages.schema, slots=slots)
    return edges


def detached(tree: Any) -> Any:
    """The tree with its tensors outside any graph."""
    return mapped(tree, torch.Tensor.detach)
