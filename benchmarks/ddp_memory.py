"""Peak memory of a training step by variant, each in processes of its own.

Counted is what the kernel says at the process's peak (VmHWM), less what the process had before it made the module. By
then it has run the module alone, and a small one in the same wrapper: code that Python and the libraries load at first
use (some 40 MiB) is not in it. A figure is the median of three jobs.

VmHWM counts a page which ranks share in each of them; "peak" counts it once, as a part for each (Pss): the sum over the
ranks is what the job takes of the machine. "process" is the sum as ps and top show it, "shared" what is counted so in
it: a rank's own buckets and what it has touched of its peers'.

Freed memory goes back to the kernel at once (MALLOC_MMAP_THRESHOLD_): what glibc keeps of it between gradients differs
from run to run by more than all variants do. Python's objects come from the same heap (PYTHONMALLOC): pools of 16 KiB
for each size of object, filled by chance, are 0.3 MiB apart where a few kilobytes of objects are.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.ddp_variants import Model, step_of, variants
from benchmarks.harness import environment
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
_JOBS = 3
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "PYTHONMALLOC": "malloc"}


def peak_memory(ranks: int, models: Mapping[str, Model], arguments: Sequence[str], deadline: float) -> dict[str, Any]:
    """MiB by model, variant and column, and the environment. Jobs of each variant, one after the other."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    ran_on: dict[str, Any] = {}
    for model in models:
        print(f"\n{model}\n{'variant':<34} {'peak MiB':>9} {'process MiB':>12} {'shared MiB':>11}", flush=True)
        for name in _NAMES:
            jobs = [run_variant(ranks, model, name, arguments, deadline, _MALLOC) for _ in range(_JOBS)]
            if jobs[0] is None:
                continue  # not in this version of torch
            ran_on = jobs[0].pop("environment")
            figures = {column: statistics.median(job[column] for job in jobs if job) for column in jobs[0]}
            results.setdefault(model, {})[name] = figures
            print(
                f"{name:<34} {figures['peak']:>9.1f} {figures['process']:>12.1f} {figures['shared']:>11.1f}", flush=True
            )
    return {"environment": ran_on, "memory": results}


def run_variant(
    ranks: int, model: str, variant: str, arguments: Sequence[str], deadline: float, extra: Mapping[str, str]
) -> dict[str, Any] | None:
    """What a job of this variant alone writes; None where this version of torch does not have it."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = ["-m", "benchmarks.ddp", *arguments, "--models", model, "--variant", variant, "--json", answer.name]
        end = min(deadline, time.time() + 120)
        run_ranks(ranks, child, mpiexec=None, deadline=end, extra=extra)
        text = answer.read()
    return json.loads(text) if text else None


def measure_here(mesh: hpcomm.Mesh, models: Mapping[str, Model], variant: str, answer: str) -> None:
    """In a rank: three steps of one variant; rank 0 writes its figures into the file ``answer``."""
    (model,) = models.values()
    wrap = variants(mesh).get(variant)
    if wrap is None:
        return
    x = model.batch()
    _train(model.build(), x)
    _train(wrap(torch.nn.Linear(8, 8)), torch.ones(8, 8))
    gc.collect()
    before, shared_before, part_before = _memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
    module = wrap(model.build())
    _train(module, x)
    mesh.barrier()  # all still have their memory
    process, (_, shared, part) = _status("VmHWM") - before, _memory()
    shared -= shared_before
    peak = process - shared + part - part_before
    mesh.barrier()
    if mesh.rank == 0:
        seen = {"environment": environment(mesh), "peak": peak, "process": process, "shared": shared}
        Path(answer).write_text(json.dumps(seen))


def _train(module: torch.nn.Module, x: torch.Tensor) -> None:
    step = step_of(module, x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(3):
        step()
        optimizer.step()


def _memory() -> tuple[float, float, float]:
    """MiB of this process now: all; of them shared with others; the same with a shared page counted as its part."""
    return _status("VmRSS"), _status("RssShmem"), _status("Pss_Shmem", "smaps_rollup")


def _status(field: str, file: str = "status") -> float:
    """In MiB."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) / 1024
    raise RuntimeError(f"{sys.platform}: /proc/self/{file} has no {field}")
