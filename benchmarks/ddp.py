"""How long is a data-parallel step: hpcomm.DistributedDataParallel against every stock variant, in turn, in one run?

    python -m benchmarks.ddp [--ranks 2] [--rounds 30] [--json ddp.json]
    python -m benchmarks.ddp --memory            peak memory of each variant, in processes of its own
    python -m benchmarks.ddp --alone             steps of each variant in processes of its own, and their page faults
    python -m benchmarks.ddp --parameters        what a wrapper costs by number of parameters
    python -m benchmarks.ddp --hooks             what one hook costs the thread of the backward
    python -m benchmarks.ddp --plot ddp.svg --from ddp.json

A step is zero_grad, forward, loss, backward. "compute only" is the same module without any wrapper. The floor is the
traffic that no reduction avoids: each gradient packed once, the whole averaged once. Communication that a step does not
hide is its time minus that of compute only, round by round. Gradients are compared before timing. With --hosts ranks
share memory only on their own host, and with --link that has a network of its own, as in benchmarks.collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hpcomm
from benchmarks.collectives import positive
from benchmarks.ddp_alone import steps_alone, time_here
from benchmarks.ddp_hooks import hook_costs
from benchmarks.ddp_memory import measure_here, peak_memory
from benchmarks.ddp_plot import draw
from benchmarks.ddp_timeline import timelines
from benchmarks.ddp_variants import (
    COMPUTE,
    MODELS,
    STOCK_ON_GLOO,
    Model,
    Vector,
    floor_of,
    require_averages,
    step_of,
    variants,
)
from benchmarks.harness import environment, keep_freed_memory, measure, save, table
from benchmarks.launch import (
    JobFailed,
    adopt_mpi_environment,
    enter_hosts,
    link_rate,
    require_hosts,
    result_file,
    run_ranks,
)

COUNTS = (10, 100, 1000, 10000)
FLOOR = "floor: pack and reduce"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ddp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="that they pretend to be on, by HPCOMM_HOST")
    parser.add_argument("--link", type=link_rate, metavar="RATE", help="between two --hosts, such as 1gbit or 200mbit")
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--models", type=part_of_a_name, help="only models whose name contains this")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of times")
    parser.add_argument("--alone", action="store_true", help="each variant in processes of its own instead")
    parser.add_argument("--parameters", action="store_true", help="overhead by number of parameters instead")
    parser.add_argument("--hooks", action="store_true", help="CPU time of a hook instead")
    parser.add_argument("--minutes", type=float, default=15, help="all ranks end then")
    parser.add_argument("--json", type=result_file, help="write the samples here")
    parser.add_argument("--plot", help="write an SVG here")
    parser.add_argument("--from", dest="source", help="draw what --json wrote, without running anything")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # a child of --memory or --alone
    arguments = parser.parse_args()
    if arguments.source:
        Path(arguments.plot or "ddp.svg").write_text(draw(json.loads(Path(arguments.source).read_text())))
        return
    if (arguments.memory or arguments.alone) and not arguments.variant:
        look = steps_alone if arguments.alone else peak_memory
        seen = look(arguments.ranks, chosen(arguments.models), sys.argv[1:], deadline(arguments))
        if arguments.json:
            document = {"question": "ddp", "arguments": vars(arguments), **seen}
            Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
        return
    require_hosts(parser, arguments.ranks, arguments.hosts, arguments.link)
    if "RANK" not in os.environ:
        call = ["-m", "benchmarks.ddp", *sys.argv[1:]]
        run_ranks(arguments.ranks, call, mpiexec=None, deadline=deadline(arguments), link=arguments.link)
    else:
        rank(arguments)


def part_of_a_name(text: str) -> str:
    if not any(text in name for name in MODELS):
        raise argparse.ArgumentTypeError(f"{text!r} is part of no name: {'; '.join(MODELS)}")
    return text


def deadline(arguments: argparse.Namespace) -> float:
    return time.time() + 60 * arguments.minutes


def chosen(part: str | None) -> dict[str, Model]:
    return {name: model for name, model in MODELS.items() if part is None or part in name}


def rank(arguments: argparse.Namespace) -> None:
    """One rank's part, also under torchrun."""
    if "HPCOMM_BENCH_DEADLINE" in os.environ:
        adopt_mpi_environment()
    enter_hosts(arguments.hosts)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    mesh = hpcomm.init()
    if arguments.variant:
        models = chosen(arguments.models)
        if arguments.alone:
            time_here(mesh, models, arguments.variant, arguments.rounds, arguments.json)
        else:
            measure_here(mesh, models, arguments.variant, arguments.json)
        mesh.close()
        return
    keep_freed_memory()
    if mesh.rank == 0:
        for key, value in environment(mesh).items():
            print(f"{key:<18} {value}")
    content: dict[str, Any] = {"arguments": vars(arguments)}
    if arguments.hooks:
        content["hooks"] = hook_costs(mesh, arguments.rounds)
    elif arguments.parameters:
        content["parameters"] = by_parameters(mesh, arguments.rounds)
    else:
        content["seconds"] = {
            name: steps(mesh, name, model, arguments.rounds) for name, model in chosen(arguments.models).items()
        }
        name, model = next(iter(chosen(arguments.models).items()))
        content["timelines"] = {name: timelines(mesh, model)}
    save(arguments.json, "ddp", mesh, content)
    if arguments.plot and mesh.rank == 0:
        Path(arguments.plot).write_text(draw({"environment": environment(mesh), **content}))
    mesh.close()


