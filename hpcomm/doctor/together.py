"""What ranks find together: hosts, transports, crowded cores, wrong sums, and what messages take."""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

from hpcomm.control_channels import ControlChannel
from hpcomm.doctor.finding import FAIL, NOTE, OK, Finding, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcomm._C import Communicator
    from hpcomm.mesh import Mesh

__all__: list[str] = []

_SHORT, _LONG = 4, 16 << 20  # bytes of the messages that are timed
_PAIRS = 16  # of hosts whose link is timed


def find(mesh: Mesh, alone: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """What each rank has found ``alone``, equal findings once, and what they find together (collective)."""
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
    return merged, together


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
        finding if len(ranks) == len(found) else finding._replace(text=f"{finding.text} ({words_of(ranks)})")
        for finding, ranks in owners.items()
    ]


def _hosts_found(hosts: Sequence[Sequence[int]], everybody: Sequence[dict[str, Any]]) -> Finding:
    return Finding(OK, "hosts", "; ".join(f"{everybody[ranks[0]]['host']}: {words_of(ranks)}" for ranks in hosts))


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
            f"of {words_of(unread)} are copied twice: the others may not read their memory (HPCOMM_CMA, "
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
                    f"{where} has {there} for the {threads} compute threads of {words_of(ranks)}: fewer ranks, or a "
                    "smaller OMP_NUM_THREADS",
                )
            )
    return found


def _sums_found(mesh: Mesh) -> Finding:
    """Whether sums are right, with values that tell the ranks apart."""
    import torch

    tensor = torch.arange(1000, device=mesh.device) + 1000 * mesh.rank
    mesh.world.all_reduce(tensor)
    wanted = mesh.size * torch.arange(1000, device="cpu") + 1000 * (mesh.size * (mesh.size - 1) // 2)
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


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
