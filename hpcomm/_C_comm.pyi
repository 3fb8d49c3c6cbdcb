"""Streams, Control and communicators: part of the types of the native module, see _C.pyi."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch._C import _distributed_c10d as c10d

# --- csrc/torch/bind_base.cpp ---

class Event:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...

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
    """An operation that was issued: of a :class:`Communicator`, or a message of a :class:`Channel`.

    It may be dropped: the operation runs all the same, and its tensors are kept until it has ended.
    """

    @property
    def operation(self) -> str:
        """What was issued, as "all_reduce"; "ended" for all that had ended when their calls returned."""
    @property
    def peer(self) -> int:
        """The other rank of a message, or the root of a broadcast, as a rank of the job; -1 without one."""
    @property
    def sequence(self) -> int:
        """Its number: collectives of a communicator count together, messages per peer and direction."""
    def wait(self, timeout: float | None = None) -> None:
        """What the program does next comes after the operation.

        On the CPU this waits until it has ended. On a GPU torch's current stream waits, and the host goes on; with a
        ``timeout`` the host waits as well. Ctrl-C ends the wait.

        Args:
            timeout: seconds. None, or negative: no limit, as the operation has one of its own.

        Raises:
            RankFailed, PeerError, TimedOut, SchemaMismatch, TransportError: what ended the operation, as often as
                asked; on a GPU what the host knows of by now.
            TimedOut: ``timeout`` was over. The operation goes on.
        """
    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
    def event(self) -> Event:
        """Happens when it has ended, also when it has failed; for hpcomm's own streams."""

# --- csrc/torch/bind_control.cpp ---

class Control:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, peer: int, channel: int, body: bytes) -> None: ...
    def receive(self, peer: int, channel: int, timeout: float) -> bytes: ...
    def exchange(self, ranks: Sequence[int], channel: int, body: bytes, timeout: float) -> list[bytes]: ...
    def let_all_find_out(self, ranks: Sequence[int], channel: int) -> None: ...
    def abort(self, message: str) -> None: ...
    def check(self) -> None: ...
    def failure(self) -> str | None: ...
    def has_ended(self, peer: int) -> bool: ...
    def say_why(self, why: str) -> None:
        """What peers will read of why this rank has left. Before :meth:`close`."""

    def has_left(self, peer: int) -> bool: ...
    def why_left(self, peer: int) -> str: ...
    def departure_of(self, peer: int) -> str: ...
    def close(self) -> None: ...

class ControlListener:
    def __init__(self, host: str, rank: int, size: int, token: bytes) -> None: ...
    @property
    def address(self) -> str: ...
    def connect(self, addresses: Sequence[str], timeout: float, heartbeat: float) -> Control: ...

def solo_control() -> Control: ...
def tell_long_waits(control: Control, after: float) -> None: ...

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
        check: bool = False,
        shows_lane: bool = False,
    ) -> None: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...

