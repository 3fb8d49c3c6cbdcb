"""Steps of one variant in processes of their own, as a user's are: how long, and how many page faults?

With malloc as glibc has it, freed gradients go back to the kernel or stay, by what lies above them in the heap; what
comes back costs a page fault for every 4 KiB. The same with malloc told to keep them. Jobs of all variants take turns,
so that a machine that slows down slows all of them; figures are medians over the jobs of their medians.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.ddp_memory import run_variant
from benchmarks.ddp_variants import COMPUTE, Model, require_averages, step_of, variants
from benchmarks.harness import environment

if TYPE_CHECKING:
    import hpcomm

MALLOCS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "keeps freed memory": {
        "MALLOC_TRIM_THRESHOLD_": "2000000000",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
    },
}
_NAMES = (COMPUTE, "stock", "stock, bucket views", "hpcomm")
_JOBS, _WARM_UP = 3, 10


def steps_alone(ranks: int, models: Mapping[str, Model], arguments: Sequence[str], deadline: float) -> dict[str, Any]:
    """Seconds and page faults of a step by model, malloc and variant, a figure of each job; and the environment."""
    results: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    ran_on: dict[str, Any] = {}
    for model in models:
        by_malloc = results.setdefault(model, {})
        for _ in range(_JOBS):
            for malloc, extra in MALLOCS.items():
                for name in _NAMES:
                    job = run_variant(ranks, model, name, arguments, deadline, extra)
                    assert job is not None, name
                    ran_on = job["environment"]
                    figures = by_malloc.setdefault(malloc, {}).setdefault(name, {"seconds": [], "faults": []})
                    figures["seconds"].append(job["seconds"])
                    figures["faults"].append(job["faults"])
        _print(model, by_malloc)
    return {"environment": ran_on, "alone": results}


def _print(model: str, by_malloc: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> None:
    print(f"\n{model}\n{'malloc':<20} {'variant':<24} {'ms a step':>10} {'page faults':>12}")
    for malloc, by_name in by_malloc.items():
        for name, figures in by_name.items():
            seconds, faults = (statistics.median(figures[column]) for column in ("seconds", "faults"))
            print(f"{malloc:<20} {name:<24} {seconds * 1e3:>10.2f} {faults:>12.0f}", flush=True)


def time_here(mesh: hpcomm.Mesh, models: Mapping[str, Model], variant: str, rounds: int, answer: str) -> None:
    """In a rank: ``rounds`` steps of one variant; rank 0 writes their medians into the file ``answer``."""
    (model,) = models.values()
    module, x = variants(mesh)[variant](model.build()), model.batch()
    step = step_of(module, x)
    for _ in range(_WARM_UP):
        step()
    seconds, faults = [], []
    for _ in range(rounds):
        mesh.barrier()
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        step()
        readings = torch.tensor([time.perf_counter(), -start], dtype=torch.float64)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        mesh.world.all_reduce(readings, "max")
        seconds.append(readings.sum().item())
    require_averages(mesh, {variant: module}, x)  # behind the timing: what it makes would be in the heap
    if mesh.rank == 0:
        seen = {
            "environment": environment(mesh),
            "seconds": statistics.median(seconds),
            "faults": statistics.median(faults),
        }
        Path(answer).write_text(json.dumps(seen))
