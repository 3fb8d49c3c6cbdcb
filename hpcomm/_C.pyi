"""Types of the native module. Kept by hand beside csrc/torch/bind_*.cpp; tests/test_package.py compares the names."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import ClassVar

import torch
from torch._C import _distributed_c10d as c10d

# --- csrc/torch/bind_base.cpp ---

class Event:
    def done(self) -> bool: ...
    def wait(self, timeout: float = -1.0) -> bool: ...

class Stream:
    @staticmethod
    def caller() -> Stream: ...
    @staticmethod
    def worker(name: str) -> Stream: ...
    def record(self) -> Event: ...
    def wait(self, event: Event) -> None: ...
    def idle(self) -> bool: ...
    def synchronize(self) -> None: ...

class Work:
    @property
    def operation(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    def wait(self, timeout: float = -1.0) -> None: ...
    def done(self) -> bool: ...
    def event(self) -> Event: ...

# --- csrc/torch/bind_control.cpp ---

class Control:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, peer: int, channel: int, body: bytes) -> None: ...
    def receive(self, peer: int, channel: int, timeout: float) -> bytes: ...
    def exchange(self, ranks: Sequence[int], channel: int, body: bytes, timeout: float) -> list[bytes]: ...
    def abort(self, message: str) -> None: ...
    def check(self) -> None: ...
    def failure(self) -> str | None: ...
    def has_ended(self, peer: int) -> bool: ...
    def has_left(self, peer: int) -> bool: ...
    def close(self) -> None: ...

class ControlListener:
    def __init__(self, host: str, rank: int, size: int, token: bytes) -> None: ...
    @property
    def address(self) -> str: ...
    def connect(self, addresses: Sequence[str], timeout: float, heartbeat: float) -> Control: ...

def solo_control() -> Control: ...

# --- csrc/torch/bind_comm.cpp ---

class CommunicatorConfig:
    def __init__(
        self,
        *,
        name: str,
        ranks: Sequence[int],
        rank: int,
        lane: str,
        control: Control,
        timeout: float,
        device: str = "cpu",
    ) -> None: ...

class Communicator:
    """A group of ranks that exchange messages on one lane.

    Operations are issued in the calling thread and run in that order on the lane. Tensors are contiguous, on the
    communicator's device. Each returns a Work; with ``async_op=False`` it has ended already. ``timeout`` is in seconds
    (negative: the communicator's own). Ranks are positions in ``ranks``.

    Raises InvalidArgument for wrong tensors or peers; RankFailed, PeerError, TimedOut, TransportError from the wait.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def name(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def control(self) -> Control: ...
    @property
    def timeout(self) -> float: ...
    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False, timeout: float = -1.0
    ) -> Work: ...
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout: float = -1.0,
    ) -> Work: ...
    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, timeout: float = -1.0
    ) -> Work: ...
    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, timeout: float = -1.0
    ) -> Work: ...
    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False, timeout: float = -1.0) -> Work: ...
    def send(self, tensor: torch.Tensor, peer: int, *, async_op: bool = False, timeout: float = -1.0) -> Work: ...
    def recv(self, tensor: torch.Tensor, peer: int, *, async_op: bool = False, timeout: float = -1.0) -> Work: ...
    def barrier(self, *, async_op: bool = False, timeout: float = -1.0) -> Work: ...
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def split(self, color: int, key: int = 0) -> Communicator: ...
    def subgroup(self, members: Sequence[int], lane: str) -> Communicator: ...
    def close(self) -> None: ...
    def abort(self, reason: str = "the program asked for it") -> None: ...

def built_with_cuda() -> bool: ...
def nccl_version() -> str: ...
def nccl_communicator(
    config: CommunicatorConfig, *, min_ctas: int = 0, max_ctas: int = 0, cga_cluster_size: int = -1
) -> Communicator: ...
def solo_communicator(config: CommunicatorConfig) -> Communicator: ...
def emulated_communicator(inner: Communicator, rules: str) -> Communicator: ...
def c10d_communicator(
    config: CommunicatorConfig,
    backend: c10d.Backend,
    factory: Callable[[str, int, int], c10d.Backend] | None = None,
    neighbourhood: Neighbourhood | None = None,
) -> Communicator: ...

class Neighbourhood:
    """The ranks of a job that share memory with this one; found out by trying (collective over the job).

    ``host`` tells ranks apart that could share memory and shall not: only ranks with equal values do.
    """

    def __init__(self, control: Control, timeout: float, host: str = "") -> None: ...
    @property
    def ranks(self) -> list[int]: ...
    def contains(self, ranks: Sequence[int]) -> bool: ...
    def why_not(self, rank: int) -> str: ...

