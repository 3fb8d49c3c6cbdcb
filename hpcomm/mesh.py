"""``init()`` and the Mesh: the ranks of a job arranged on named axes, with a communicator and a group for each."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from hpcomm import _C, interfaces
from hpcomm.channel import forget_parted, let_go
from hpcomm.communicator import agree, first_communicator, start_control, while_they_stay
from hpcomm.devices import pick_device
from hpcomm.errors import Closed, HpcommError, InvalidArgument, TimedOut, TransportError
from hpcomm.leaving import ExitWatch, describe, told_of_errors
from hpcomm.rendezvous import interruptible, own_store
from hpcomm.settings import checked_timeout, checking, cpu_transport, default_timeout, emulation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcomm._C import Communicator, Control

__all__: list[str] = []

T = TypeVar("T")

AXES = ("pp", "dp", "tp")  # outermost to innermost
# Groups that a closed mesh has left, beside a default group that was not its own, by ranks and kind of device. torch
# names a group by its ranks, and one that is made after another of that name has been destroyed would read from the
# store what that one left there; so the next mesh takes them, and they end with the default group.
_idle: dict[tuple[tuple[int, ...], str], list[dist.ProcessGroup]] = {}

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def axis_sizes(world: int, sizes: dict[str, int], order: Sequence[str] = AXES) -> dict[str, int]:
    """The size of every axis in ``order``, with a single -1 filled in so that their product is ``world``.

    Raises:
        InvalidArgument: the product cannot be ``world``, or a size is neither positive nor -1.
    """
    if sorted(order) != sorted(AXES):
        raise InvalidArgument(f"order={tuple(order)!r}: expected each of {AXES} once")
    for axis, size in sizes.items():
        if not isinstance(size, int) or (size < 1 and size != -1):
            raise InvalidArgument(f"mesh axis {axis}={size!r}: expected a positive number of ranks, or -1 to infer it")
    unknown = [axis for axis in order if sizes[axis] == -1]
    known = 1
    for size in sizes.values():
        known *= size if size > 0 else 1
    shown = " x ".join(f"{axis}={sizes[axis]}" for axis in order if sizes[axis] != 1) or "a mesh of one rank"
    if len(unknown) > 1:
        raise InvalidArgument(f"mesh {shown}: only one axis can be inferred (-1)")
    if (world % known if unknown else world != known) != 0:
        need = f"a multiple of {known}" if unknown else f"{known}"
        ranks = "1 process (no torchrun environment)" if "RANK" not in os.environ else f"{world} ranks"
        raise InvalidArgument(
            f"mesh {shown} needs {need} ranks, the job has {ranks}; "
            f"start it with `torchrun --nproc-per-node {known}` or change the axes"
        )
    return {axis: world // known if sizes[axis] == -1 else sizes[axis] for axis in order}


class Mesh:
    """Ranks on the axes ``pp``, ``dp``, ``tp`` (outermost to innermost unless ``order`` said otherwise).

    ``mesh.dp``, ``mesh.pp`` and ``mesh.tp`` are the Communicators of this rank's row on each axis; ``mesh.world``
    spans all ranks. Made by :func:`init`.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        store: Store,
        rank: int,
        *,
        timeout: float,
        device: torch.device,
        owns_group: bool,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._sizes = sizes
        self.device = device
        self._timeout = timeout
        self._owns_group = owns_group
        self._closed = False
        self._process = os.getpid()
        world = math.prod(sizes.values())
        self.rank = rank
        self.size = world
        self.coordinate = _coordinate(rank, sizes)
        private, start = own_store(store, rank, world, timeout=timeout)
        self.control: Control = start_control(private, rank, world, timeout=timeout)
        with told_of_errors(self.control):
            self._meet(private, start, begin)
        self._watch = ExitWatch(self, owns_group=owns_group)

    def _meet(self, store: Store, start: str, begin: Callable[[], None] | None) -> None:
        """Communicators and groups of all axes (collective)."""
        terms = [f"{axis}={size}" for axis, size in self._sizes.items()] + [f"device={self.device.type}"]
        terms += emulation() + checking()
        terms.append(f"HPCOMM_CPU_TRANSPORT={cpu_transport()}")
        agree(self.control, "mesh", terms, timeout=self._timeout)
        if begin is not None:
            self._with_torch("torch's process group", range(self.size), begin)
            # A rank that is still in there would hear of an error from here on as another rank's, and not have it too.
            agree(self.control, "torch's process group", [], timeout=self._timeout)
        self.world: Communicator = first_communicator(
            store,
            self.control,
            range(self.size),
            name=f"mesh {start}",
            lane="world",
            timeout=self._timeout,
            device=self.device,
            will_be_split=True,
        )
        self._lanes: dict[tuple[tuple[int, ...], str], Communicator] = {}
        # Every rank makes its rows in the same order of axes: no two ranks wait for each other on different rows.
        self._rows = {axis: self._row(axis) for axis in self._sizes}
        self._communicators = {axis: self._axis(axis, row) for axis, row in self._rows.items()}
        self._groups = {axis: self._new_group(row) for axis, row in self._rows.items()}
        # Others may still be connecting to this rank, and would fail if it left now.
        agree(self.control, "groups of the mesh", [], timeout=self._timeout)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis, outermost first."""
        return dict(self._sizes)

    @property
    def dp(self) -> Communicator:
        """Replicas of this rank's part of the model."""
        return self._communicator("dp")

    @property
    def pp(self) -> Communicator:
        """The pipeline that this rank is a stage of."""
        return self._communicator("pp")

    @property
    def tp(self) -> Communicator:
        """The ranks that share this rank's layers."""
        return self._communicator("tp")

    @property
    def timeout(self) -> float:
        """Seconds that one operation may take."""
        return self._timeout

    def group(self, axis: str) -> dist.ProcessGroup:
        """The row of ``axis`` as a ProcessGroup, for torch's own wrappers."""
        if axis not in self._groups:
            raise InvalidArgument(f"mesh has no axis {axis!r}; it has {tuple(self._groups)}")
        return self._groups[axis]

    def ranks(self, axis: str) -> list[int]:
        """The job's ranks in this rank's row of ``axis``, in order."""
        return list(self._rows[axis])

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh for DTensor, FSDP2 and distributed checkpoint; it uses this mesh's groups."""
        from torch.distributed.device_mesh import DeviceMesh

        names = tuple(self._sizes)
        layout = torch.arange(self.size, device="cpu").view(*self._sizes.values())
        groups = [self._groups[axis] for axis in names]
        return DeviceMesh.from_group(groups, self.device.type, layout, mesh_dim_names=names)

    def lane(self, ranks: Sequence[int], lane: str) -> Communicator:
        """The communicator of ``ranks`` on ``lane``; made at the first call, which is collective over them."""
        self._require_open("lane()")
        key = (tuple(ranks), lane)
        if key not in self._lanes:
            self._lanes[key] = self.world.subgroup(list(ranks), lane)
        return self._lanes[key]

    def barrier(self) -> None:
        """Returns when every rank of the mesh has called it."""
        self._require_open("barrier()")
        self.world.barrier()

    def close(self) -> None:
        """Leaves the job in order, when what channels were given has gone, and what was issued on the communicators of
        this mesh has ended, at its time-out at the latest. Idempotent; runs by itself at exit.

        In a forked child it does nothing: the parent has not left.

        Raises:
            RankFailed, PeerError, TimedOut: operations on a GPU ended without a result, and nothing has raised that
                yet. Once; the mesh stays open.
        """
        if self._closed or os.getpid() != self._process:
            return
        # A Ctrl-C that ends one of these waits is an error as any: the peers are told.
        let_go(self.control, self.timeout)
        self._end_lanes()
        if sys.exc_info()[1] is None:  # else the program ends for another reason
            self._raise_unseen()
        self._closed = True
        self._lanes.clear()
        self._communicators.clear()
        self.control.close()
        forget_parted(self.control)
        self._watch.forget()
        if not dist.is_initialized():
            return
        if self._owns_group:
            dist.destroy_process_group()
        elif self.control.failure() is None:
            for axis, group in self._groups.items():
                if group is not dist.group.WORLD:
                    _idle.setdefault((tuple(self._rows[axis]), self.device.type), []).append(group)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # Closed at exit, when the traceback is out: the peers wait for that, see ExitWatch.
            self.control.abort(describe(error))

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self._sizes.items())
        return f"Mesh({axes}; rank {self.rank} at {self.coordinate})"

    def _communicator(self, axis: str) -> Communicator:
        self._require_open(axis)
        return self._communicators[axis]

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise Closed(f"mesh.{what} was used after close(); hpcomm.init() makes a new mesh", rank=self.rank)

    def _end_lanes(self) -> None:
        """What was issued ends with its result: a communicator that is dropped would end it with an error, and an NCCL
        communicator the whole job.
        """
        for end in ("begin_close", "close"):  # NCCL's ends wait for the peers': for a late one all of them at once
            for communicator in (*self._lanes.values(), self.world):
                if self.control.failure() is not None:
                    return  # that has ended what was issued
                getattr(communicator, end)()

    def _raise_unseen(self) -> None:
        """Raises what operations on a GPU were lost of, if this program knows of no failure: it may have waited for
        nothing since, and what it holds is not what the ranks agreed on. On a CPU the waits have told.
        """
        if self.control.failure() is not None:
            _C.check_lost_operations()

    def _row(self, axis: str) -> list[int]:
        stride = math.prod(list(self._sizes.values())[list(self._sizes).index(axis) + 1 :])
        first = self.rank - self.coordinate[axis] * stride
        return [first + i * stride for i in range(self._sizes[axis])]

    def _axis(self, axis: str, row: list[int]) -> Communicator:
        if len(row) == 1:
            return self.lane(row, axis)  # nobody else takes part
        # All ranks are here and make their rows at once: as parts of the world, which NCCL knows already.
        return self._lanes.setdefault((tuple(row), axis), self.world.split(row[0], lane=axis))

    def _new_group(self, row: list[int]) -> dist.ProcessGroup:
        if len(row) == self.size:
            return dist.group.WORLD  # type: ignore[return-value]
        timeout = timedelta(seconds=self._timeout)
        idle = _idle.get((tuple(row), self.device.type), [])
        while idle:
            group = idle.pop()
            if group in dist.distributed_c10d._world.pg_map:  # or it has ended with its default group
                dist.distributed_c10d._set_pg_timeout(timeout, group)
                return group

        def make() -> dist.ProcessGroup:
            group = dist.new_group(
                row, timeout=timeout, backend=_torch_backend(self.device), use_local_synchronization=True
            )
            assert isinstance(group, dist.ProcessGroup)
            return group

        return self._with_torch(f"torch's process group of ranks {row}", row, make)

    def _with_torch(self, what: str, ranks: Sequence[int], make: Callable[[], T]) -> T:
        """``make()``, in which torch waits for ``ranks``: it would not hear of one that is gone before its time is up,
        which for gloo's connections is several times as long, nor say which one that is.

        Raises:
            RankFailed, PeerError: one of them is gone, or has failed.
            TimedOut, TransportError: torch's error.
        """

        def in_thread() -> T:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            return make()

        try:
            return interruptible(in_thread, while_they_stay(self.control, ranks))
        except HpcommError:
            raise
        except dist.DistError as error:
            raise TimedOut(
                f"{what}: not all ranks came within {self._timeout:g} s: {error}", rank=self.rank, operation="init"
            ) from error
        except RuntimeError as error:  # of gloo
            raise TransportError(
                f"{what}: {error}{interfaces.told_of_gloo()}", rank=self.rank, operation="init"
            ) from error


