"""Sets what NCCL reads from the environment, before anything of this process can have called it.

NCCL reads a variable once, in the first call of the process that needs it, whoever makes that: it may be torch's. What
is set later changes nothing, and NCCL does not say what it read. What the user has set stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

__all__: list[str] = []

# Kernels start in the order of issue. (From 2.31 on each communicator is told, and this is not needed.)
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
DEFAULTS = {
    ORDER: "1",
    # Where NCCL keeps that order, threads that launch on one device at the same time are an error of NCCL's by default,
    # torch's own too. Such threads have no order here either; it is no reason to end a job.
    "NCCL_LAUNCH_RACE_FATAL": "0",
    # Memory of ncclMemAlloc is used in place inside captures, which is wrong where the other end has other memory.
    GRAPH_REGISTER: "0",
}

# The driver's CUDA, as 12030 for 12.3, from which on NCCL lets a kernel wait for the start of the one before it. With
# an older one it waits for the end (by NCCL's source, `getImplicitOrder` in enqueue.cc): nothing overlaps, and two
# ranks that both send on one lane before they receive on another wait for ever. hpcomm's events are better there.
STARTS_IN_ORDER = 12030


def set_defaults() -> bool:
    """Sets them; whether NCCL is asked for the order, and was before the process could have used it."""
    # Who has not initialised CUDA has no NCCL communicator.
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    unused = cuda is None or not cuda.is_initialized()
    driver = driver_version()
    is_old = 0 < driver < STARTS_IN_ORDER
    if is_old and _says_yes(os.environ.get(ORDER, "0")):
        print(
            f"hpcomm: with {ORDER}=1 and a driver for CUDA {driver // 1000}.{driver % 1000 // 10} NCCL runs its "
            "kernels one after the other, and ranks that both send before they receive may wait for ever. Unset it, or "
            "use a driver for CUDA 12.3 or newer",
            file=sys.stderr,
        )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, "0" if is_old and name == ORDER else value)
    return _says_yes(os.environ[ORDER]) and (unused or _says_yes(_at_the_start(ORDER)))


def driver_version() -> int:
    """The newest CUDA that the driver knows, as 12030 for 12.3; 0 without a driver. Initialises nothing."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _at_the_start(name: str) -> str:
    """The variable as the process was started with it: later changes do not show there."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    given = dict(entry.partition("=")[::2] for entry in text.split("\0"))
    return given.get(name, "")


def _says_yes(value: str) -> bool:
    try:
        return int(value) != 0
    except ValueError:
        return False


@functools.cache
def warn_of_registration() -> None:
    """A line on stderr, once, where memory may be used in place inside captures: what arrives may be wrong then."""
    value = os.environ.get(GRAPH_REGISTER, "1")
    if value != "0":
        print(
            f"hpcomm: with {GRAPH_REGISTER}={value} NCCL uses memory of ncclMemAlloc in place in CUDA graphs; where "
            "the other ranks' memory is of another kind, what arrives is undefined. Unset it, or set 0",
            file=sys.stderr,
        )


ORDER_IN_TIME = set_defaults()  # read by the native module
