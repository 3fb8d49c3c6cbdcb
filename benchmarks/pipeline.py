"""How long is a training step of dp x pp: hpcomm.Pipeline against torch.distributed.pipelining + stock DDP?

    torchrun --standalone --nproc-per-node 4 -m benchmarks.pipeline --dp 2

Same model, shard, microbatches, schedule (1F1B), threads and gloo under both; SGD is left out. Before timing, the
gradients of both are compared. "compute only" runs this rank's forwards and backwards without any communication: the
floor that both stand on.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import hpcomm
from benchmarks.harness import environment, measure, save, table


def build(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])


def stock(mesh: hpcomm.Mesh, stage: nn.Module, microbatches: int) -> tuple[Schedule1F1B, nn.Module]:
    """The way PyTorch's documentation composes the two."""
    module = stage
    if mesh.dp.size > 1:
        module = DistributedDataParallel(stage, process_group=mesh.group("dp"), gradient_as_bucket_view=True)
    wrapped = PipelineStage(module, mesh.pp.rank, mesh.pp.size, torch.device("cpu"), group=mesh.group("pp"))
    return Schedule1F1B(wrapped, microbatches, loss_fn=nn.functional.mse_loss), stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="samples per replica")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the samples here")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    mesh = hpcomm.init(dp=arguments.dp, pp=-1)
    options = {"mesh": mesh, "num_microbatches": arguments.microbatches, "loss_fn": nn.functional.mse_loss}
    pipe = hpcomm.Pipeline(build(arguments.width, arguments.layers), **options)
    frozen = hpcomm.Pipeline(build(arguments.width, arguments.layers), schema="frozen", **options)
    # The same cut: Pipeline's own, so that only the communication differs.
    theirs = hpcomm.Pipeline(build(arguments.width, arguments.layers), **options).module
    schedule, stage = stock(mesh, theirs, arguments.microbatches)
    alone = hpcomm.Pipeline(build(arguments.width, arguments.layers), **options).module

    torch.manual_seed(1 + mesh.dp.rank)
    x, y = torch.randn(2, arguments.batch, arguments.width).unbind(0)
    inputs = [part.clone().requires_grad_(mesh.pp.rank > 0) for part in x.chunk(arguments.microbatches)]

    def run_stock() -> None:
        stage.zero_grad()
        if mesh.pp.size == 1:
            schedule.step(x, target=y)
        elif mesh.pp.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y if mesh.pp.rank == mesh.pp.size - 1 else None)

    def run_hpcomm(pipeline: hpcomm.Pipeline) -> None:
        pipeline.zero_grad()
        pipeline.step(x, target=y)

    def compute_only() -> None:
        alone.zero_grad()
        for part in inputs:
            alone(part).sum().backward()

    run_stock()
    run_hpcomm(pipe)
    for ours, other in zip(pipe.parameters(), stage.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-6)

    variants = {
        "torch pipelining + DDP": run_stock,
        "hpcomm.Pipeline": lambda: run_hpcomm(pipe),
        'hpcomm.Pipeline schema="frozen"': lambda: run_hpcomm(frozen),
        "compute only": compute_only,
    }
    samples = measure(mesh, variants, rounds=arguments.rounds, warmup=5)
    if mesh.rank == 0:
        for key, value in environment(mesh).items():
            print(f"{key:<18} {value}")
        print(f"{'mesh':<18} dp={mesh.dp.size} x pp={mesh.pp.size}")
        print(f"{'model':<18} {arguments.layers} x Linear({arguments.width})+GELU, batch {arguments.batch} per replica")
        print(f"{'microbatches':<18} {arguments.microbatches}\n")
        print(table(samples, "torch pipelining + DDP"))
    save(arguments.json, "pipeline", mesh, {"arguments": vars(arguments), "seconds": samples})
    mesh.close()


if __name__ == "__main__":
    main()