class Communicator:
    """A group of ranks that exchange messages on one lane.

    Operations are issued in the calling thread and run in that order on the lane. Tensors are contiguous, on the
    communicator's device. Each returns a Work; with ``async_op=False`` it has ended already and, on the CPU, is one for
    all such calls, which names no operation. ``timeout`` is in seconds (None, or negative: the communicator's own).
    Ranks are positions in ``ranks``.

    send() and recv() run in order like the others, so two ranks that both send first may wait for each other.
    sendrecv() sends ``tensor`` to ``peer`` and receives ``output`` from ``source`` at once, as MPI_Sendrecv does.

    split() is collective over all ranks: those that pass the same ``color`` get a communicator, ordered by ``key``,
    then rank, on ``lane`` (equal within a color; by default a second one of the parent's). On NCCL it is ncclCommSplit,
    which first waits for what was issued here. subgroup() is collective over ``members`` alone.

    Raises InvalidArgument for wrong tensors or peers; SchemaMismatch for lanes that differ within a color; RankFailed,
    PeerError, TimedOut, TransportError from the wait.
    """

    @property
    def rank(self) -> int:
        """The place of this rank in ``ranks``."""
    @property
    def size(self) -> int:
        """How many ranks there are."""
    @property
    def ranks(self) -> list[int]:
        """The members as ranks of the job, in the order of the group."""
    @property
    def name(self) -> str:
        """Unique in the job and the same on all members; children extend it."""
    @property
    def lane(self) -> str:
        """What its operations run in order on: shown in messages, and as the name of a thread on the CPU."""
    @property
    def transport(self) -> str:
        """One of "shm", "c10d" (gloo), "hierarchical" (both), "nccl", "solo" (one rank) and, with HPCOMM_EMULATE,
        "emulated".
        """
    @property
    def device(self) -> str:
        """Where its tensors are: "cpu" or "cuda:0"."""
    @property
    def control(self) -> Control:
        """The connection between the job's processes, which tells of aborts and of ranks that have failed."""
    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, from when it starts on its lane."""
    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Reduces ``tensor`` over the ranks, in place.

        Args:
            tensor: of a dtype that the device's transport sums: floats and complex numbers from 16 bits, int8 to int64,
                uint8, bool; the same elements and dtype on all ranks. On the CPU 16-bit floats are summed in float32.
            op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor" (the last three by bits).
        """
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Reduces ``input`` over the ranks and keeps this rank's part.

        Args:
            output: one of ``size`` equal parts of ``input``, by elements; the same dtype. It may lie in ``input``, at
                this rank's part.
            op: as of :meth:`all_reduce`.
        """
    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Collects ``input`` of all ranks in ``output``, in the order of ranks.

        Args:
            output: ``size`` times the elements of ``input``, the same dtype. ``input`` may be this rank's part of it.
        """
    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """Part i of ``input`` goes to rank i; part i of ``output`` comes from it.

        Args:
            output, input: of ``size`` equal parts, with as many elements, the same dtype.
        """
    def broadcast(
        self, tensor: torch.Tensor, root: int, *, async_op: bool = False, timeout: float | None = None
    ) -> Work:
        """``tensor`` of rank ``root`` to all, in place."""
    def send(self, tensor: torch.Tensor, peer: int, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Sends ``tensor`` to rank ``peer``. First in, first out for each pair of ranks; there are no tags."""
    def recv(self, tensor: torch.Tensor, peer: int, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Receives into ``tensor`` what rank ``peer`` sends next: of the same dtype and number of elements."""
    def sendrecv(
        self,
        tensor: torch.Tensor,
        peer: int,
        output: torch.Tensor,
        source: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Sends ``tensor`` to ``peer`` and receives ``output`` from ``source``, neither behind the other."""
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Ends when all ranks have issued it."""
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, not initialised, in memory that the transport sends without a copy.

        It is shared between the ranks of a host, or NCCL's. It is given back when the last view of it is gone.

        Raises:
            InvalidArgument: a negative size, or more bytes than a size counts.
            TransportError: there is no room, in /dev/shm for one; the message has the sizes.
        """
    def split(self, color: int, key: int = 0, lane: str | None = None) -> Communicator:
        """A communicator of the ranks that pass the same ``color``, ordered by ``key``, then rank (collective).

        Args:
            lane: its name, equal within a color; a second one of this communicator's by default.
        """
    def subgroup(self, members: Sequence[int], lane: str) -> Communicator:
        """A communicator of ``members``, ranks of this one, on ``lane``; collective over the members alone."""
    def begin_close(self) -> None:
        """Starts what ``close`` does where that waits for other ranks, so that several end at once."""
    def close(self) -> None:
        """Waits for what was issued, then refuses more. Local and idempotent."""
    def abort(self, reason: str = "the program asked for it") -> None:
        """Ends all that was issued with ``Closed`` and ``reason``, and refuses more. Local; from any thread."""

def check_lost_operations() -> None: ...
def lose_operations(why: str) -> None: ...
def built_with_cuda() -> bool: ...
def nccl_version() -> str: ...
def nccl_communicator(
    config: CommunicatorConfig, *, limits: Mapping[str, tuple[int, int, int]] = {}, will_be_split: bool = False
) -> Communicator:
    """``limits``: by lane ("*": all others) min_ctas, max_ctas (0: NCCL's choice) and cga_cluster_size (-1)."""

def solo_communicator(config: CommunicatorConfig) -> Communicator: ...
def emulated_communicator(inner: Communicator, rules: str) -> Communicator: ...

# Of a group's name, its ranks of the job, this rank's place among them, and why they do not use shared memory.
GlooFactory = Callable[[str, list[int], int, str], c10d.Backend]

def c10d_communicator(
    config: CommunicatorConfig,
    backend: c10d.Backend,
    factory: GlooFactory | None = None,
    neighbourhood: Neighbourhood | None = None,
) -> Communicator: ...
def hierarchical_communicator(
    config: CommunicatorConfig, factory: GlooFactory, neighbourhood: Neighbourhood
) -> Communicator:
    """Where all ranks share memory, or no two hosts have the same number of several, it is another transport's."""

class Neighbourhood:
    """The ranks of a job that share memory with this one; found out by trying (collective over the job).

    ``host`` tells ranks apart that could share memory and shall not: only ranks with equal values do. ``members`` are
    the job's ranks, in order, where it has not all that ``control`` could have. With ``attach`` this rank reads other
    memory of processes that let it, and lets them read its own.
    """

    def __init__(
        self, control: Control, timeout: float, host: str = "", members: Sequence[int] = (), attach: bool = True
    ) -> None: ...
    @property
    def ranks(self) -> list[int]: ...
    def contains(self, ranks: Sequence[int]) -> bool: ...
    def why_not(self, rank: int) -> str: ...
    def missing(self, ranks: Sequence[int]) -> int: ...
    def is_read_by(self, rank: int) -> bool: ...

def near_control(below: Control, neighbourhood: Neighbourhood, timeout: float) -> Control: ...
def neighbourhood_of(control: Control) -> Neighbourhood: ...
def shm_communicator(
    config: CommunicatorConfig, neighbourhood: Neighbourhood, factory: GlooFactory | None = None
) -> Communicator: ...
