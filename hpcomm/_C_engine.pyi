"""Packing, channels, gradients and the torch.distributed backend: types of the native module, see _C.pyi."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d

from hpcomm._C_comm import Communicator, CommunicatorConfig, Control, Neighbourhood, Work

# --- csrc/torch/bind_pack.cpp ---

class Layout:
    """Where ``tensors`` lie in one contiguous buffer; floating point ones as ``wire``, if given."""

    def __init__(self, tensors: Sequence[torch.Tensor], wire: torch.dtype | None = None) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def offsets(self) -> list[int]: ...

class CopyList:
    """``tensors`` and their places in ``buffer``, looked up once, on the CPU: the kernels alone, for benchmarks.

    Throws: ValueError when a tensor or the buffer does not fit ``layout``.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> None: ...
    def pack(self) -> None: ...
    def unpack(self) -> None: ...

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

# --- csrc/torch/bind_channel.cpp ---

def flatten(tree: object) -> tuple[bytes, list[torch.Tensor]]: ...
def unflatten(structure: bytes, tensors: Sequence[torch.Tensor]) -> Any: ...
def require_wire_dtype(dtype: torch.dtype) -> None: ...

class Receipt:
    def wait(self, timeout: float = -1.0) -> Any: ...
    def done(self) -> bool: ...

class SendEdge:
    MAX_SLOTS: ClassVar[int]
    MAX_BYTES: ClassVar[int]
    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        frozen: bool,
        *,
        slots: int = ...,
        slot_bytes: int = 0,
        max_bytes: int = 0,
        movable: bool = False,
        direct_from: int = 0,
    ) -> None: ...
    def send(
        self,
        tree: object,
        microbatch: int = -1,
        wire_dtype: torch.dtype | Callable[[str, torch.Tensor], torch.dtype | None] | None = None,
    ) -> Work: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def is_under_way(self) -> bool: ...
    @property
    def untaken(self) -> int: ...
    def leave(self) -> None: ...

class RecvEdge:
    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        frozen: bool,
        *,
        slots: int = ...,
        slot_bytes: int = 0,
        max_bytes: int = 0,
        movable: bool = False,
    ) -> None: ...
    def recv(self, microbatch: int = -1) -> Receipt: ...
    def take(self, microbatch: int = -1, timeout: float | None = None) -> Any: ...
    def take_answer(self, microbatch: int, sent: SendEdge) -> Any: ...
    def expect(self, tree: object) -> None: ...
    @property
    def missed(self) -> int: ...
    @property
    def came(self) -> int: ...

# --- csrc/torch/bind_engine.cpp ---

class BucketPlan:
    def __init__(self, params: Sequence[torch.Tensor], first_bytes: int = ..., cap_bytes: int = ...) -> None: ...
    @property
    def buckets(self) -> list[list[int]]: ...
    @property
    def bytes(self) -> list[int]: ...
    @property
    def hash(self) -> int: ...

def bucket_bytes(layers: Sequence[int], first_bytes: int, cap_bytes: int) -> list[int]: ...

class StepLoss:
    def __init__(self, communicator: Communicator, evaluates: bool = False) -> None: ...
    def issue(
        self, loss_sum: torch.Tensor, weight_sum: float, accumulate: bool = False, keeps: bool = True
    ) -> None: ...
    def forget(self) -> None: ...
    def wait(self) -> torch.Tensor: ...

class Reducer:
    def __init__(self, communicator: Communicator, params: Sequence[torch.Tensor], plan: BucketPlan) -> None: ...
    def arm(self, loss: StepLoss, permitted: int = ...) -> None: ...
    def permit(self, buckets: int) -> None: ...
    def trace(self) -> None:
        """From now on buckets are timed; on the CPU only (InvalidArgument)."""

    def times(self) -> list[list[float]]:
        """By bucket, in seconds of the monotonic clock: issued, begun on the lane, packed, reduced, written back."""

    def finish(self) -> None: ...
    def fetch(self, param: int, gradient: torch.Tensor) -> Work:
        """After :meth:`finish`: what was reduced of ``param``, for which this rank had no gradient."""

