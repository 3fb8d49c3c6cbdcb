"""Plans: part of the types of the native module, see _C.pyi."""

from collections.abc import Sequence
from os import PathLike
from typing import ClassVar

# --- csrc/torch/bind_plan.cpp ---
# Enums are pybind11 enums: compare with ==, not with `is`. Attributes of everything but StepPlan, CompileSpec and
# CostModel are read-only; written as plain ones for brevity.

class OpKind:
    FORWARD: ClassVar[OpKind]
    BACKWARD: ClassVar[OpKind]
    INPUT_GRAD: ClassVar[OpKind]
    WEIGHT_GRAD: ClassVar[OpKind]
    TRANSFER: ClassVar[OpKind]
    REDUCE: ClassVar[OpKind]
    LOSS: ClassVar[OpKind]
    TIED: ClassVar[OpKind]
    __members__: ClassVar[dict[str, OpKind]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ActionKind:
    FORWARD: ClassVar[ActionKind]
    BACKWARD: ClassVar[ActionKind]
    INPUT_GRAD: ClassVar[ActionKind]
    WEIGHT_GRAD: ClassVar[ActionKind]
    SEND: ClassVar[ActionKind]
    RECV: ClassVar[ActionKind]
    REDUCE: ClassVar[ActionKind]
    LOSS: ClassVar[ActionKind]
    TIED: ClassVar[ActionKind]
    __members__: ClassVar[dict[str, ActionKind]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Payload:
    NONE: ClassVar[Payload]
    ACTIVATION: ClassVar[Payload]
    GRADIENT: ClassVar[Payload]
    __members__: ClassVar[dict[str, Payload]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Lane:
    COMPUTE: ClassVar[Lane]
    FORWARD: ClassVar[Lane]
    BACKWARD: ClassVar[Lane]
    GRADIENT: ClassVar[Lane]
    SCALAR: ClassVar[Lane]
    TENSOR: ClassVar[Lane]
    __members__: ClassVar[dict[str, Lane]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Schema:
    FROZEN: ClassVar[Schema]
    PER_MESSAGE: ClassVar[Schema]
    __members__: ClassVar[dict[str, Schema]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class StartOrder:
    EITHER: ClassVar[StartOrder]
    ISSUE_ORDER: ClassVar[StartOrder]
    SLOTS: ClassVar[StartOrder]
    __members__: ClassVar[dict[str, StartOrder]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ReducePolicy:
    EAGER: ClassVar[ReducePolicy]
    SLACK: ClassVar[ReducePolicy]
    END: ClassVar[ReducePolicy]
    __members__: ClassVar[dict[str, ReducePolicy]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Operation:
    def __init__(
        self,
        kind: OpKind,
        *,
        stage: int = -1,
        peer_stage: int = -1,
        microbatch: int = -1,
        bucket: int = -1,
        payload: Payload = ...,
        communicator: int = -1,
        participants: Sequence[int] = ...,
        bytes: int = 0,
        group: int = -1,
    ) -> None: ...
    group: int
    kind: OpKind
    stage: int
    peer_stage: int
    microbatch: int
    bucket: int
    payload: Payload
    communicator: int
    participants: list[int]
    bytes: int
    def __eq__(self, other: object) -> bool: ...

class Issue:
    def __init__(self, op: int, host: int = -1) -> None: ...
    op: int
    host: int
    def __eq__(self, other: object) -> bool: ...

class CommunicatorSpec:
    """A communicator that a plan needs: its ranks, sorted, on one lane."""

    def __init__(self, ranks: Sequence[int], lane: Lane) -> None: ...
    ranks: list[int]
    lane: Lane
    def __eq__(self, other: object) -> bool: ...

class Tie:
    """Parameters that several stages own: their gradients are added up over the owners."""

    def __init__(self, stages: Sequence[int], bytes: int) -> None: ...
    stages: list[int]
    """The owners, sorted, two or more."""
    bytes: int
    """Of the gradients."""
    def __eq__(self, other: object) -> bool: ...

class Action:
    """An operation of a plan as one rank carries it out; :meth:`StepPlan.actions` makes them."""

    group: int
    kind: ActionKind
    op: int
    stage: int
    peer_stage: int
    microbatch: int
    bucket: int
    payload: Payload
    peer: int
    communicator: int
    lane: Lane
    bytes: int
    inside: list[Action]

class VerifyResult:
    """What :meth:`StepPlan.verify` has looked at."""

    operations: int
    """How many operations the plan has."""
    ranks: int
    """How many ranks."""
    edges: int
    """Of the graph that was found to have no cycle."""
    start_order: str
    """What the proof takes for granted, and who guarantees it."""

class StepPlan:
    """For every rank the ordered operations of one training step: data, which :func:`compile` makes.

    ``print(plan)`` draws it: a row per rank, with a legend. Ranks are a mesh of pp x dp x tp, the outermost first:
    ``rank = (pipeline_rank * dp + replica) * tp + shard``. Lists are copies: to edit a plan, assign a changed list.
    Plans compare by value; :func:`to_json` keeps them.
    """

    pp: int
    """Ranks on the pipeline axis."""
    dp: int
    """Replicas."""
    tp: int
    """Ranks that share a stage's layers."""
    num_microbatches: int
    """Of each replica."""
    slot_depth: int
    """Messages in flight per edge and payload before the first of them is consumed; 0: no bound."""
    # Lists are copies: to edit a plan, assign a changed list.
    stage_to_rank: list[int]
    """The pipeline rank of each stage."""
    buckets: list[list[int]]
    """Per stage the bytes of each gradient bucket, in the order in which they are ready."""
    ties: list[Tie]
    """Parameters that several stages own."""
    schema: Schema
    """Whether a header runs ahead of every message."""
    start_order: StartOrder
    """Who sees to it that what a rank has issued starts."""
    communicators: list[CommunicatorSpec]
    """In the order in which they are made."""
    operations: list[Operation]
    """Of all ranks, in the global order."""
    lists: list[list[Issue]]
    """Per rank what it issues, in order: numbers of operations, and the backward that each is issued in."""
    dependencies: list[tuple[int, int]]
    """Pairs of operations of which the second reads what the first wrote."""
    def __init__(self) -> None: ...
    def copy(self) -> StepPlan:
        """A plan with the same values."""
    @property
    def world(self) -> int:
        """Ranks: pp x dp x tp."""
    @property
    def num_stages(self) -> int:
        """How many stages there are."""
    @property
    def hash(self) -> int:
        """64 bits, equal on two ranks exactly when they hold the same plan."""
    def actions(self, rank: int) -> list[Action]:
        """What ``rank`` does, in order; what is issued inside a backward stands in that action."""
    def describe(self, op: int, seen_by_rank: int = -1) -> str:
        """Operation ``op`` in words, as ``seen_by_rank`` sees it: "SEND act mb 3 on edge 1->2"."""
    def require_well_formed(self) -> None:
        """Looks whether the plan means anything at all.

        Raises:
            InvalidArgument: it does not: what, and where.
        """
    def verify(self, *, slots: bool = False, max_activations: int = 0) -> VerifyResult:
        """Proves that the plan ends on every machine on which ranks start their communication in the order of issue.

        The machine of the proof executes each rank's list one operation at a time, without buffering. The operations
        form a graph: edges along each list, along data, and from the consumption of message n to the send of message
        n + ``slot_depth``. No cycle, no deadlock. Near linear in the plan's size. docs/explanation/plan.md has the
        theorem.

        Args:
            slots: prove less, that it ends where every lane has a slot of its own: on CPUs, whose lanes are threads.
            max_activations: microbatches whose activations a rank may hold at a time; 0: any number.

        Raises:
            DeadlockError: operations wait in a circle, the shortest one in words; or one has no counterpart.
            SchemaMismatch: operations of different names would meet.
            InvalidArgument: the plan means nothing, issues an operation never or twice, reduces gradients not at all or
                too soon, or holds more activations than ``max_activations``.
        """
    def simulate(self, costs: CostModel | None = None) -> Timeline:
        """How long the plan takes by a cost model; a forward takes 1 s and a backward 2 s without one.

        Raises:
            InvalidArgument: the costs do not fit the plan.
            DeadlockError: it does not end; :meth:`verify` says why.
        """
    def peak_activations(self) -> list[int]:
        """Per rank, of how many microbatches it holds activations at a time, at most, over its stages."""
    def to_svg(self, path: str | PathLike[str], costs: CostModel | None = None) -> None:
        """Draws the plan as ``costs`` have it run."""
    def to_chrome_trace(self, path: str | PathLike[str], costs: CostModel | None = None) -> None:
        """Writes it for chrome://tracing and Perfetto, as ``costs`` have it run."""
    def __eq__(self, other: object) -> bool: ...

def put_off(actions: Sequence[Action], everywhere: bool) -> list[int]: ...

class StageCost:
    """Seconds of one stage's computations for one microbatch. Of a backward's halves each is half of it by default."""

    def __init__(
        self,
        forward_seconds: float = 1.0,
        backward_seconds: float = 2.0,
        input_grad_seconds: float | None = None,
        weight_grad_seconds: float | None = None,
        activation_bytes: float = 1.0,
    ) -> None: ...
    forward_seconds: float
    backward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    activation_bytes: float
    """Kept from the forward to the end of the backward. With 1, peaks count microbatches."""

class CostModel:
    """What computation and communication take; measured by :meth:`hpcomm.Pipeline.measure`, or guessed.

    It decides the order of what is independent, never whether a plan is right.
    """

    # The list and the dicts are copies: assign a changed one.
    stages: list[StageCost]
    """Of each stage; empty: the defaults for all."""
    links: dict[tuple[int, int], tuple[float, float]]
    """(source, destination) pipeline ranks whose (latency, bytes per second) differ from the others."""
    message_bytes: dict[tuple[int, int], float]
    """(source, destination) stages: bytes of messages of which the plan says 0."""
    link_latency_seconds: float
    """Of a message."""
    link_bytes_per_second: float
    """Of a message; infinite by default."""
    collective_latency_seconds: float
    """Of each step of an all-reduce: a ring, or a tree where that is faster."""
    collective_bytes_per_second: float
    """Likewise."""
    header_seconds: float
    """Ahead of each message whose schema is not frozen."""
    pack_bytes_per_second: float
    """On each side of a message or a reduction; infinite by default."""
    issue_seconds: float
    """The host's own time for each communication that it issues between computations."""
    step_seconds: float
    """The host's own time in a step outside of its list."""
    ranks_per_host: int
    """Ranks that share ``cores_per_host``."""
    cores_per_host: int
    """Shared by the computations of a host; 0: one for each rank."""
    host_copies: bool
    """With ``cores_per_host``: what ranks of a host exchange is copied by threads that share its cores."""
    host_waits: bool
    """The host issues only between computations, as on CPUs; otherwise it runs ahead."""
    def __init__(self) -> None: ...

class RankTimes:
    """Where a rank's time goes; compute, exposed and bubble add up to the makespan."""

    compute_seconds: float
    exposed_seconds: float
    """It computes nothing while one of its communications is under way."""
    bubble_seconds: float
    """Neither."""
    first_seconds: float
    """Its first computation begins."""
    last_seconds: float
    """Its last computation ends."""
    peak_activations: float
    """``StageCost.activation_bytes`` of what it holds at a time, at most."""

class Timeline:
    """A simulated step."""

    makespan_seconds: float
    """From the start of the step to its end."""
    bubble_share: float
    """Of all ranks' time."""
    exposed_share: float
    """Of all ranks' time: communication that no computation hides."""
    ranks: list[RankTimes]
    """Of each rank."""
    start: list[float]
    """Of each operation, in seconds."""
    end: list[float]
    """Of each operation, in seconds."""

class CompileSpec:
    pp: int
    dp: int
    tp: int
    num_microbatches: int
    stage_to_rank: list[int]
    buckets: list[list[int]]
    reduce: ReducePolicy
    ties: list[Tie]
    opaque_stages: list[int]
    loss_stages: list[int]
    schema: Schema
    start_order: StartOrder
    cost: CostModel
    slot_depth: int
    max_communicators: int
    group: bool
    def __init__(self) -> None: ...
    def add_compute(self, actions: Sequence[tuple[OpKind, int, int]]) -> None: ...
    def add_link(self, from_stage: int, to_stage: int, bytes: int, differentiable: bool = True) -> None: ...

def compile_plan(spec: CompileSpec) -> StepPlan: ...