def init(
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    order: Sequence[str] = AXES,
    timeout: float | None = None,
    device: str | torch.device | None = None,
) -> Mesh:
    """Joins the job and arranges its ranks on named axes (collective over all ranks).

    Under torchrun it reads the environment that torchrun sets; a plain ``python train.py`` is a mesh of one rank. The
    default process group is used if there is one, and made if not (gloo, and nccl for the tensors of a GPU).

    Args:
        dp, pp, tp: ranks on each axis; one of them may be -1 (inferred). With none given, ``dp`` is inferred.
        order: axes from outermost to innermost. Neighbouring ranks share the innermost axis.
        timeout: seconds that one operation may take; ``HPCOMM_TIMEOUT`` or 600 by default.
        device: "cpu", "cuda" (the GPU of this process's ``LOCAL_RANK``) or "cuda:1"; what all tensors of the mesh are
            on, ``mesh.device``. By default ``HPCOMM_DEVICE``, and without that a GPU where hpcomm was built with CUDA
            and each rank of the host has one of its own, else the CPU. A GPU becomes torch's current device.

    Raises:
        InvalidArgument: the axes do not multiply to the number of ranks, torchrun's environment is incomplete or
            holds no numbers, the device cannot be used, or ``timeout`` is no number of seconds above 0.
        SchemaMismatch: ranks passed different axes, are on different kinds of device, or were started as parts of jobs
            of different sizes; another process came as this rank.
        TimedOut, RankFailed: a rank did not come.
    """
    seconds = default_timeout() if timeout is None else checked_timeout(timeout, f"init(): timeout={timeout!r}")
    rank, world = rank_and_size()
    if (dp, pp, tp) == (1, 1, 1):
        dp = -1
    sizes = axis_sizes(world, {"dp": dp, "pp": pp, "tp": tp}, order)
    place = pick_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = _torch_backend(place)
    if dist.is_initialized():
        return Mesh(sizes, _default_store(), rank, timeout=seconds, device=place, owns_group=False)
    if world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return Mesh(sizes, _default_store(), rank, timeout=seconds, device=place, owns_group=True)
    store, _ = own_store(_meeting_store(rank, world, seconds), rank, world, timeout=seconds)

    def begin() -> None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))

    return Mesh(sizes, store, rank, timeout=seconds, device=place, owns_group=True, begin=begin)


