"""The process's NCCL called directly: what an operation costs the host below hpcomm and below torch.

A blocking communicator of all ranks with NCCL's own settings. Its calls come from ctypes, whose conversions take about
a microsecond each and are part of what is timed.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from benchmarks.gpu.harness import Job

LIBRARY = "libnccl.so.2"  # as torch and hpcomm find it: the one that was loaded first under this name
FLOAT32, SUM = 7, 0  # ncclFloat32, ncclSum


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class NcclError(RuntimeError):
    """A call of NCCL that failed."""


class NcclAlone:
    """Operations on float32 tensors of this rank's device, issued on the current stream.

    Raises OSError without the library, :class:`NcclError` with NCCL's words. :meth:`connect` on all ranks at the same
    time; close it before the process ends.
    """

    def __init__(self, job: Job, library: str = LIBRARY) -> None:
        self._job = job
        self._nccl = ctypes.CDLL(library)
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()
        self._unique = UniqueId()
        if job.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(self._unique))

    def connect(self) -> None:
        """Makes the communicator, by the id of rank 0."""
        job, unique = self._job, self._unique
        if job.ranks > 1:
            shared = [bytes(unique)]
            dist.broadcast_object_list(shared, device=torch.device("cpu"))  # over gloo
            unique = UniqueId.from_buffer_copy(shared[0])
        self._stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if job.on_gpu else None)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), ctypes.c_int(job.ranks), unique,
                   ctypes.c_int(job.rank))  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._nccl, name)(*arguments)
        if result != 0:
            raise NcclError(f"{name}: {self._nccl.ncclGetErrorString(result).decode()}")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        address = ctypes.c_void_p(tensor.data_ptr())
        self._call("ncclAllReduce", address, address, ctypes.c_size_t(tensor.numel()), FLOAT32, SUM, self._comm,
                   self._stream)  # fmt: skip

    def exchange(self, mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
        """Sends and receives as much, in one group: one launch."""
        self._call("ncclGroupStart")
        with contextlib.ExitStack() as group:
            group.callback(self._call, "ncclGroupEnd")
            for name, tensor in (("ncclSend", mine), ("ncclRecv", theirs)):
                self._call(name, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), FLOAT32,
                           ctypes.c_int(peer), self._comm, self._stream)  # fmt: skip

    def close(self) -> None:
        """Ends the communicator, when its operations have ended."""
        if self._comm:
            self._call("ncclCommDestroy", self._comm)
            self._comm = ctypes.c_void_p()
