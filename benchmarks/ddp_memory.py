"""Peak memory of a training step by variant, each in processes of its own.

Counted is what the kernel says at the process's peak (VmHWM), less what the process had before it made the module. That
counts a page which ranks share in each of them; "peak" counts it once, as a part for each (Pss): the sum over the ranks
is what the job takes of the machine. "process" is the sum as ps and top show it, "shared" what is counted so in it: a
rank's own buckets and what it has touched of its peers'.

Freed memory goes back to the kernel at once (MALLOC_MMAP_THRESHOLD_): what glibc keeps of it between gradients differs
from run to run by more than all variants do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.ddp_variants import Model, step_of, variants
from benchmarks.launch import run_ranks

if TYPE_CHECKING:
    import hpcomm

_NAMES = (
    "compute only",
    "stock",
    "stock, bucket views",
    "stock, batched copies",
    "stock, fp16 hook",
    "hpcomm",
    "hpcomm, torch's reducer",
    "hpcomm, bfloat16",
)


def peak_memory(ranks: int, models: Mapping[str, Model], arguments: Sequence[str], deadline: float) -> None:
    """Runs a job per variant and model, one after the other; rank 0 of each prints a line."""
    for model in models:
        print(f"\n{model}\n{'variant':<34} {'peak MiB':>9} {'process MiB':>12} {'shared MiB':>11}", flush=True)
        for name in _NAMES:
            child = ["-m", "benchmarks.ddp", *arguments, "--models", model, "--variant", name]
            end = min(deadline, time.time() + 120)
            run_ranks(ranks, child, mpiexec=None, deadline=end, extra={"MALLOC_MMAP_THRESHOLD_": str(128 << 10)})


def measure_here(mesh: hpcomm.Mesh, models: Mapping[str, Model], variant: str) -> None:
    """In a rank: three steps of one variant."""
    (model,) = models.values()
    wrap = variants(mesh).get(variant)
    if wrap is None:
        return
    x = model.batch()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
    module = wrap(model.build())
    step = step_of(module, x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        step()
        optimizer.step()
    mesh.barrier()  # all still have their memory
    process, shared = _status("VmHWM") - before, _status("RssShmem")
    peak = process - shared + _status("Pss_Shmem", "smaps_rollup")
    mesh.barrier()
    if mesh.rank == 0:
        print(f"{variant:<34} {peak:>9.1f} {process:>12.1f} {shared:>11.1f}", flush=True)


def _status(field: str, file: str = "status") -> float:
    """In MiB."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) / 1024
    raise RuntimeError(f"{sys.platform}: /proc/self/{file} has no {field}")