def _meeting_store(rank: int, world: int, seconds: float) -> Store:
    """That of torchrun's agent, or one that rank 0 keeps.

    Torch's own way to the latter waits there for all ranks, and cannot say who is missing.

    Raises:
        TimedOut: rank 0 did not come.
        TransportError: its port is taken, or its host cannot be reached.
    """
    host, port, timeout = os.environ["MASTER_ADDR"], _number("MASTER_PORT"), timedelta(seconds=seconds)
    place = f"{host}:{port}, where ranks meet (MASTER_ADDR and MASTER_PORT)"
    deadline = time.monotonic() + seconds

    def make() -> Store:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return cast("Store", next(rendezvous("env://", rank, world, timeout=timeout))[0])
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)

    def look() -> None:
        # torch tries twice, each time for as long, and waits for ever for a stranger on that port that says nothing
        if time.monotonic() > deadline:
            raise TimedOut(
                f"rank 0 did not come within {seconds:g} s: no store of torch's answers at {place}",
                rank=rank,
                operation="init",
            )

    try:
        return interruptible(make, look)
    except dist.DistError as error:
        does = "listen" if rank == 0 else "connect"
        raise TransportError(f"rank {rank} cannot {does} at {place}: {error}", rank=rank, operation="init") from error


def _torch_backend(device: torch.device) -> str:
    """What torch's own wrappers (stock DDP, FSDP2) get from ``mesh.group``."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def rank_and_size() -> tuple[int, int]:
    """Those of the default process group, or what torchrun has put into the environment.

    Raises:
        InvalidArgument: some of what torchrun sets is missing, or is no number.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    present = [name for name in _TORCHRUN if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return 0, 1
    missing = [name for name in _TORCHRUN if name not in present]
    if missing:
        raise InvalidArgument(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}; start the program with torchrun, "
            "or unset all of them for a single process"
        )
    return _number("RANK"), _number("WORLD_SIZE")


def _number(variable: str) -> int:
    text = os.environ[variable]
    if not text.strip().isdecimal():
        raise InvalidArgument(f"{variable}={text!r} in the environment is no number; torchrun sets it")
    return int(text)


def _default_store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _coordinate(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    coordinate = {}
    for axis in reversed(sizes):
        rank, coordinate[axis] = divmod(rank, sizes[axis])
    return {axis: coordinate[axis] for axis in sizes}
