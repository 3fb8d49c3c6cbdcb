"""``hpcomm doctor``: tries what a job needs, on this machine or between the ranks of a torchrun job, and says what is
in its way.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import platform
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcomm import _native
from hpcomm._version import __version__
from hpcomm.control_channels import ControlChannel
from hpcomm.errors import HpcommError, InvalidArgument
from hpcomm.settings import LONGEST_TIMEOUT, default_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh

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
)
# Those of the build and of the tests.
ELSEWHERE = ("HPCOMM_BUILD_DIR", "HPCOMM_REQUIRE_GPUS", "HPCOMM_REQUIRE_MULTIRANK", "HPCOMM_COMMIT")

TIMEOUT = 60.0  # seconds for the ranks to come, and for each operation
_START = 60.0  # seconds in which processes of this machine import torch, also where they are many
_SHORT, _LONG = 4, 16 << 20  # bytes of the messages that are timed
_SPARE_FILES = 64  # descriptors that a rank needs beside one for each other rank
_PAIRS = 16  # of hosts whose link is timed
_MOST_RANKS = 1024

OK, NOTE, FAIL = "ok", "note", "FAIL"


class Finding(NamedTuple):
    """One line: ``mark`` is ok; note, which stands in nobody's way; or FAIL."""

    mark: str
    subject: str
    text: str


def add_to(commands: Any) -> None:
    """Adds ``doctor`` to the subparsers of hpcomm's command line."""
    doctor = commands.add_parser(
        "doctor",
        help="try what a job needs: here, or under torchrun between its ranks",
        description="Tries what a job needs and says what is in its way. By itself it starts ranks on this machine; "
        "under torchrun it is the job (torchrun ... -m hpcomm doctor). Exit status: 1 when something failed.",
    )
    doctor.add_argument("--ranks", type=int, default=2, help="how many to start (2)")
    doctor.add_argument(
        "--timeout", type=float, metavar="S", help=f"seconds to wait for a rank (HPCOMM_TIMEOUT, or {TIMEOUT:g})"
    )
    doctor.set_defaults(run=_run)


def _run(options: Any) -> int:
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise InvalidArgument(f"--ranks {options.ranks}: expected 1 to {_MOST_RANKS}, which start on this machine")
    if options.timeout is not None and not 0 < options.timeout <= LONGEST_TIMEOUT:
        raise InvalidArgument(f"--timeout {options.timeout:g}: expected seconds, above 0, at most {LONGEST_TIMEOUT:,}")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        broken = build()
        if broken.mark == FAIL:  # the ranks would say the same, each of them
            _print(_title(), [broken])
            return 1
        return _start(options)
    return _as_rank(options)


# --- What one process finds by itself ---------------------------------------------------------------------------------


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


# --- What ranks find together -----------------------------------------------------------------------------------------


def _as_rank(options: Any) -> int:
    """Joins the job that somebody has started; rank 0 prints what all ranks have found."""
    from hpcomm import mesh as meshes

    built = build()
    if built.mark == FAIL:
        return _give_up(built)
    try:
        timeout = default_timeout(TIMEOUT) if options.timeout is None else options.timeout
        _, size = meshes.rank_and_size()
        alone = [built, cores(), files(size), gpus(), *settings(os.environ)]
        if size > 1:
            alone.append(meeting_place(os.environ))
        unable = [finding for finding in alone if finding.mark == FAIL]
        if unable:
            return _give_up(*unable)
        mesh = meshes.init(timeout=timeout)
    except HpcommError as error:
        return _give_up(Finding(FAIL, "start", str(error)))
    try:
        with mesh:
            found = _together(mesh, alone)
    except HpcommError as error:
        return _give_up(Finding(FAIL, "job", str(error)))
    return 1 if any(finding.mark == FAIL for finding in found) else 0


def _give_up(*why: Finding) -> int:
    _print(f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}", why)
    return 1


