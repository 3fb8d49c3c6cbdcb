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
    def __init__(self, ranks: Sequence[int], lane: Lane) -> None: ...
    ranks: list[int]
    lane: Lane
    def __eq__(self, other: object) -> bool: ...

class Tie:
    def __init__(self, stages: Sequence[int], bytes: int) -> None: ...
    stages: list[int]
    bytes: int
    def __eq__(self, other: object) -> bool: ...

class Action:
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
    operations: int
    ranks: int
    edges: int
    start_order: str

class StepPlan:
    pp: int
    dp: int
    tp: int
    num_microbatches: int
    slot_depth: int
    # Lists are copies: to edit a plan, assign a changed list.
    stage_to_rank: list[int]
    buckets: list[list[int]]
    ties: list[Tie]
    schema: Schema
    start_order: StartOrder
    communicators: list[CommunicatorSpec]
    operations: list[Operation]
    lists: list[list[Issue]]
    dependencies: list[tuple[int, int]]
    def __init__(self) -> None: ...
    def copy(self) -> StepPlan: ...
    @property
    def world(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def hash(self) -> int: ...
    def actions(self, rank: int) -> list[Action]: ...
    def describe(self, op: int, seen_by_rank: int = -1) -> str: ...
    def require_well_formed(self) -> None: ...
    def verify(self, *, slots: bool = False, max_activations: int = 0) -> VerifyResult: ...
    def simulate(self, costs: CostModel | None = None) -> Timeline: ...
    def peak_activations(self) -> list[int]: ...
    def to_svg(self, path: str | PathLike[str], costs: CostModel | None = None) -> None: ...
    def to_chrome_trace(self, path: str | PathLike[str], costs: CostModel | None = None) -> None: ...
    def __eq__(self, other: object) -> bool: ...

def put_off(actions: Sequence[Action], everywhere: bool) -> list[int]: ...

class StageCost:
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

class CostModel:
    # The list and the dicts are copies: assign a changed one.
    stages: list[StageCost]
    links: dict[tuple[int, int], tuple[float, float]]
    message_bytes: dict[tuple[int, int], float]
    link_latency_seconds: float
    link_bytes_per_second: float
    collective_latency_seconds: float
    collective_bytes_per_second: float
    header_seconds: float
    pack_bytes_per_second: float
    issue_seconds: float
    step_seconds: float
    ranks_per_host: int
    cores_per_host: int
    host_copies: bool
    host_waits: bool
    def __init__(self) -> None: ...

class RankTimes:
    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    first_seconds: float
    last_seconds: float
    peak_activations: float

class Timeline:
    makespan_seconds: float
    bubble_share: float
    exposed_share: float
    ranks: list[RankTimes]
    start: list[float]
    end: list[float]

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
