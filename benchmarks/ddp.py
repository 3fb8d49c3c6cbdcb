"""How long is a data-parallel step: hpcomm.DistributedDataParallel against stock DDP on the same gloo?

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ddp

Stock DDP runs with its options that matter on a CPU. Gradients are compared before timing. "compute only" is the same
module without any wrapper.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcomm
from benchmarks.harness import environment, measure, save, table

MODELS = {
    "8 x Linear(1024), batch 32": (8, 1024, 32),
    "4 x Linear(2048), batch 8": (4, 2048, 8),
    "200 x Linear(64), batch 16": (200, 64, 16),
}


def build(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the samples here")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    mesh = hpcomm.init()
    if mesh.rank == 0:
        for key, value in environment(mesh).items():
            print(f"{key:<18} {value}")
    results = {}
    for name, (layers, width, batch) in MODELS.items():
        wrapped = {
            "stock DDP": DistributedDataParallel(build(layers, width)),
            "stock DDP, bucket views": DistributedDataParallel(build(layers, width), gradient_as_bucket_view=True),
            "hpcomm": hpcomm.DistributedDataParallel(build(layers, width), mesh=mesh),
            "hpcomm, bucket views": hpcomm.DistributedDataParallel(
                build(layers, width), mesh=mesh, gradient_as_bucket_view=True
            ),
            "compute only": build(layers, width),
        }
        torch.manual_seed(1 + mesh.rank)
        x = torch.randn(batch, width)

        def step(module: nn.Module, x: torch.Tensor = x) -> None:
            module.zero_grad()
            module(x).square().mean().backward()

        for module in wrapped.values():
            step(module)
        for ours, theirs in zip(wrapped["hpcomm"].parameters(), wrapped["stock DDP"].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        variants = {key: (lambda module=module: step(module)) for key, module in wrapped.items()}
        results[name] = measure(mesh, variants, rounds=arguments.rounds, warmup=5)
        if mesh.rank == 0:
            print(f"\n{name}\n{table(results[name], 'stock DDP, bucket views')}", flush=True)
    save(arguments.json, "ddp", mesh, {"arguments": vars(arguments), "seconds": results})
    mesh.close()


if __name__ == "__main__":
    main()