def _together(mesh: Mesh, alone: Sequence[Finding]) -> list[Finding]:
    """Everything that the ranks find, on rank 0, which prints it (collective)."""
    from hpcomm import _C, seats

    neighbourhood = _C.neighbourhood_of(mesh.control) if mesh.size > 1 else None
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    apart = {} if neighbourhood is None else {r: neighbourhood.why_not(r) for r in others}
    mine = {
        "found": alone,
        "host": socket.gethostname(),
        "seat": seats.seat(),
        "apart": {r: why for r, why in apart.items() if why},
        "read by": [r for r in others if neighbourhood is not None and neighbourhood.is_read_by(r)],
    }
    body = json.dumps(mine).encode()
    everybody = [
        json.loads(text)
        for text in mesh.control.exchange(list(range(mesh.size)), ControlChannel.DOCTOR, body, mesh.timeout)
    ]
    hosts = _by_host(everybody)
    merged = _merged([[Finding(*one) for one in each["found"]] for each in everybody])
    together = [
        _hosts_found(hosts, everybody),
        _transport_found(mesh, hosts, everybody),
        *_reads_found(mesh, hosts, everybody),
        *_crowds_found(hosts, everybody),
        _sums_found(mesh),
        *_times_found(mesh, hosts),
    ]
    if mesh.rank == 0:
        _print(_title(), merged)
        _print(f"{mesh.size} rank{'s' * (mesh.size > 1)} together", together)
        failed = any(finding.mark == FAIL for finding in (*merged, *together))
        print("\nsomething failed, see above" if failed else "\nnothing is in the way", flush=True)
    return [*merged, *together]


