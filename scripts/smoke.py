"""Tries the hpcomm that is installed, not the source tree: alone, or on every rank of a torchrun job.

    python -I scripts/smoke.py
    torchrun --standalone --nproc-per-node 2 scripts/smoke.py

Everything runs on CPU tensors; of the CUDA half it checks that it is there when the build says so, and what it answers
on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import os
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import hpcomm  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = 60.0  # seconds for one operation

# What all_reduce gives when rank r brings 10**r: a missing, doubled or swapped contribution shows.
TOTAL = float("1" * WORLD)


def say(text: str) -> None:
    """Prints on the first rank."""
    if RANK == 0:
        print(f"smoke: {text}", flush=True)


def expect(holds: bool, what: str) -> None:
    """`assert` that no option switches off."""
    if not holds:
        raise SystemExit(f"smoke: rank {RANK}: {what}")


def build(want_cuda: str) -> None:
    """The module loads, and is what its build says and what the caller wants."""
    from hpcomm import _build

    native = hpcomm._C
    expect("site-packages" in str(native.__file__), f"this is no installed copy: {native.__file__}")
    expect(native.built_with_cuda() == _build.USE_CUDA, f"built_with_cuda() is {native.built_with_cuda()}")
    expect(want_cuda in {"", str(int(_build.USE_CUDA))}, f"USE_CUDA is {_build.USE_CUDA}, not {want_cuda}")
    say(f"CUDA half: {'yes' if _build.USE_CUDA else 'no'}")
    cuda = f"CUDA {_build.CUDA_VERSION} for {_build.CUDA_ARCHITECTURES}" if _build.USE_CUDA else "without CUDA"
    say(
        f"hpcomm {hpcomm.__version__} ({cuda}), built for torch {_build.TORCH_VERSION}, under torch {torch.__version__}"
    )


def cuda_is_refused() -> None:
    """Without a GPU, or in a build without CUDA, asking for CUDA says what is missing."""
    if torch.cuda.is_available() and hpcomm._C.built_with_cuda():
        return
    try:
        hpcomm._C.CommunicatorConfig(
            name="smoke",
            ranks=[0],
            rank=0,
            lane="smoke",
            control=hpcomm._C.solo_control(),
            timeout=1.0,
            device="cuda:0",
        )
    except hpcomm.InvalidArgument as error:
        expect("torch sees no GPU" in str(error) or "USE_CUDA=1" in str(error), f"what to do is not in: {error}")
        say(f"a communicator on cuda:0 is refused: {error}")
    else:
        expect(False, "a communicator on cuda:0 was made without a GPU")


def model() -> torch.nn.Sequential:
    """The same on every rank; enough parameters that a bucket is packed from several."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The shard of a rank: inputs [4, 8] and classes [4]."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def step(module: torch.nn.Module, rank: int) -> list[torch.Tensor]:
    """Gradients of one step on the shard of ``rank``."""
    x, y = batch(rank)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def averages() -> list[torch.Tensor]:
    """The gradients that data parallelism must give, computed here alone."""
    shards = [step(model(), rank) for rank in range(WORLD)]
    return [torch.stack(parts).mean(0) for parts in zip(*shards, strict=True)]


def same(got: list[torch.Tensor], what: str) -> None:
    """Compares with :func:`averages`."""
    wanted = averages()
    expect(len(got) == len(wanted) > 0, f"{what}: {len(got)} gradients, expected {len(wanted)}")
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text: f"{what}: {text}")
    say(f"{what}: gradients as computed by one process")


def on_a_mesh() -> None:
    """hpcomm.init(): all_reduce, data parallelism, a pipeline."""
    with hpcomm.init(timeout=TIMEOUT) as mesh:
        tensor = torch.full((1000,), 10.0**RANK)
        mesh.world.all_reduce(tensor)
        expect(bool((tensor == TOTAL).all()), f"all_reduce gave {tensor[0].item()}, expected {TOTAL}")
        say(f"all_reduce on a mesh over {mesh.world.transport}: {tensor[0].item():.0f}")
        same(step(hpcomm.DistributedDataParallel(model(), mesh=mesh), RANK), "hpcomm.DistributedDataParallel")
    with hpcomm.init(pp=WORLD, timeout=TIMEOUT) as mesh:
        pipe = hpcomm.Pipeline(
            model(), mesh=mesh, num_microbatches=2, loss_fn=torch.nn.functional.cross_entropy, schedule="1f1b"
        )
        x, y = batch(0)
        compared = hpcomm.verify(pipe, model(), x, target=y)
        expect(compared.compared == 6, f"verify() compared {compared.compared} parameters, expected 6")
        say(f"Pipeline of {WORLD}: largest relative difference {compared.max_relative_difference:.1e}")


def under_torch() -> None:
    """init_process_group("hpcomm"): all_reduce and stock DistributedDataParallel."""
    if WORLD > 1:
        dist.init_process_group("hpcomm")
    else:
        dist.init_process_group("hpcomm", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.full((1000,), 10.0**RANK)
    dist.all_reduce(tensor)
    expect(bool((tensor == TOTAL).all()), f"dist.all_reduce gave {tensor[0].item()}, expected {TOTAL}")
    say(f"all_reduce of torch.distributed over hpcomm: {tensor[0].item():.0f}")
    same(step(torch.nn.parallel.DistributedDataParallel(model()), RANK), "DistributedDataParallel on backend hpcomm")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Everything, in this order."""
    parser = argparse.ArgumentParser(description="Tries the hpcomm that is installed.")
    parser.add_argument("--cuda", default="", choices=["", "0", "1"], help="what the build must be")
    torch.set_num_threads(1)
    build(parser.parse_args().cuda)
    cuda_is_refused()
    on_a_mesh()
    under_torch()
    say("passed")


main()
