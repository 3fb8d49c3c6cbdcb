"""How many kernels a step launches: one pack, one reduction, one unpack per bucket, and nothing else that is ours."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gpu_tools import mesh_on, one_and_two, run, traced
from torch import nn

import hpcomm

NCCL = "ncclDevKernel"


def kind(kernel: str) -> str:
    """Torch has kernels called copy_kernel as well: ours are those of our namespace, demangled or not."""
    if "hpcomm" in kernel:
        return "loss" if "finish_loss_kernel" in kernel else "pack"
    return "nccl" if NCCL in kernel else "other"


def kinds(trace: dict[str, list[str]]) -> dict[str, int]:
    found = Counter(map(kind, trace.get("kernel", [])))
    return {name: found[name] for name in ("pack", "loss", "nccl", "other")}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])  # 24 parameters of 17 KB a pair


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def of_a_pipeline_step(_: str) -> dict[str, int]:
    with mesh_on("cuda", dp=-1) as mesh:
        pipe = hpcomm.Pipeline(model(), mesh=mesh, num_microbatches=2, loss_fn=mse, schema="frozen", bucket_cap_mb=0.06)
        x = torch.randn(8, 64, device="cuda")

        def step() -> None:
            pipe.zero_grad()
            pipe.step(x, target=x)

        for _ in range(3):
            step()
        mesh.barrier()
        trace = traced("cuda", step)
        mesh.barrier()
        buckets = pipe.bucket_plan.buckets
        assert min(map(len, buckets)) > 1, "a bucket of one gradient is reduced where it lies"
        return {
            "buckets": len(buckets),
            **kinds(trace),
            "copies to the host": sum("DtoH" in name for name in trace.get("gpu_memcpy", [])),
        }


@pytest.mark.cuda
@one_and_two
def test_of_a_pipeline_step(world: int) -> None:
    for counts in run("cuda", world, of_a_pipeline_step):
        assert counts["buckets"] >= 4
        # On one rank a bucket is scaled where it lies; else packed and unpacked.
        assert counts["pack"] == counts["buckets"] * (1 if world == 1 else 2), counts
        assert counts["loss"] == 1, counts
        assert counts["copies to the host"] == 0, counts
        if world > 1:  # the buckets', the loss's, and that of which gradients there are
            assert counts["nccl"] == counts["buckets"] + 2, counts


def of_a_ddp_step(_: str) -> tuple[dict[str, int], dict[str, int]]:
    """Kernels of hpcomm's step, and of stock DDP's."""
    # Four layers fill a bucket to the byte: hpcomm closes one before it would exceed the limit, torch once it has it.
    megabytes = 4 * (64 * 64 + 64) * 4 / 2**20
    with mesh_on("cuda", dp=-1) as mesh:
        x = torch.randn(8, 64, device="cuda")
        counts = []
        for kind in ("hpcomm", "stock"):
            if kind == "hpcomm":
                wrapped = hpcomm.DistributedDataParallel(model().cuda(), mesh=mesh, bucket_cap_mb=megabytes)
            else:
                wrapped = nn.parallel.DistributedDataParallel(
                    model().cuda(), process_group=mesh.group("dp"), bucket_cap_mb=megabytes
                )

            def step(wrapped: nn.Module = wrapped) -> None:
                wrapped.zero_grad()
                mse(wrapped(x), x).backward()

            for _ in range(13):  # past the first ten, in which torch's DDP times itself
                step()
            mesh.barrier()
            trace = traced("cuda", step)
            mesh.barrier()
            counts.append(kinds(trace))
        return counts[0], counts[1]


@pytest.mark.cuda
@pytest.mark.multirank
def test_of_a_ddp_step() -> None:
    for ours, stock in run("cuda", 2, of_a_ddp_step):
        assert ours["nccl"] == stock["nccl"], (ours, stock)  # one per bucket
        assert sum(ours.values()) <= sum(stock.values()), (ours, stock)


def test_kernels_are_told_apart() -> None:
    names = [
        "void hpcomm::(anonymous namespace)::copy_kernel<1022u>(hpcomm::TaskTable<1022u>)",
        "hpcomm::(anonymous namespace)::finish_loss_kernel(double*, double*, bool)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>",
    ]
    assert kinds({"kernel": names}) == {"pack": 1, "loss": 1, "nccl": 1, "other": 1}
