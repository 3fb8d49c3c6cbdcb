"""How long is a training step of dp x pp: hpcomm.Pipeline against torch.distributed.pipelining + stock DDP?

    torchrun --standalone --nproc-per-node 2 -m benchmarks.pipeline
    torchrun --standalone --nproc-per-node 4 -m benchmarks.pipeline --dp 2 --schedules 1f1b
    torchrun --standalone --nproc-per-node 2 -m benchmarks.pipeline --models large --schedules 1f1b,interleaved_1f1b
    python -m benchmarks.pipeline --ranks 4 --dp 2 --hosts 2 --link 1gbit       # a stage on each of two hosts

Same layers, cut, shard, microbatches, schedule and threads under all; SGD is left out. torch's pipelining runs on gloo
and on hpcomm as its backend. Before timing, the gradients are compared. All schedules and peers take turns step by step
in one run. With --hosts ranks share memory only on their own host, and with --link that has a network of its own, as in
benchmarks.collectives; the first stages are on the first host. Over hpcomm as its backend torch would then use gloo;
messages that travel as bfloat16 are timed as well.

Models: "compute", decoder blocks, whose messages are small beside their computation; "small", linear layers of 64 on a
few rows: the host's own time; "large", layer norms on messages of 4 MiB: the transport; "linear", linear layers of 512
on 32 rows; "wide", of 1024 on 128 rows: over a slow link, messages that take a part of the computation's time.

Printed with them:

bound      what this rank's layers take without any communication while all ranks run theirs, the slowest rank's
           time x (m + p - 1) / m: no schedule with one stage per rank and undivided backwards is faster.
predicted  the plan's simulated makespan, from what forwards and backwards (and their halves) took in one step that runs
           ahead of the timed ones in every round, and from messages between two ranks. It is written (--json) before
           the steps that it is compared with; "/ predicted" is the median of the rounds' own ratios.
gain       of ZB-V over 1F1B, the median of the rounds' own differences (quartiles), in all rounds and in each third of
           them, beside that of the simulations with the medians of all rounds' costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

import hpcomm
from benchmarks.collectives import positive
from benchmarks.harness import environment, keep_freed_memory, loss_alone, measure, save, table
from benchmarks.launch import (
    JobFailed,
    adopt_mpi_environment,
    enter_hosts,
    link_rate,
    require_hosts,
    result_file,
    run_ranks,
)
from benchmarks.runner import Gated
from hpcomm import _C
from hpcomm.plan import SCHEDULES, costs_from_json, costs_to_json

STOCK = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "eager_1f1b": pipelining.Schedule1F1B,  # which is the nearest that torch has
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
# DDP does not hear of weight gradients from the second half of a divided backward: replicas keep their own, and there
# is nothing to compare with. With all forwards before the first backward, its reducer counts parameters of several
# steps as of one and raises ("rebuilt params size").
NOT_WITH_DDP = ("zbv", "dualpipev", "gpipe")
LAYERS = 8
WARM_UP = 2
OURS = ("hpcomm.Pipeline", 'hpcomm.Pipeline, schema="frozen"')
HALVED = "hpcomm.Pipeline, wire_dtype=bfloat16"


def compute_model() -> nn.Sequential:
    return nn.Sequential(*[Gated(256) for _ in range(LAYERS)])


def linear_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(LAYERS)])


def wide_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(LAYERS)])


def small_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)])


def large_model() -> nn.Sequential:
    return nn.Sequential(*[nn.LayerNorm(1024) for _ in range(LAYERS)])


# The model, and the shape of one microbatch.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "compute": (compute_model, (4, 64, 256)),
    "linear": (linear_model, (32, 512)),
    "wide": (wide_model, (128, 1024)),
    "small": (small_model, (4, 64)),
    "large": (large_model, (1024, 1024)),
}


class Job:
    """One model under one schedule: everything that is compared."""

    def __init__(
        self,
        mesh: hpcomm.Mesh,
        model: str,
        schedule: str,
        microbatches: int,
        groups: dict[str, Any],
        link: tuple[float, float],
        write: Callable[[], None],
        halves: bool,
    ) -> None:
        build, shape = MODELS[model]
        self.link, self.write = link, write
        self.predicted: list[float] = []  # by round
        self.costs: list[Any] = []
        self.mesh, self.schedule, self.microbatches, self.part = mesh, schedule, microbatches, shape
        torch.manual_seed(1 + mesh.dp.rank)
        self.x, self.y = torch.randn(2, microbatches * shape[0], *shape[1:]).unbind(0)
        self.build = build
        self.pipe = self.pipeline()
        self.frozen = self.pipeline(schema="frozen")
        self.halved = self.pipeline(wire_dtype=torch.bfloat16) if halves else None
        self.alone = self.pipeline()
        comparable = groups and schedule in STOCK and not (mesh.dp.size > 1 and schedule in NOT_WITH_DDP)
        self.runs = {name: self.stock(group) for name, group in groups.items() if comparable}

    def pipeline(self, **options: Any) -> hpcomm.Pipeline:
        torch.manual_seed(0)
        return hpcomm.Pipeline(
            self.build(),
            mesh=self.mesh,
            num_microbatches=self.microbatches,
            loss_fn=nn.functional.mse_loss,
            schedule=self.schedule,
            **options,
        )

    def stock(self, group: dist.ProcessGroup) -> tuple[Callable[[], None], nn.ModuleList]:
        """Steps of torch's pipelining over ``group``, as its documentation composes it with DDP; and its parameters."""
        mesh = self.mesh
        cut = self.pipeline()  # the same cut
        modules = nn.ModuleList(cut.stages.values())
        stages = []
        for index, module in cut.stages.items():
            stage: nn.Module = module
            if mesh.dp.size > 1:
                stage = DistributedDataParallel(module, process_group=mesh.group("dp"), gradient_as_bucket_view=True)
            stages.append(pipelining.PipelineStage(stage, index, cut.plan.num_stages, torch.device("cpu"), group=group))
        several = SCHEDULES[self.schedule].stages_per_rank > 1
        runner = STOCK[self.schedule](
            stages if several else stages[0],  # type: ignore[arg-type]
            self.microbatches,
            loss_fn=nn.functional.mse_loss,
        )
        inputs = (self.x,) if 0 in cut.stages else ()
        target = self.y if cut.plan.num_stages - 1 in cut.stages else None

        plain = loss_alone(runner)

        def step() -> None:
            modules.zero_grad()
            runner.step(*inputs, target=target, **plain)

        return step, modules

    def ours(self, pipe: hpcomm.Pipeline) -> None:
        pipe.zero_grad()
        pipe.step(self.x, target=self.y)

    def variants(self) -> dict[str, Callable[[], None]]:
        """What is timed."""
        halved = self.halved
        return (
            {"profiled step": self.predict}
            | {name: step for name, (step, _) in self.runs.items()}
            | {OURS[0]: lambda: self.ours(self.pipe), OURS[1]: lambda: self.ours(self.frozen)}
            | ({} if halved is None else {HALVED: lambda: self.ours(halved)})
            | {"compute only": self.compute_only}
        )

    def compute_only(self) -> None:
        self.alone.zero_grad()
        for stage in self.alone.stages.values():
            for part in self.x.split(self.part[0]):
                leaf = part.detach().requires_grad_()
                stage(leaf).sum().backward()

    def require_equal(self) -> None:
        for step, _ in self.runs.values():
            step()
        for pipe in (self.pipe, self.frozen):
            self.ours(pipe)
            for _, modules in self.runs.values():
                for ours, theirs in zip(pipe.parameters(), modules.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        if self.halved is not None:
            self.ours(self.halved)
            for ours, exact in zip(self.halved.parameters(), self.pipe.parameters(), strict=True):
                scale = exact.grad.abs().max().item()  # type: ignore[union-attr]
                torch.testing.assert_close(ours.grad, exact.grad, rtol=0, atol=0.1 * scale)

    def typical_makespan(self) -> float:
        """Seconds of a step by simulation, with the median of every cost over the rounds."""
        costs = costs_from_json(json.dumps(self.costs[-1]))
        costs.stages = [
            _C.StageCost(**{name: statistics.median(c["stages"][i][name] for c in self.costs) for name in stage})
            for i, stage in enumerate(self.costs[-1]["stages"])
        ]
        for name in ("issue_seconds", "step_seconds"):
            setattr(costs, name, statistics.median(c[name] for c in self.costs))
        return float(self.pipe.plan.simulate(costs).makespan_seconds)

    def predict(self) -> None:
        """Seconds of the next step by simulation, from what computations took in this one."""
        self.pipe.zero_grad()  # as the steps that are timed begin
        costs = self.pipe.measure(self.x, target=self.y, steps=1)
        costs.link_latency_seconds, costs.link_bytes_per_second = self.link
        costs.collective_latency_seconds, costs.collective_bytes_per_second = self.link
        self.predicted.append(float(self.pipe.plan.simulate(costs).makespan_seconds))
        self.costs.append(json.loads(costs_to_json(costs)))
        self.write()


def link_of(mesh: hpcomm.Mesh) -> tuple[float, float]:
    """Latency in seconds and bytes per second of a message between neighbours, by round trips of ranks 0 and 1."""
    times = []
    if mesh.pp.size > 1 and mesh.pp.rank < 2:
        channel = hpcomm.Channel(mesh.pp, 1 - mesh.pp.rank, schema="per_message")
        for size in (1, 1 << 20):
            trips, message = [], torch.ones(size)
            for _ in range(20):
                start = time.perf_counter()
                if mesh.pp.rank == 0:
                    channel.send(message)
                    channel.recv()
                else:
                    channel.recv()
                    channel.send(message)
                trips.append((time.perf_counter() - start) / 2)
            times.append(statistics.median(trips))
    found = torch.tensor(times or [0.0, 0.0], dtype=torch.float64)
    mesh.world.all_reduce(found, "max")
    small, large = found.tolist()
    return small, 4 * (1 << 20) / max(large - small, 1e-9)


def groups_of(mesh: hpcomm.Mesh, hosts: int) -> dict[str, Any]:
    """Groups of torch for the ranks of one pipeline: over gloo, and on one host over hpcomm's backend, too."""
    if hosts > 1:
        return {"torch pipelining, gloo": mesh.group("pp")}
    mine = None
    for replica in range(mesh.dp.size):
        row = [stage * mesh.dp.size + replica for stage in range(mesh.pp.size)]
        group = dist.new_group(row, backend="hpcomm")
        mine = group if mesh.rank in row else mine
    return {"torch pipelining, gloo": mesh.group("pp"), "torch pipelining, hpcomm": mine}


def gain(before: list[float], after: list[float]) -> dict[str, list[float]]:
    """Quartiles of what ``after`` saves, by rounds, in milliseconds: in all of them, and in each third."""
    saved = [(a - b) * 1e3 for a, b in zip(before, after, strict=True)]
    third = len(saved) // 3
    parts = {"all": saved} | {f"third {i + 1}": saved[i * third : (i + 1) * third] for i in range(3)}
    return {name: statistics.quantiles(part, n=4) for name, part in parts.items() if len(part) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2, help="to start, where torchrun has not")
    parser.add_argument("--hosts", type=int, default=1, help="that they pretend to be on, by HPCOMM_HOST")
    parser.add_argument("--link", type=link_rate, metavar="RATE", help="between two --hosts, such as 1gbit or 200mbit")
    parser.add_argument("--dp", type=positive, default=1)
    parser.add_argument("--models", default="compute,small,large")
    parser.add_argument("--schedules", default="1f1b,interleaved_1f1b,zbv")
    parser.add_argument("--microbatches", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--ours", action="store_true", help="without torch's pipelining")
    parser.add_argument(
        "--minutes", type=float, default=15, help="all ranks end then, where torchrun has not started them"
    )
    parser.add_argument("--json", type=result_file, help="write the samples here")
    arguments = parser.parse_args()
    for flag, given, known in (("--models", arguments.models, MODELS), ("--schedules", arguments.schedules, SCHEDULES)):
        for name in given.split(","):
            if name not in known:
                parser.error(f"{flag}: {name!r} is none of {', '.join(known)}")
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    require_hosts(parser, ranks, arguments.hosts, arguments.link)
    if "RANK" not in os.environ:
        call = ["-m", "benchmarks.pipeline", *sys.argv[1:]]
        deadline = time.time() + 60 * arguments.minutes
        try:
            run_ranks(arguments.ranks, call, mpiexec=None, deadline=deadline, link=arguments.link)
        except JobFailed as error:
            sys.exit(f"benchmarks.pipeline: {error}")
    else:
        rank(arguments)


def rank(arguments: argparse.Namespace) -> None:
    """One rank's part, also under torchrun."""
    if "HPCOMM_BENCH_DEADLINE" in os.environ:
        adopt_mpi_environment()
    enter_hosts(arguments.hosts)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    keep_freed_memory()
    mesh = hpcomm.init(dp=arguments.dp, pp=-1)
    here = mesh.rank == 0
    groups = {} if arguments.ours else groups_of(mesh, arguments.hosts)
    link = link_of(mesh)
    if here:
        for key, value in environment(mesh).items():
            print(f"{key:<18} {value}")
        print(f"{'mesh':<18} dp={mesh.dp.size} x pp={mesh.pp.size}, {arguments.microbatches} microbatches")
        print(f"{'a message':<18} {link[0] * 1e6:.0f} us + bytes / {link[1] / 1e9:.2f} GB/s")
    results: dict[str, Any] = {}

    def write() -> None:
        save(arguments.json, "pipeline", mesh, {"arguments": vars(arguments), "results": results})

    for model in arguments.models.split(","):
        schedules = arguments.schedules.split(",")
        jobs = {
            schedule: Job(mesh, model, schedule, arguments.microbatches, groups, link, write, arguments.hosts > 1)
            for schedule in schedules
        }
        for schedule, job in jobs.items():
            job.require_equal()
            results[f"{model} {schedule}"] = {"predicted": job.predicted, "costs": job.costs}
        steps = {(schedule, name): step for schedule, job in jobs.items() for name, step in job.variants().items()}
        taken = measure(mesh, steps, rounds=arguments.rounds, warmup=WARM_UP)
        ours: dict[str, list[float]] = {}
        for schedule in schedules:
            samples = {name: times for (of, name), times in taken.items() if of == schedule}
            del samples["profiled step"], jobs[schedule].predicted[:WARM_UP], jobs[schedule].costs[:WARM_UP]
            results[f"{model} {schedule}"]["seconds"] = samples
            ours[schedule] = min((samples[name] for name in OURS), key=statistics.median)
            if here:
                bound = statistics.median(samples["compute only"])
                bound *= (arguments.microbatches + mesh.pp.size - 1) / arguments.microbatches
                measured = statistics.median(ours[schedule])
                print(f"\n== {model}, {schedule}")
                print(table(samples, next(iter(samples))))
                print(f"bound      {bound * 1e3:.2f} ms; the faster of ours / bound {measured / bound:.3f}")
                predicted = jobs[schedule].predicted
                ratio = statistics.median(a / b for a, b in zip(ours[schedule], predicted, strict=True))
                expected = statistics.median(predicted) * 1e3
                print(f"predicted  {expected:.2f} ms; the faster of ours / predicted {ratio:.3f}")
        if here and {"1f1b", "zbv"} <= ours.keys():
            gained = gain(ours["1f1b"], ours["zbv"])
            hoped = (jobs["1f1b"].typical_makespan() - jobs["zbv"].typical_makespan()) * 1e3
            results[f"{model} gain"] = {"milliseconds": gained, "simulated": hoped}
            for name, (low, middle, high) in gained.items():
                print(f"{model}: ZB-V is {middle:.2f} ms ({low:.2f} to {high:.2f}) faster than 1F1B, {name}")
            print(f"{model}: simulated {hoped:.2f} ms")
    write()
    mesh.close()


if __name__ == "__main__":
    main()
