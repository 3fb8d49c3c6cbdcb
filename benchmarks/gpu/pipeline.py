"""How long is a training step of two stages, against torch.distributed.pipelining's 1F1B on the same NCCL?

Same model, cut, microbatches and schedule. "compute only" is this rank's forwards and backwards without any message.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hpcomm
from benchmarks.gpu.harness import Job, Step, fastest, measure, peak_bytes, ratio

# layers, width, batch, microbatches
CASES = {
    "8 x Linear(2048) + GELU, batch 2048, 8 microbatches": (8, 2048, 2048, 8),
    "8 x Linear(512) + GELU, batch 256, 8 microbatches": (8, 512, 256, 8),
}
QUICK = {"4 x Linear(16) + GELU, batch 8, 4 microbatches": (4, 16, 8, 4)}


def build(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])


def run(job: Job) -> None:
    mesh = hpcomm.init(pp=job.ranks, device=job.device, timeout=60.0)
    for name, (layers, width, batch, microbatches) in (QUICK if job.quick else CASES).items():
        if job.in_time(f"pipeline: {name}"):
            one_case(job, mesh, name, layers, width, batch, microbatches)
    mesh.close()


def one_case(job: Job, mesh: hpcomm.Mesh, name: str, layers: int, width: int, batch: int, microbatches: int) -> None:
    def pipeline(schema: str) -> hpcomm.Pipeline:
        return hpcomm.Pipeline(build(layers, width), mesh=mesh, num_microbatches=microbatches,
                               loss_fn=nn.functional.mse_loss, schema=schema)  # fmt: skip

    pipes = {"hpcomm.Pipeline": pipeline("per_message"), 'hpcomm.Pipeline, schema="frozen"': pipeline("frozen")}
    stage, alone = (pipeline("per_message").module for _ in range(2))  # the same cut
    wrapped = PipelineStage(stage, mesh.pp.rank, mesh.pp.size, job.device, group=mesh.group("pp"))
    schedule = Schedule1F1B(wrapped, microbatches, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    x, y = torch.randn(2, batch, width).to(job.device).unbind(0)
    parts = [part.clone().requires_grad_(mesh.pp.rank > 0) for part in x.chunk(microbatches)]

    def stock() -> None:
        stage.zero_grad()
        if mesh.pp.size == 1:
            schedule.step(x, target=y)
        elif mesh.pp.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)

    def ours(pipe: hpcomm.Pipeline) -> None:
        pipe.zero_grad()
        pipe.step(x, target=y)

    def compute_only() -> None:
        alone.zero_grad()
        for part in parts:
            alone(part).sum().backward()

    variants: dict[str, Step] = {key: (lambda pipe=pipe: ours(pipe)) for key, pipe in pipes.items()}
    variants["torch pipelining, 1F1B"] = stock
    variants["compute only"] = compute_only
    for key in [*pipes, "torch pipelining, 1F1B"]:
        variants[key]()
    require_equal_gradients(pipes, stage)
    samples = measure(job, variants, block=0.1, most=30)
    require_equal_gradients(pipes, stage)
    peaks = peak_bytes(job, variants)
    job.report.row(f"{name}, {mesh.pp.size} stage(s)", samples, peak_bytes=peaks)
    best = fastest(samples, list(pipes))
    times = ratio(samples, best, "torch pipelining, 1F1B")
    wanted = "not slower than torch's 1F1B"
    job.report.target(name, wanted, f"{times:.3f} of its time ({best})", job.judged(times <= 1.0))


def require_equal_gradients(pipes: dict[str, hpcomm.Pipeline], stage: nn.Module) -> None:
    for name, pipe in pipes.items():
        for mine, theirs in zip(pipe.parameters(), stage.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            scale = float(theirs.grad.abs().max()) or 1.0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale,
                                       msg=lambda text, name=name: f"{name} and torch's differ: {text}")  # fmt: skip
