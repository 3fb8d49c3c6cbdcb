"""What does the runner cost: an action of the plan, and a backward in two halves?

    python -m benchmarks.runner                                               the halves, and a pipeline of one rank
    torchrun --standalone --nproc-per-node 2 -m benchmarks.runner             with messages

**Actions.** Stages of one layer that returns its input: what a step takes, divided by the actions in this rank's list
(forwards, backwards, messages, the loss). "own" leaves out the waits for messages: everything that the host does for an
action; target: 15 us. Of that, measured alone: "autograd", the engine's calls on these graphs of one or two nodes, and
"model", the layers and the loss; "runner" is the rest. "wall" has the waits in it, and what a step does before and
after its list; with fewer cores than ranks and lanes it is the operating system's scheduler that is timed. Each is the
best of all steps and, in brackets, their median.

**Halves.** One stage, the same input and output gradient: backward undivided (autograd), and its halves I and W.
Target: I + W at most 1.05 x B.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hpcomm
from benchmarks.harness import environment, save
from benchmarks.launch import result_file
from hpcomm.pipeline.chain import calls_of
from hpcomm.pipeline.links import Link
from hpcomm.pipeline.recorder import Times
from hpcomm.pipeline.stage import Stage, run_backward
from hpcomm.plan import SCHEDULES

COLUMNS = ("own", "autograd", "model", "runner", "wall")


class Leaf(nn.Module):
    """An empty first stage, whose output wants a gradient like that of a stage with parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().requires_grad_()


def first_of(output: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, float]:
    return output.sum(), 1.0


def action_cost(mesh: hpcomm.Mesh, schedule: str, microbatches: int, steps: int) -> dict[str, Any]:
    """Microseconds per action of a step, by what takes them, best and median; the number of actions."""
    stages = SCHEDULES[schedule].stages_per_rank * mesh.pp.size
    model = nn.Sequential(Leaf(), *[nn.Identity() for _ in range(stages - 1)])
    pipe = hpcomm.Pipeline(
        model, mesh=mesh, num_microbatches=microbatches, loss_fn=first_of, schedule=schedule, schema="frozen"
    )
    pipe.eval()  # no layer of a kind that may draw random numbers: no seeds
    x = torch.ones(microbatches, 1)
    actions = sum(1 + len(action.inside) for action in pipe.plan.actions(mesh.rank))
    wall, own = [], []
    for _ in range(steps):
        mesh.barrier()
        start = time.perf_counter()
        pipe.step(x, target=x)
        wall.append(time.perf_counter() - start)
    for _ in range(steps):
        pipe._runner.recorder = recorder = Times()
        pipe.step(x, target=x)
        own.append(sum(end - begin - waited for _, begin, waited, end, _ in recorder.actions) / 1e9)
    model, engine = [], []
    for _ in range(steps):
        found = bare(pipe, x)
        model.append(found[0])
        engine.append(found[1])
    scale = 1e6 / actions
    taken = {"own": own, "autograd": engine, "model": model, "wall": wall}
    figures: dict[str, Any] = {name: (min(t) * scale, statistics.median(t) * scale) for name, t in taken.items()}
    figures["runner"] = tuple(figures["own"][i] - figures["autograd"][i] - figures["model"][i] for i in range(2))
    return {"actions": actions} | figures


