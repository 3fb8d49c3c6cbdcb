"""What one process finds by itself: the build, its environment, cores, open files, GPUs, where ranks meet."""

from __future__ import annotations

import difflib
import os
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcomm import _native, interfaces
from hpcomm.doctor.finding import FAIL, NOTE, OK, Finding
from hpcomm.errors import HpcommError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__: list[str] = []

VARIABLES = (
    "HPCOMM_CHECK",
    "HPCOMM_CMA",
    "HPCOMM_CPU_TRANSPORT",
    "HPCOMM_DDP_REDUCER",
    "HPCOMM_DEVICE",
    "HPCOMM_EMULATE",
    "HPCOMM_HEARTBEAT_TIMEOUT",
    "HPCOMM_HOST",
    "HPCOMM_NCCL_BLOCKING",
    "HPCOMM_NCCL_CTAS",
    "HPCOMM_NCCL_LIBRARY",
    "HPCOMM_NCCL_REGISTER",
    "HPCOMM_SECRET",
    "HPCOMM_TIMEOUT",
    "HPCOMM_TRACE",
    "HPCOMM_WAIT_NOTICE",
)
# Those of the build and of the tests.
ELSEWHERE = ("HPCOMM_BUILD_DIR", "HPCOMM_REQUIRE_GPUS", "HPCOMM_REQUIRE_MULTIRANK", "HPCOMM_COMMIT")

_SPARE_FILES = 64  # descriptors that a rank needs beside one for each other rank


def build() -> Finding:
    """Whether the native module loads under this torch."""
    try:
        _native.load()
    except ImportError as error:
        return Finding(FAIL, "build", str(error).strip())
    from hpcomm import _build

    return Finding(OK, "build", f"for torch {_build.TORCH_VERSION}, loads")


def settings(environment: Iterable[str]) -> list[Finding]:
    """Variables of hpcomm in ``environment``, and what is like one and is none."""
    found = []
    for name in sorted(name for name in environment if name.startswith("HPCOMM_") and name not in ELSEWHERE):
        if name in VARIABLES:
            value = "..." if name == "HPCOMM_SECRET" else os.environ.get(name, "")
            found.append(Finding(OK, "settings", f"{name}={value}"))
        else:
            near = difflib.get_close_matches(name, VARIABLES, 1)
            found.append(
                Finding(NOTE, "settings", f"{name} is read by nobody" + (f"; {near[0]} is meant?" if near else ""))
            )
    if "HPCOMM_EMULATE" in environment:
        found.append(Finding(NOTE, "settings", "HPCOMM_EMULATE is for tests: it delays everything"))
    return found


def cores() -> Finding:
    """Those that this process may use: by its affinity, and by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    if quota is not None and quota < allowed:
        return Finding(
            NOTE, "cores", f"{allowed}, but its control group gives the time of {quota:g}: ranks are stopped meanwhile"
        )
    return Finding(OK, "cores", str(allowed))


def _quota() -> float | None:
    """Cores' worth of time that the control group of this process is given; None where there is no limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        limit, period = (Path("/sys/fs/cgroup") / group.strip("/") / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def files(ranks: int) -> Finding:
    """Whether this process may open enough of them for a job of ``ranks``."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = ranks + _SPARE_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        return Finding(
            FAIL, "open files", f"{most:,}; with {ranks} ranks this one needs about {needed:,}: raise `ulimit -n`"
        )
    return Finding(OK, "open files", "no limit" if most == resource.RLIM_INFINITY else f"{most:,}")


def gpus() -> Finding:
    """Whether this copy can use those of this machine."""
    import torch

    from hpcomm import _C

    seen = torch.cuda.device_count()
    if not _C.built_with_cuda():
        if seen == 0:
            return Finding(OK, "GPUs", "none, and built for CPUs")
        return Finding(
            NOTE, "GPUs", f"torch sees {seen}, but this copy was built without CUDA: build it with USE_CUDA=1"
        )
    if seen == 0:
        return Finding(
            NOTE,
            "GPUs",
            "built with CUDA, but torch sees none here (torch.cuda.is_available() is False): CPUs are used",
        )
    names = sorted({torch.cuda.get_device_name(index) for index in range(seen)})
    try:
        nccl = f"NCCL {_C.nccl_version()}"
    except HpcommError as error:
        return Finding(FAIL, "GPUs", f"{seen} x {', '.join(names)}, but no NCCL: {error}")
    return Finding(OK, "GPUs", f"{seen} x {', '.join(names)}, {nccl}")


def gloo_interface(environment: Any) -> Finding:
    """Where torch's gloo listens: by ``GLOO_SOCKET_IFNAME``, or at what this host's name means."""
    title, present = "gloo", interfaces.names()
    asked = [name.strip() for name in environment.get(interfaces.VARIABLE, "").split(",") if name.strip()]
    if unknown := [name for name in asked if name not in present]:
        return Finding(
            FAIL, title, f"{interfaces.VARIABLE}: this host has no interface {unknown[0]!r}, but {', '.join(present)}"
        )
    if "lo" in asked:
        return Finding(NOTE, title, f"{interfaces.VARIABLE}={','.join(asked)}: no other host can reach that")
    if asked:
        return Finding(OK, title, f"listens on {', '.join(asked)}")
    own = interfaces.own_address()
    if own and not interfaces.is_loopback(own):
        return Finding(OK, title, f"listens on {own}, which is {socket.gethostname()} here")
    return Finding(
        OK, title, f"listens where the hosts meet, for {socket.gethostname()} means {own or 'no address of this host'}"
    )


def meeting_place(environment: Any) -> Finding:
    """Whether ``MASTER_ADDR`` is a name that this host knows, and what it means here."""
    name = environment.get("MASTER_ADDR", "")
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return Finding(
            FAIL, "MASTER_ADDR", f"{name!r} means nothing on {socket.gethostname()}: {error}; give its address"
        )
    return Finding(OK, "MASTER_ADDR", name if name == address else f"{name} is {address} here")