def _by_host(everybody: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(everybody):
        hosts.setdefault(each["seat"][0], []).append(rank)
    return list(hosts.values())


def _merged(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Equal findings of several ranks once, with the ranks where not all have it."""
    owners: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(found):
        for finding in findings:
            owners.setdefault(finding, []).append(rank)
    return [
        finding if len(ranks) == len(found) else finding._replace(text=f"{finding.text} ({_ranks(ranks)})")
        for finding, ranks in owners.items()
    ]


def _hosts_found(hosts: Sequence[Sequence[int]], everybody: Sequence[dict[str, Any]]) -> Finding:
    return Finding(OK, "hosts", "; ".join(f"{everybody[ranks[0]]['host']}: {_ranks(ranks)}" for ranks in hosts))


def _transport_found(mesh: Mesh, hosts: Sequence[Sequence[int]], everybody: Sequence[dict[str, Any]]) -> Finding:
    transport = mesh.world.transport
    if transport != "c10d":
        return Finding(OK, "transport", transport)
    if os.environ.get("HPCOMM_CPU_TRANSPORT") == "gloo":
        return Finding(OK, "transport", "c10d (gloo), as HPCOMM_CPU_TRANSPORT says")
    # Of two ranks on one host the reason is worth more than that hosts share no memory.
    near = [(a, str(b)) for ranks in hosts for a in ranks for b in ranks if str(b) in everybody[a]["apart"]]
    if near:
        rank, other = near[0]
        why = everybody[rank]["apart"][other]
        return Finding(NOTE, "transport", f"c10d (gloo): rank {rank} and rank {other} share no memory: {why}")
    if len(hosts) == 1:
        return Finding(NOTE, "transport", "c10d (gloo), though the ranks share a host")
    text = "c10d (gloo): ranks span hosts, so the whole group is on it"
    per_host = {len(ranks) for ranks in hosts}
    if len(per_host) == 1 and per_host.pop() > 1 and os.environ.get("HPCOMM_CPU_TRANSPORT") != "hierarchical":
        text += "; HPCOMM_CPU_TRANSPORT=hierarchical would use memory inside hosts as well"
    return Finding(OK, "transport", text)


def _reads_found(mesh: Mesh, hosts: Sequence[Sequence[int]], everybody: Sequence[dict[str, Any]]) -> list[Finding]:
    if mesh.size == 1 or mesh.world.transport != "shm":
        return []
    unread = [rank for ranks in hosts for rank in ranks if len(everybody[rank]["read by"]) < len(ranks) - 1]
    if not unread:
        return [Finding(OK, "large messages", "are read out of the memory of the rank that sends them")]
    return [
        Finding(
            NOTE,
            "large messages",
            f"of {_ranks(unread)} are copied twice: the others may not read their memory (HPCOMM_CMA, "
            "kernel.yama.ptrace_scope, or what a container forbids)",
        )
    ]


def _crowds_found(hosts: Sequence[Sequence[int]], everybody: Sequence[dict[str, Any]]) -> list[Finding]:
    from hpcomm import seats

    found = []
    for ranks in hosts:
        seated = [(seat[0], seat[1], seat[2]) for seat in (everybody[rank]["seat"] for rank in ranks)]
        there, threads = seats.cores_of(seated), sum(seat[2] for seat in seated)
        if there < threads:
            where = everybody[ranks[0]]["host"]
            found.append(
                Finding(
                    NOTE,
                    "cores",
                    f"{where} has {there} for the {threads} compute threads of {_ranks(ranks)}: fewer ranks, or a "
                    "smaller OMP_NUM_THREADS",
                )
            )
    return found


def _sums_found(mesh: Mesh) -> Finding:
    """Whether sums are right, with values that tell the ranks apart."""
    import torch

    tensor = torch.arange(1000, device=mesh.device) + 1000 * mesh.rank
    mesh.world.all_reduce(tensor)
    wanted = mesh.size * torch.arange(1000) + 1000 * (mesh.size * (mesh.size - 1) // 2)
    wrong = (tensor.cpu() != wanted).sum()
    mesh.world.all_reduce(wrong := wrong.to(mesh.device))
    if wrong.item():
        return Finding(FAIL, "sums", f"an all_reduce of 1,000 numbers gave {wrong.item()} wrong ones")
    return Finding(OK, "sums", "right")


def _times_found(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> list[Finding]:
    """What an all_reduce takes, and a message to the next host, or to the next rank where there is one (collective)."""
    import torch

    if mesh.size == 1:
        return []
    reduced = {size: _seconds(mesh, mesh.world, mesh.world.all_reduce, size) for size in (_SHORT, _LONG)}
    bus = 2 * (mesh.size - 1) / mesh.size * _LONG / reduced[_LONG]
    found = [
        Finding(OK, "all_reduce", f"{_SHORT} B {_duration(reduced[_SHORT])}, 16 MB {_duration(reduced[_LONG])}, "
                f"{bus / 1e9:.2f} GB/s on the bus")
    ]  # fmt: skip
    firsts = [ranks[0] for ranks in hosts] if len(hosts) > 1 else [0, 1]
    for pair in list(zip(firsts, firsts[1:], strict=False))[:_PAIRS]:
        times = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        if mesh.rank in pair:
            lane = mesh.lane(pair, "doctor")
            for place, size in enumerate((_SHORT, _LONG)):
                times[place] = _seconds(mesh, lane, functools.partial(_there_and_back, lane), size) / 2
        mesh.world.all_reduce(times, "max")
        short, long = times.tolist()
        found.append(
            Finding(OK, "message", f"rank {pair[0]} to rank {pair[1]}: {_SHORT} B {_duration(short)}, "
                    f"16 MB {_duration(long)}, {_LONG / long / 1e9:.2f} GB/s")
        )  # fmt: skip
    return found


def _there_and_back(lane: Communicator, tensor: Any) -> None:
    for sender in (0, 1):
        (lane.send if lane.rank == sender else lane.recv)(tensor, 1 - lane.rank)


def _seconds(mesh: Mesh, group: Communicator, step: Callable[[Any], object], size: int) -> float:
    """The median of some turns of ``step(tensor of so many bytes)`` on the slowest rank (collective over ``group``)."""
    import torch

    tensor = torch.zeros(size // 4, device=mesh.device)

    def timed() -> float:
        start = time.perf_counter()
        step(tensor)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        return time.perf_counter() - start

    first = torch.tensor([min(timed() for _ in range(3))], device=mesh.device)
    group.all_reduce(first, "max")  # all have to take as many turns
    turns = max(5, min(200, int(0.3 / max(first.item(), 1e-6))))
    middle = torch.tensor([statistics.median(timed() for _ in range(turns))], device=mesh.device)
    group.all_reduce(middle, "max")
    return float(middle.item())


# --- Ranks of its own, and words --------------------------------------------------------------------------------------


def _start(options: Any) -> int:
    """Starts ranks on this machine, which do the rest; ends with them."""
    from torch._C._distributed_c10d import TCPStore

    timeout = default_timeout(TIMEOUT) if options.timeout is None else options.timeout
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's agent has one
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
    }
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **job}
    command = [sys.executable, "-m", "hpcomm", "doctor", "--timeout", str(timeout)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in map(str, range(options.ranks)):
            its = environment | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, env=its))
        longest = _START + 3 * timeout
        deadline = time.monotonic() + longest
        ended = [process.wait(max(0.0, deadline - time.monotonic())) for process in ranks]
        return 1 if any(ended) else 0
    except subprocess.TimeoutExpired:
        _print(f"{options.ranks} ranks", [Finding(FAIL, "ranks", f"not all have ended after {longest:g} s")])
        return 1
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _title() -> str:
    return f"hpcomm {__version__}, Python {platform.python_version()}, {_torch()}, {platform.system()} {_kernel()}"


def _torch() -> str:
    torch = sys.modules.get("torch")
    return "no torch" if torch is None else f"torch {torch.__version__}"


def _kernel() -> str:
    match = re.match(r"\d+\.\d+", platform.release())
    return match[0] if match else platform.release()


def _print(title: str, findings: Iterable[Finding]) -> None:
    lines = [title]
    for mark, subject, text in findings:
        first, *rest = text.splitlines()
        lines.append(f"  {mark:<5} {subject:<15} {first}")
        lines += [f"{'':<24}{line}".rstrip() for line in rest]
    print("\n".join(lines), flush=True)


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-3, 6"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