def are_held_elsewhere(tensors: Sequence[torch.Tensor]) -> bool: ...
def own_gradients(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None: ...
def part_gradients(parameters: Sequence[torch.Tensor]) -> None: ...

class ReadyHooks:
    def __init__(self, reducer: Reducer, params: Sequence[torch.Tensor]) -> None: ...
    def prepare(self) -> None: ...
    def mark(self, param: int) -> None: ...
    def mark_rest(self) -> None: ...

class Deferred:
    """What the first half of a backward leaves for the second one: gradients of weights, use by use."""

    taking: bool
    """Whether backwards leave their second halves here; otherwise they do all of it. False at first."""

    def add(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dy: torch.Tensor,
        compute: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """A use of a layer whose output got ``dy``; ``compute`` gives its gradients. ``bias`` may want none (None)."""

    def protect(self, parameters: Sequence[torch.Tensor]) -> None:
        """At the end of a first half: ``.grad`` of these that lie in memory which :meth:`compute` reads are copied."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """A linear layer whose backward adds its use; None for an ``x`` that is no plain tensor."""

    def compute(self, done: Callable[[torch.Tensor], None] | None) -> None:
        """Adds all to ``.grad`` and forgets it; ``done`` is told each parameter that is final."""

    def __len__(self) -> int: ...

# --- csrc/torch/bind_ddp.cpp ---

class DdpReducer:
    """Reduces the gradients of ``params``: packed into buckets by hooks of the backward, averaged on the lane.

    Args:
        names: of the parameters, for messages.
        order: indices of ``params``, in which gradients become ready.
        limits: bytes of the first, second, ... bucket; the last one for all that follow.
        last_bytes: of a bucket for the gradients that are ready last, which nothing hides; 0: they get none.
        wire: dtype of the buckets, where gradients are to be cast.
        modules: of each parameter its module: small gradients go with a large one of the same module.
        number: of the wrapper, the same on all ranks: what several of one lane reduce is told apart. -1: one alone.
        events: the profiler's events are called ``events:all_reduce`` and the like.

    Raises InvalidArgument; what went wrong on the lane comes out of the backward.
    """

    def __init__(
        self,
        communicator: Communicator,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        order: Sequence[int],
        limits: Sequence[int],
        *,
        last_bytes: int = 0,
        wire: torch.dtype | None = None,
        modules: Sequence[int] = (),
        find_unused: bool = False,
        bucket_views: bool = False,
        shard: bool = False,
        check_finite: bool = False,
        number: int = -1,
        events: str = "hpcomm",
        logger: c10d.Logger | None = None,
    ) -> None: ...
    def meet(self, meet: Callable[[], bool]) -> None:
        """Called before the first reduction, in its thread; True: buckets are reduced at the end of the backward."""

    @property
    def lacks_core(self) -> bool: ...
    def prepare(self, outputs: Sequence[torch.Tensor]) -> None: ...
    def renew_hooks(self) -> None:
        """Before a forward: parameters that were converted to another dtype or device, and back, are heard of again."""

    def require_finished(self, expected: bool = False) -> None:
        """Raises RuntimeError in torch's words where a reduction has begun; with ``expected``, or is to begin."""

    def reset(self) -> None: ...
    def start(self, bucket: int) -> None: ...
    def finish(self, bucket: int) -> None: ...
    def ready_order(self) -> list[int]: ...
    def memory(self, bucket: int) -> torch.Tensor | None: ...
    def used_by(self) -> torch.Tensor: ...
    def has_accumulated(self) -> bool: ...
    def graph_static(self) -> bool: ...
    @property
    def stats(self) -> tuple[int, float, float, float, float, float]:
        """Backwards that reduced; of the last one: prepared, first ready, first issued, computed, finished."""

    def trace(self) -> None: ...
    def times(self) -> list[list[float]]:
        """Of the last backward, by bucket: complete, begun on the lane, packed, reduced (time.monotonic())."""
    def packs(self) -> list[tuple[float, float]]:
        """Begin and end of each gradient that was packed in its hook, traced as well."""

    def replan(self, plan: BucketPlan) -> None: ...
    @property
    def plan(self) -> BucketPlan: ...
    @property
    def state(self) -> str: ...
    @property
    def counts(self) -> dict[str, int]: ...

def ddp_bucket_plan(
    params: Sequence[torch.Tensor],
    order: Sequence[int],
    limits: Sequence[int],
    last_bytes: int = 0,
    wire: torch.dtype | None = None,
    modules: Sequence[int] = (),
) -> BucketPlan: ...
def register_ddp_hook(reducer: c10d.Reducer, communicator: Communicator, events: str = "hpcomm") -> None: ...
def release_bucket_memory(reducer: c10d.Reducer, params: Sequence[torch.Tensor]) -> None: ...

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
    def settle(self) -> None: ...
    def end(self) -> None: ...
    def end_at_exit(self) -> None: ...

class BackendOptions(c10d.Backend.Options):
    def __deepcopy__(self, memo: dict[object, object]) -> BackendOptions: ...

class Backend(c10d.Backend):
    @property
    def options(self) -> BackendOptions: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

def backend(
    communicator: Communicator, job: BackendJob, *, limits: Mapping[str, tuple[int, int, int]] = {}
) -> Backend: ...
def backend_beside(
    cpu: c10d.Backend, group: CommunicatorConfig, job: BackendJob, *, limits: Mapping[str, tuple[int, int, int]] = {}
) -> c10d.Backend: ...
def count_collectives(inner: c10d.Backend) -> c10d.Backend: ...
def lane_backend(communicator: Communicator) -> c10d.Backend: ...
def named_group(store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroup: ...
