"""How long is a data-parallel step, against stock DDP on NCCL with each of its faster options?

On one rank also against the module without a wrapper. "share under compute" is the part of the reductions' time in
which other kernels run, from the profiler's timeline of one step; nearly all of it can be only where the backward keeps
the GPU busy for longer than the reductions take; with two ranks on one GPU the reductions' kernels
wait for the other process to get its turn, and that waiting counts. The bf16 hook halves what travels and rounds what
it sums: it is listed, and not what hpcomm is judged against.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import hpcomm
from benchmarks.gpu.harness import Job, Step, fastest, measure, peak_bytes, ratio
from benchmarks.gpu.trace import Interval, compute_of, launches, record, share_under_compute

# layers, width, batch
MODELS = {  # the one that takes longest last: where two ranks share a GPU, half a gigabyte travels for half a second
    "200 x Linear(128), batch 64": (200, 128, 64),
    "24 x Linear(1024), batch 1024": (24, 1024, 1024),
    # Its backward takes several times as long as its reductions, and its last layer's is a small part of these.
    "24 x Linear(2048), batch 2048": (24, 2048, 2048),
    "8 x Linear(4096), batch 512": (8, 4096, 512),
}
QUICK = {"3 x Linear(16), batch 4": (3, 16, 4)}

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", bucket views": {"gradient_as_bucket_view": True},
    ", bucket views, static graph": {"gradient_as_bucket_view": True, "static_graph": True},
    ", batched grad copy": {"batched_grad_copy": True},  # from torch 2.13
}


def build(layers: int, width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        module = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
    for parameter in module.parameters():
        if parameter.dim() == 2:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")  # torch's own vanishes over 200 layers
    return module


def run(job: Job) -> None:
    mesh = hpcomm.init(dp=job.ranks, device=job.device, timeout=60.0)
    for name, (layers, width, batch) in (QUICK if job.quick else MODELS).items():
        if job.in_time(f"ddp: {name}"):
            one_model(job, mesh, name, layers, width, batch)
            if job.on_gpu:
                torch.cuda.empty_cache()
    mesh.close()


def wrapped(job: Job, mesh: hpcomm.Mesh, layers: int, width: int) -> dict[str, nn.Module]:
    """Every variant, by name."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    modules: dict[str, nn.Module] = {"local": build(layers, width, job.device)}
    for suffix, options in OPTIONS.items():
        if not set(options) <= set(known):
            continue
        modules[f"stock{suffix}"] = DistributedDataParallel(
            build(layers, width, job.device), process_group=mesh.group("dp"), **options
        )
        modules[f"hpcomm{suffix}"] = hpcomm.DistributedDataParallel(
            build(layers, width, job.device), mesh=mesh, **options
        )
    bf16 = DistributedDataParallel(build(layers, width, job.device), process_group=mesh.group("dp"))
    try:
        bf16.register_comm_hook(mesh.group("dp"), default_hooks.bf16_compress_hook)
        modules["stock, bf16 hook"] = bf16
    except TypeError as error:  # torch: "required CUDA 11+ and NCCL 2.10+"
        job.report.note(f"no bf16 hook: {error}")
    return modules


def one_model(job: Job, mesh: hpcomm.Mesh, name: str, layers: int, width: int, batch: int) -> None:
    modules = wrapped(job, mesh, layers, width)
    torch.manual_seed(1 + mesh.rank)
    x = torch.randn(batch, width, device=job.device)

    def step(module: nn.Module) -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    for module in modules.values():
        step(module)  # connects, and buckets are rebuilt after the first
    job.synchronize()
    begun = time.monotonic()
    for module in modules.values():
        for _ in range(2):
            step(module)
    require_equal_gradients(modules)
    # The fewest steps that measure() takes: five, and three in each round. Better no figure than the end of all.
    due = (time.monotonic() - begun) / 2 * (5 + 3 * job.rounds)
    if job.slowest(time.monotonic() - job.started + due) > job.seconds:
        job.report.note(f"ddp: {name} was left out: it would take {due:.0f} s more")
        return
    variants: dict[str, Step] = {key: (lambda module=module: step(module)) for key, module in modules.items()}
    samples = measure(job, variants, block=0.1, most=50)
    require_equal_gradients(modules)
    ours = fastest(samples, [key for key in samples if key.startswith("hpcomm")])
    stock = fastest(samples, [key for key in samples if key.startswith("stock") and "bf16" not in key])
    events = {key: record(job, variants[key]) for key in (ours, stock)}
    shares = {key: share_under_compute(found) for key, found in events.items()}
    columns = {key: f"{100 * share:.0f} % of the reductions under compute" for key, share in shares.items()
               if share is not None}  # fmt: skip
    on_gpu: dict[str, float | None] = {}
    if job.shares_device:
        # A kernel of one rank's model keeps the other's from running: of two ranks each computes half of the time.
        on_gpu = {key: share_under_compute(found, of_all_ranks(compute_of(found))) for key, found in events.items()}
        columns |= {key: f"{text}, {100 * (on_gpu[key] or 0):.0f} % under any rank's" for key, text in columns.items()}
    job.report.row(f"{name}, {job.ranks} rank(s)", samples, columns=columns, shares_under_compute=shares,
                   shares_under_compute_of_any_rank=on_gpu,
                   launches={key: launches(found) for key, found in events.items()},
                   best={"hpcomm": ours, "stock": stock}, peak_bytes=peak_bytes(job, variants))  # fmt: skip
    if job.ranks == 1:
        times = ratio(samples, ours, "local")
        got = f"{100 * (times - 1):+.1f} % ({ours})"
        job.report.target(name, "one rank: within 2 % of no wrapper", got, job.judged(times <= 1.02))
        return
    times = ratio(samples, ours, stock)
    got = f"{times:.3f} of its time ({ours} / {stock})"
    job.report.target(name, "not slower than stock DDP at its best", got, job.judged(times <= 1.0))
    share = shares[ours]
    got = "no reduction in the timeline" if share is None else f"{100 * share:.0f} %"
    met = None if share is None else job.judged(share > 0.9)
    job.report.target(name, "> 90 % of the reductions' time under compute", got, met)


def of_all_ranks(intervals: list[Interval]) -> list[Interval]:
    """Everybody's."""
    theirs: list[list[Interval]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(theirs, intervals)
    return [interval for each in theirs for interval in each]


def require_equal_gradients(modules: dict[str, nn.Module]) -> None:
    """All variants agree with stock DDP; the bf16 hook as far as bfloat16 can. The local one has its own shard."""
    reference = [p.grad for p in modules["stock"].parameters()]
    for name, module in modules.items():
        if name == "local":
            continue
        loose = "bf16" in name
        for param, expected in zip(module.parameters(), reference, strict=True):
            assert param.grad is not None
            assert expected is not None
            scale = float(expected.abs().max())
            if not 1e-30 < scale < 1e30:
                raise AssertionError(f"a gradient of {scale:.1e}: nothing to compare")
            torch.testing.assert_close(
                param.grad, expected, rtol=0.05 if loose else 1e-3, atol=(0.02 if loose else 1e-4) * scale,
                msg=lambda text, name=name: f"{name} and stock DDP differ: {text}",
            )  # fmt: skip
