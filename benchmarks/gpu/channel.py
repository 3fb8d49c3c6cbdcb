"""How long does a message take, against torch's batch_isend_irecv of the same tensors? Two ranks.

"one way": rank 0 sends, rank 1 receives. "both ways": each sends and receives at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import hpcomm
from benchmarks.gpu.harness import Job, Step, measure, ratio

KB, MB = 1 << 10, 1 << 20
CASES = {"32 x 16 KB": (32, 16 * KB), "8 x 8 MB": (8, 8 * MB), "1 x 64 MB": (1, 64 * MB)}
QUICK = {"4 x 1 KB": (4, KB), "1 x 16 KB": (1, 16 * KB)}


def run(job: Job) -> None:
    mesh = hpcomm.init(pp=job.ranks, device=job.device, timeout=60.0)
    channels = {
        "hpcomm": hpcomm.Channel(mesh.pp, peer=1 - mesh.rank),
    }
    for name, (number, size) in (QUICK if job.quick else CASES).items():
        channels['hpcomm, schema="frozen"'] = hpcomm.Channel(mesh.pp, peer=1 - mesh.rank, schema="frozen")
        for both in (False, True):
            if job.in_time(f"channel: {name}"):
                one_case(job, mesh, channels, name, number, size, both=both)
    mesh.close()


def one_case(
    job: Job, mesh: hpcomm.Mesh, channels: dict[str, hpcomm.Channel], name: str, number: int, size: int, *, both: bool
) -> None:
    mine = [torch.full((size // 4,), 10.0 * mesh.rank + i, device=job.device) for i in range(number)]
    rooms = [torch.zeros_like(tensor) for tensor in mine]
    sends, receives = both or mesh.rank == 0, both or mesh.rank == 1
    received: dict[str, list[torch.Tensor]] = {}

    def ours(key: str) -> None:
        work = channels[key].send(mine) if sends else None
        if receives:
            received[key] = channels[key].recv()
        if work is not None:
            work.wait()

    def stock() -> None:
        operations = [dist.P2POp(dist.isend, tensor, 1 - mesh.rank) for tensor in mine] if sends else []
        operations += [dist.P2POp(dist.irecv, room, 1 - mesh.rank) for room in rooms] if receives else []
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        received["batch_isend_irecv"] = rooms

    variants: dict[str, Step] = {key: (lambda key=key: ours(key)) for key in channels}
    variants["batch_isend_irecv"] = stock

    def check() -> None:
        if not receives:
            return
        for room in rooms:
            room.fill_(-1.0)
        for key, step in variants.items():
            step()
            for i, tensor in enumerate(received[key]):
                if not bool((tensor == 10.0 * (1 - mesh.rank) + i).all()):
                    raise AssertionError(f"{key}: tensor {i} of {name} is {tensor[:4].tolist()}")

    def take_part() -> None:
        for step in variants.values():
            step()

    (check if receives else take_part)()
    samples = measure(job, variants, block=0.05, most=50)
    received.clear()
    (check if receives else take_part)()
    received.clear()
    total = number * size
    columns = {key: f"{total / sorted(times)[len(times) // 2] / 1e9:.2f} GB/s" for key, times in samples.items()}
    case = f"{name}, {'both ways' if both else 'one way'}"
    job.report.row(case, samples, columns=columns, bytes=total)
    for key in channels:
        times = ratio(samples, "batch_isend_irecv", key)
        wanted = "not slower than batch_isend_irecv"
        job.report.target(f"{case}: {key}", wanted, f"{times:.2f}x as fast", job.judged(times >= 1.0))
