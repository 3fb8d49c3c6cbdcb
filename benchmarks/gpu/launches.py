"""How many kernels does a step launch, and how often does the host call the runtime? Counted by the profiler.

Counts do not depend on how busy the machine is. hpcomm's own kernels are packs, unpacks and scalings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcomm
from benchmarks.gpu.trace import launches, record
from hpcomm import _C

if TYPE_CHECKING:
    from benchmarks.gpu.harness import Job


def run(job: Job) -> None:
    mesh = hpcomm.init(dp=job.ranks, device=job.device, timeout=60.0)
    steps: dict[str, Callable[[], object]] = {}
    width = 16 if job.quick else 256
    x = torch.randn(32, width, device=job.device)

    def train(module: nn.Module) -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    local = build(width, job.device)
    stock = DistributedDataParallel(build(width, job.device), process_group=mesh.group("dp"), bucket_cap_mb=1)
    ours = hpcomm.DistributedDataParallel(build(width, job.device), mesh=mesh, bucket_cap_mb=1)
    steps["a step without a wrapper"] = lambda: train(local)
    steps["a step of stock DDP"] = lambda: train(stock)
    steps["a step of hpcomm DDP"] = lambda: train(ours)

    pipe = hpcomm.Pipeline(
        build(width, torch.device("cpu")),
        mesh=mesh,
        num_microbatches=2,
        loss_fn=nn.functional.mse_loss,
        schema="frozen",
        bucket_cap_mb=1.0,
    )

    def pipeline_step() -> None:
        pipe.zero_grad()
        pipe.step(x, target=x)

    steps["a step of hpcomm.Pipeline, 2 microbatches"] = pipeline_step
    tensors = [torch.randn(1024, device=job.device) for _ in range(50 if job.quick else 1000)]
    layout = _C.Layout(tensors)
    buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=job.device)
    places = [buffer[offset : offset + 4096].view(torch.float32) for offset in layout.offsets]
    steps[f"hpcomm pack of {len(tensors)} tensors"] = lambda: _C.pack(layout, tensors, buffer)
    steps[f"torch.cat of {len(tensors)} tensors"] = lambda: torch.cat(tensors)
    steps[f"torch._foreach_copy_ of {len(tensors)} tensors"] = lambda: torch._foreach_copy_(places, tensors)

    counts = {}
    for name, step in steps.items():
        for _ in range(4):
            step()
        job.synchronize()
        counts[name] = launches(record(job, step))
        text = ", ".join(f"{number} {what}" for what, number in counts[name].items())
        job.report.note(f"{name}: {text}")
    job.report.rows.append({"case": f"counts, {job.ranks} rank(s)", "unit": "launches", "counts": counts, "peers": {}})
    buckets = len(pipe.bucket_plan.buckets)
    ours_of_a_step = counts["a step of hpcomm.Pipeline, 2 microbatches"]["of these hpcomm"]
    # On one rank a bucket is scaled where it lies. One kernel more finishes the loss.
    due = buckets * (1 if job.ranks == 1 else 2) + 1
    job.report.target(
        f"a step with {buckets} buckets, {job.ranks} rank(s)",
        f"{due} kernels of hpcomm: a pack and an unpack (one rank: a scaling) per bucket, one for the loss",
        f"{ours_of_a_step}",
        job.judged(ours_of_a_step == due),
    )
    one = counts[f"hpcomm pack of {len(tensors)} tensors"]["kernels"]
    job.report.target(f"pack of {len(tensors)} tensors", "one kernel", f"{one}", job.judged(one == 1))
    mesh.close()


def build(width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)])
