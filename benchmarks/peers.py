"""Who is compared by benchmarks.collectives: one small class per library, with the same interface."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import hpcomm
    from benchmarks.operations import Buffers, Case

Step = Callable[[], object]

PEERS = ("hpcomm", "hpcomm-zero", "c10d-hpcomm", "gloo", "mpich", "broken")
# torch 2.13 renamed them.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

INSTALL_MPI = "install it with `pip install --no-build-isolation '.[bench]'`"
NO_MPI = f"there is no mpi4py, no numpy or no mpiexec of MPICH; {INSTALL_MPI}"


class UnsupportedError(Exception):
    """A library has no such operation, data type or reduction."""


class UnavailableError(Exception):
    """A library is not installed, or not in this version."""


class Peer(ABC):
    """A library that can run the operations of :mod:`benchmarks.operations`."""

    name: str
    own_memory = False  # whether it wants memory of another kind than the other libraries

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory as this library's users would have it."""
        return torch.empty(length, dtype=dtype)

    @abstractmethod
    def step(self, case: Case, buffers: Buffers) -> Step:
        """A function that runs the operation once and returns when this rank may use its buffers again.

        Raises:
            UnsupportedError: there is none.
        """

    @abstractmethod
    def barrier(self) -> object:
        """Returns when all ranks have called it."""


class Hpcomm(Peer):
    """Our communicator, from Python."""

    name = "hpcomm"

    def __init__(self, mesh: hpcomm.Mesh) -> None:
        self._world = mesh.world

    def step(self, case: Case, buffers: Buffers) -> Step:
        world, data, output = self._world, buffers.input, buffers.output
        redop = {"prod": "product"}.get(case.redop, case.redop)
        match case.operation.name:
            case "all_reduce":
                return partial(world.all_reduce, output, redop)
            case "all_gather":
                return partial(world.all_gather, output, data)
            case "reduce_scatter":
                return partial(world.reduce_scatter, output, data, redop)
            case "broadcast":
                return partial(world.broadcast, output, case.root)
            case "all_to_all":
                return partial(world.all_to_all, output, data)
            case "sendrecv":
                return partial(world.sendrecv, data, case.next, output, case.previous)
        if case.partner is None:
            return _nothing
        return _in_turn(
            partial(world.send, data, case.partner), partial(world.recv, output, case.partner), case.rank % 2 == 0
        )

    def barrier(self) -> object:
        return self._world.barrier()


class HpcommZero(Hpcomm):
    """The same on memory that the communicator allocated."""

    name = "hpcomm-zero"
    own_memory = True

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return self._world.allocate([length], dtype)