def steps(mesh: hpcomm.Mesh, name: str, model: Model, rounds: int) -> dict[str, list[float]]:
    """Samples of every variant and of the floor (collective)."""
    torch.manual_seed(1 + mesh.rank)
    x = model.batch()
    wrapped = {}
    for variant, wrap in variants(mesh).items():
        torch.manual_seed(0)
        wrapped[variant] = wrap(model.build())
    all_steps = {variant: step_of(module, x) for variant, module in wrapped.items()}
    require_averages(mesh, wrapped, x)
    all_steps[FLOOR] = floor_of(mesh, wrapped[COMPUTE])
    samples = measure(mesh, all_steps, rounds=rounds, warmup=5, settle=1)
    require_averages(mesh, wrapped, x)
    if mesh.rank == 0:
        best = min((v for v in STOCK_ON_GLOO if v in samples), key=lambda v: statistics.median(samples[v]))
        print(f"\n{name}\n{table(samples, best)}\n{verdict(samples, best)}", flush=True)
    return samples


def verdict(samples: dict[str, list[float]], best: str) -> str:
    """What the step does not hide, beside the floor; medians of differences and ratios of the same round."""
    floor = statistics.median(samples[FLOOR])
    lines = []
    for variant in ("hpcomm", best):
        exposed = statistics.median(s - c for s, c in zip(samples[variant], samples[COMPUTE], strict=True))
        lines.append(
            f"{variant}: {exposed * 1e3:.2f} ms above compute only = {exposed / floor:.2f} x floor "
            f"({'at most' if exposed <= 1.5 * floor + 1e-3 else 'MORE THAN'} 1.5 x floor + 1 ms)"
        )
    return "\n".join(lines)


def by_parameters(mesh: hpcomm.Mesh, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Samples by variant and number of parameters (collective)."""
    results: dict[str, dict[int, list[float]]] = {}
    for count in COUNTS:
        wrapped = {variant: wrap(Vector(count)) for variant, wrap in variants(mesh).items()}
        x = torch.full((16 * count,), 1.0 + mesh.rank)
        all_steps = {variant: step_of(module, x) for variant, module in wrapped.items()}
        require_averages(mesh, wrapped, x)
        samples = measure(mesh, all_steps, rounds=rounds, warmup=5)
        require_averages(mesh, wrapped, x)
        for variant, times in samples.items():
            results.setdefault(variant, {})[count] = times
        if mesh.rank == 0:
            print(f"\n{count} parameters of 16 numbers\n{table(samples, 'stock, bucket views')}")
            bare = samples[COMPUTE]
            for variant, times in samples.items():
                each = statistics.median(t - b for t, b in zip(times, bare, strict=True)) / count
                print(f"{variant:<34} {each * 1e6:8.2f} us a parameter above compute only", flush=True)
    return results


if __name__ == "__main__":
    try:
        main()
    except JobFailed as error:
        sys.exit(f"benchmarks.ddp: {error}")