def shm_communicator(config: CommunicatorConfig, neighbourhood: Neighbourhood) -> Communicator: ...

# --- csrc/torch/bind_pack.cpp ---

class Layout:
    """Where ``tensors`` lie in one contiguous buffer; floating point ones as ``wire``, if given."""

    def __init__(self, tensors: Sequence[torch.Tensor], wire: torch.dtype | None = None) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def offsets(self) -> list[int]: ...

def pack(
    layout: Layout,
    tensors: Sequence[torch.Tensor | None],
    buffer: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    first_bad: torch.Tensor | None = None,
) -> None:
    """Copies ``tensors`` (None: zeros) to their places in ``buffer``, times ``scale``, cast to the wire type.

    Args:
        buffer: contiguous, at least ``layout.bytes`` bytes, on the device of the tensors.
        scale: float64, one element, on that device; read when the kernel runs.
        first_bad: int32, one element, on that device; becomes the smaller of what it is and the first index of a tensor
            with an infinity or a NaN.

    On the caller's current stream. Raises InvalidArgument.
    """

def unpack(
    layout: Layout,
    buffer: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """The way back; None skips an entry."""

# --- csrc/torch/bind_engine.cpp ---

class Receipt:
    def wait(self, timeout: float = -1.0) -> tuple[bytes, list[torch.Tensor]]: ...
    def done(self) -> bool: ...

class SendEdge:
    def __init__(self, communicator: Communicator, peer: int, frozen: bool) -> None: ...
    def send(self, structure: str, tensors: Sequence[torch.Tensor], microbatch: int = -1) -> Work: ...

class RecvEdge:
    def __init__(self, communicator: Communicator, peer: int, frozen: bool) -> None: ...
    def recv(self, microbatch: int = -1) -> Receipt: ...

class BucketPlan:
    def __init__(self, params: Sequence[torch.Tensor], first_bytes: int = ..., cap_bytes: int = ...) -> None: ...
    @property
    def buckets(self) -> list[list[int]]: ...
    @property
    def bytes(self) -> list[int]: ...
    @property
    def hash(self) -> int: ...

class StepLoss:
    def __init__(self, communicator: Communicator) -> None: ...
    def issue(self, loss_sum: torch.Tensor, weight_sum: float, accumulate: bool = False) -> None: ...
    def forget(self) -> None: ...
    def wait(self) -> torch.Tensor: ...

class Reducer:
    def __init__(self, communicator: Communicator, params: Sequence[torch.Tensor], plan: BucketPlan) -> None: ...
    def arm(self, loss: StepLoss) -> None: ...
    def awaits(self, param: int) -> bool: ...
    @property
    def issued(self) -> int: ...
    def finish(self) -> None: ...

class ReadyHooks:
    def __init__(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None: ...
    def mark_rest(self) -> None: ...

def register_ddp_hook(reducer: c10d.Reducer, communicator: Communicator) -> None: ...

# --- csrc/torch/bind_backend.cpp ---

class BackendJob:
    """What the groups of one job share; the last one to go ends it: the properties are None from then on."""

    def __init__(self, control: Control, neighbourhood: Neighbourhood | None) -> None: ...
    @property
    def control(self) -> Control: ...
    @property
    def neighbourhood(self) -> Neighbourhood: ...
    @property
    def ended(self) -> bool: ...
    def anchor(self) -> None: ...
    def end(self) -> None: ...

def backend(communicator: Communicator, job: BackendJob) -> c10d.Backend: ...

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
    num_microbatches: int
    slot_depth: int
    # Lists are copies: to edit a plan, assign a changed list.
    stage_to_rank: list[int]
    buckets: list[list[int]]
    ties: list[Tie]
    schema: Schema
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
    # The list and the dict are copies: assign a changed one.
    stages: list[StageCost]
    links: dict[tuple[int, int], tuple[float, float]]
    link_latency_seconds: float
    link_bytes_per_second: float
    collective_latency_seconds: float
    collective_bytes_per_second: float
    header_seconds: float
    pack_bytes_per_second: float
    ranks_per_host: int
    cores_per_host: int
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
    num_microbatches: int
    stage_to_rank: list[int]
    buckets: list[list[int]]
    reduce: ReducePolicy
    ties: list[Tie]
    loss_stages: list[int]
    schema: Schema
    cost: CostModel
    slot_depth: int
    max_communicators: int
    group: bool
    def __init__(self) -> None: ...
    def add_compute(self, actions: Sequence[tuple[OpKind, int, int]]) -> None: ...
    def add_link(self, from_stage: int, to_stage: int, bytes: int, differentiable: bool = True) -> None: ...

def compile_plan(spec: CompileSpec) -> StepPlan: ...