def bare(pipe: hpcomm.Pipeline, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of a step's layers and losses, and of its calls of autograd's engine, without a pipeline."""
    model = engine = 0.0
    one = torch.ones(())
    for index, stage in pipe.stages.items():
        (layer,) = stage
        last = index == pipe.plan.num_stages - 1
        for part in x.split(1):
            leaf = part.detach().requires_grad_()
            start = time.perf_counter()
            output = layer(leaf)
            root, seed = (first_of(output, leaf)[0], one) if last else (output, leaf)
            middle = time.perf_counter()
            run_backward([root], [seed])
            engine += time.perf_counter() - middle
            model += middle - start
    return model, engine


def transformer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)


class Gated(nn.Module):
    """The layers of a decoder block as plain linear ones: attention by its own products, then a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def half_costs(
    stage: nn.Module, x: torch.Tensor, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Milliseconds of B, I and W, medians and the best of each; the three in turn, so that a slow moment slows all."""
    ahead = [Link(0, 1, "", (), loads=False)]
    # A stage in the middle: its input has a gradient, and its output gets one.
    middle = Stage(1, stage, calls_of(stage, 1, {}), ahead, [Link(1, 2, "", (), loads=False)], divided=[1])
    leaf = x.clone().requires_grad_()
    seed = torch.randn_like(stage(x))
    times: dict[str, list[float]] = {"B": [], "I": [], "W": []}

    def timed(kind: str, work: Callable[[], object]) -> None:
        start = clock()
        work()
        times[kind].append(clock() - start)

    for _ in range(rounds + 3):
        leaf.grad = None
        middle.forward(0, (), {0: leaf}, {}, {}, None)
        timed("B", lambda: middle.backward(0, {2: [seed]}))
        leaf.grad = None
        middle.forward(1, (), {0: leaf}, {}, {}, None)
        timed("I", lambda: middle.backward(1, {2: [seed]}))
        timed("W", lambda: middle.weight_gradients(1, None))
    return {kind: (statistics.median(samples[3:]) * 1e3, min(samples[3:]) * 1e3) for kind, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--schedules", default="1f1b,interleaved_1f1b,zb1p,zbv,dualpipev")
    parser.add_argument(
        "--cpu-time", action="store_true", help="halves on one thread, by its CPU time: for busy machines"
    )
    parser.add_argument("--json", type=result_file, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    mesh = hpcomm.init(pp=-1)
    here = mesh.rank == 0
    figures: dict[str, dict[str, dict[str, Any]]] = {"actions": {}, "halves": {}}
    if here:
        for key, value in environment(mesh).items():
            print(f"{key:<18} {value}")
        heads = "".join(f"{name:>15}" for name in COLUMNS)
        print(f"\n{'schedule':<18} {'actions':>8}{heads}   us an action: best (median)")
    for schedule in arguments.schedules.split(","):
        found = action_cost(mesh, schedule, arguments.microbatches, arguments.steps)
        figures["actions"][schedule] = found
        if here:
            columns = "".join(f"{best:>7.1f} ({median:5.1f})" for best, median in (found[name] for name in COLUMNS))
            print(f"{schedule:<18} {found['actions']:>8}{columns}")
    stages = {
        "Linear(512), 64 rows": (nn.Linear(512, 512), torch.randn(64, 512)),
        "decoder block 256, 4 x 64": (Gated(256), torch.randn(4, 64, 256)),
        "decoder block 512, 4 x 128": (Gated(512), torch.randn(4, 128, 512)),
        "TransformerEncoderLayer(256)": (transformer(256), torch.randn(4, 64, 256)),
        "Conv2d(32, 32, 3), 8 x 32 x 32": (nn.Conv2d(32, 32, 3, padding=1), torch.randn(8, 32, 32, 32)),
    }
    clock = time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
        clock = time.thread_time
    if mesh.size == 1:
        print(f"\n{'stage':<32} {'B ms':>8} {'I ms':>8} {'W ms':>8} {'(I+W)/B':>8} {'of the best':>12}")
        for name, (stage, x) in stages.items():
            found = half_costs(nn.Sequential(stage), x, arguments.rounds, clock)
            figures["halves"][name] = found
            ratios = [(found["I"][i] + found["W"][i]) / found["B"][i] for i in range(2)]
            columns = " ".join(f"{found[kind][0]:>8.3f}" for kind in "BIW")
            print(f"{name:<32} {columns} {ratios[0]:>8.3f} {ratios[1]:>12.3f}")
    save(arguments.json, "runner", mesh, {"arguments": vars(arguments), "figures": figures})
    mesh.close()


if __name__ == "__main__":
    main()