class C10d(Peer):
    """A backend of torch.distributed."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name = name
        self._group = group

    def step(self, case: Case, buffers: Buffers) -> Step:
        group, data, output = self._group, buffers.input, buffers.output
        redop = {
            "sum": dist.ReduceOp.SUM,
            "prod": dist.ReduceOp.PRODUCT,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
            "avg": dist.ReduceOp.AVG,
        }[case.redop]
        match case.operation.name:
            case "all_reduce":
                return partial(dist.all_reduce, output, redop, group)
            case "all_gather":
                return partial(_ALL_GATHER, output, data, group)
            case "reduce_scatter":
                return partial(_REDUCE_SCATTER, output, data, redop, group)
            case "broadcast":
                return partial(dist.broadcast, output, case.root, group)
            case "all_to_all":
                return partial(dist.all_to_all_single, output, data, group=group)
            case "sendrecv":

                def both() -> None:
                    sent = dist.isend(data, case.next, group)
                    received = dist.irecv(output, case.previous, group)
                    assert sent is not None
                    assert received is not None
                    sent.wait()
                    received.wait()

                return both
        if case.partner is None:
            return _nothing
        send = partial(dist.send, data, case.partner, group)
        return _in_turn(send, partial(dist.recv, output, case.partner, group), case.rank % 2 == 0)

    def barrier(self) -> object:
        return dist.barrier(self._group)


class Broken(C10d):
    """Gloo with one wrong element on the last rank: shows that the check counts."""

    def step(self, case: Case, buffers: Buffers) -> Step:
        step = super().step(case, buffers)
        if case.rank != case.ranks - 1:
            return step

        def spoil() -> None:
            step()
            buffers.output[-1] += 1

        return spoil


class Mpich(Peer):
    """MPICH by way of mpi4py's buffer calls, which take memory as it is."""

    name = "mpich"

    def __init__(self) -> None:
        mpi4py = _import("mpi4py", "mpi4py is not installed")
        # The cheapest that is enough: all calls come from the main thread.
        mpi4py.rc.thread_level = "funneled"
        self._mpi = _import("mpi4py.MPI", "mpi4py finds no MPI library")
        library = self._mpi.Get_library_version()
        self.version = f"{' '.join(library.split()[:3]).replace(' Version:', '')}, mpi4py {mpi4py.__version__}"
        if "MPICH" not in library:
            raise UnavailableError(f"mpi4py runs on {self.version}, not on MPICH; {INSTALL_MPI}")
        self._world = self._mpi.COMM_WORLD
        if self._world.Get_size() != dist.get_world_size():
            raise UnavailableError(f"MPI sees {self._world.Get_size()} ranks; was the job started by MPICH's mpiexec?")
        mpi = self._mpi
        self._types = {
            torch.int8: mpi.INT8_T,
            torch.uint8: mpi.UINT8_T,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
            torch.float32: mpi.FLOAT,
            torch.float64: mpi.DOUBLE,
        }
        self._redops = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}

    def step(self, case: Case, buffers: Buffers) -> Step:
        world, in_place = self._world, self._mpi.IN_PLACE
        if case.operation.reduces:
            if case.dtype not in self._types:
                raise UnsupportedError(f"MPI reduces no {str(case.dtype).removeprefix('torch.')}")
            if case.redop not in self._redops:
                raise UnsupportedError(f"MPI has no {case.redop}")
        redop = self._redops.get(case.redop)
        data, output = self._spec(buffers.input), self._spec(buffers.output)
        match case.operation.name:
            case "all_reduce":
                return partial(world.Allreduce, in_place, output, redop)
            case "all_gather":
                return partial(world.Allgather, data, self._spec(buffers.output, case.ranks))
            case "reduce_scatter":
                return partial(world.Reduce_scatter_block, self._spec(buffers.input, case.ranks), output, redop)
            case "broadcast":
                return partial(world.Bcast, output, case.root)
            case "all_to_all":
                return partial(
                    world.Alltoall, self._spec(buffers.input, case.ranks), self._spec(buffers.output, case.ranks)
                )
            case "sendrecv":
                return partial(world.Sendrecv, data, case.next, 0, output, case.previous, 0)
        if case.partner is None:
            return _nothing
        send = partial(world.Send, data, case.partner)
        return _in_turn(send, partial(world.Recv, output, case.partner), case.rank % 2 == 0)

    def barrier(self) -> object:
        return self._world.Barrier()

    def _spec(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """Made once: mpi4py need not look for the type in every call. What MPI has no type for travels as bytes."""
        kind = self._types.get(tensor.dtype)
        array = tensor.numpy() if kind else tensor.view(torch.uint8).numpy()
        return [array, array.size // parts, kind or self._mpi.BYTE]


def make_peer(name: str, mesh: hpcomm.Mesh) -> Peer:
    """The peer of that name (collective).

    Raises:
        UnavailableError: it is not installed; the message says what to do.
    """
    world = dist.group.WORLD
    assert world is not None
    match name:
        case "hpcomm":
            return Hpcomm(mesh)
        case "hpcomm-zero":
            return HpcommZero(mesh)
        case "gloo":
            return C10d("gloo", world)
        case "broken":
            return Broken("broken", world)
        case "mpich":
            return Mpich()
        case "c10d-hpcomm":
            with contextlib.suppress(ImportError):
                importlib.import_module("hpcomm.backend")
            if "hpcomm" not in dist.Backend.backend_list:
                raise UnavailableError('this hpcomm registers no backend "hpcomm" with torch.distributed')
            group = dist.new_group(backend="hpcomm")
            assert isinstance(group, dist.ProcessGroup)
            return C10d("c10d-hpcomm", group)
    raise UnavailableError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")


def _import(name: str, complaint: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(f"{complaint} ({str(error).splitlines()[0]}); {INSTALL_MPI}") from None


def _in_turn(send: Step, receive: Step, send_first: bool) -> Step:
    first, second = (send, receive) if send_first else (receive, send)

    def both() -> None:
        first()
        second()

    return both


def _nothing() -> None:
    pass
