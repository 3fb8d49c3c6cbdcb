"""How long is a training step of two stages, against torch.distributed.pipelining's 1F1B on the same NCCL?

Same model, cut, microbatches and schedule. hpcomm's step leaves the loss on every rank, torch's on the last: listed is
also torch's with an all_reduce of the loss behind it. "captured" replays a step of the frozen pipeline from a CUDA
graph; it is listed, and not what hpcomm is judged by. "compute only" is this rank's forwards and backwards without any
message. What the host takes to issue a step is measured as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hpcomm
from benchmarks.gpu.harness import ISSUE, Job, Step, fastest, measure, peak_bytes, ratio
from benchmarks.harness import loss_alone

# layers, width, batch, microbatches
CASES = {
    "8 x Linear(2048) + GELU, batch 2048, 8 microbatches": (8, 2048, 2048, 8),
    "8 x Linear(512) + GELU, batch 256, 8 microbatches": (8, 512, 256, 8),
}
STOCK = "torch pipelining, 1F1B"
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
    targets = y.chunk(microbatches)

    plain = loss_alone(schedule)

    def stock() -> list[torch.Tensor]:
        stage.zero_grad()
        losses: list[torch.Tensor] = []
        if mesh.pp.size == 1:
            schedule.step(x, target=y, losses=losses, **plain)
        elif mesh.pp.rank == 0:
            schedule.step(x, **plain)
        else:
            schedule.step(target=y, losses=losses, **plain)
        return losses

    def stock_and_loss() -> None:
        losses = stock()
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=job.device)
        dist.all_reduce(loss, group=mesh.group("pp"))

    def ours(pipe: hpcomm.Pipeline) -> None:
        pipe.zero_grad()
        pipe.step(x, target=y)

    def compute_only() -> None:
        alone.zero_grad()
        for part, target in zip(parts, targets, strict=True):
            output = alone(part)
            if mesh.pp.rank == mesh.pp.size - 1:
                nn.functional.mse_loss(output, target).backward()
            else:
                output.backward(target)  # as wide as what would come back

    variants: dict[str, Step] = {key: (lambda pipe=pipe: ours(pipe)) for key, pipe in pipes.items()}
    variants[STOCK] = stock
    variants[f"{STOCK}, its loss on all ranks"] = stock_and_loss
    variants["compute only"] = compute_only
    for key in [*pipes, STOCK]:
        variants[key]()
    require_equal_gradients(pipes, stage)
    judged = list(pipes)
    graph = torch.cuda.CUDAGraph() if job.on_gpu else None
    if graph is not None:
        pipes["hpcomm.Pipeline, captured"] = capture(graph, lambda: pipeline("frozen"), ours, x, y)
        variants["hpcomm.Pipeline, captured"] = graph.replay
    samples = measure(job, variants, block=0.1, most=30)
    host = measure(job, variants, how=ISSUE, most=3)
    variants.pop("hpcomm.Pipeline, captured", None)
    if graph is not None:
        graph.reset()  # before the mesh closes; its gradients stay
    require_equal_gradients(pipes, stage)
    peaks = peak_bytes(job, variants)
    job.report.row(f"{name}, {mesh.pp.size} stage(s)", samples, peak_bytes=peaks)
    job.report.row(f"{name}, {mesh.pp.size} stage(s): the host, until it has issued a step", host)
    best = fastest(samples, judged)
    times = ratio(samples, best, STOCK)
    wanted = "not slower than torch's 1F1B"
    job.report.target(name, wanted, f"{times:.3f} of its time ({best})", job.judged(times <= 1.0))


def capture(
    graph: torch.cuda.CUDAGraph,
    make: Callable[[], hpcomm.Pipeline],
    step: Callable[[hpcomm.Pipeline], None],
    x: torch.Tensor,
    y: torch.Tensor,
) -> hpcomm.Pipeline:
    """A pipeline whose step is in ``graph`` (docs/explanation/gpu.md#cuda-graphs)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pipe = make()
        for _ in range(3):
            step(pipe)
    torch.cuda.current_stream().wait_stream(side)
    pipe.zero_grad()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        pipe.step(x, target=y)
    return pipe


def require_equal_gradients(pipes: dict[str, hpcomm.Pipeline], stage: nn.Module) -> None:
    for name, pipe in pipes.items():
        for mine, theirs in zip(pipe.parameters(), stage.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            scale = float(theirs.grad.abs().max()) or 1.0
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale,
                                       msg=lambda text, name=name: f"{name} and torch's differ: {text}")  # fmt: skip
