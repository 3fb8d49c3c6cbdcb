"""Trains a small GPT with data and pipeline parallelism, and shows what hpcomm does.

    python examples/train_gpt.py                                         one process
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py       dp=2 x pp=2
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --dp 4 --pp 2

The model (gpt/model.py) and its text (gpt/text.py: the source of Python's own library) are ordinary PyTorch. When it is
trained, comparison/ runs its step beside that of torch.distributed.pipelining with DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpt import model as gpt
from gpt import report, text

import hpcomm
from hpcomm.report import picture, read, timeline

if TYPE_CHECKING:
    from comparison import Comparison

CORES = len(os.sched_getaffinity(0))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dp", type=int, help="replicas of the model (default: what --pp leaves over)")
    add("--pp", type=int, help="stages that the model is cut into (default: about the square root of the ranks)")
    schedules = [name for name in hpcomm.plan.SCHEDULES if name != "forward_only"]
    add("--schedule", default="1f1b", choices=schedules)
    add("--num-microbatches", type=int, default=8, help="parts that each replica cuts its batch into")
    add("--batch-size", type=int, default=64, help="sequences in a step, over all replicas")
    add("--steps", type=int, default=250)
    add("--seconds", type=float, default=25, help="stop training after this time, all ranks at the same step")
    add("--lr", type=float, default=4e-3, help="largest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--d-model", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--blocks", type=int, default=4)
    add("--context", type=int, default=64, help="bytes in a sequence")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="compute threads of each rank; ranks x threads <= cores is wise")
    add("--sample", type=int, default=200, help="bytes to write at the end")
    add("--rounds", type=int, default=30, help="steps of stock PyTorch in the comparison with it; 0: none")
    add("--timeline", metavar="FILE.svg", help="draw a step beside its plan; its trace is left in FILE.trace")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    data = text.load()
    with hpcomm.init(**axes(args)) as mesh:
        here = mesh.rank == 0  # the one rank that prints
        if here:
            show_environment(mesh, data)

        # Every rank builds the whole model; the Pipeline keeps this rank's stage of it.
        model = build_model(args)
        pipe = hpcomm.Pipeline(
            model, mesh=mesh, schedule=args.schedule, num_microbatches=args.num_microbatches, loss_fn=gpt.loss_fn
        )
        show_plan(pipe, [name for name, _ in model.named_children()])

        # All replicas draw from the same text, each its own rows; the stages of a replica draw the same rows.
        sampler = text.Sampler(data.train, args.context, args.batch_size, args.seed, mesh.dp.rank, mesh.dp.size)
        prove(pipe, sampler, args)
        losses, seconds = train(pipe, sampler, args)
        if args.timeline:
            trace_a_step(pipe, sampler, args)
        found = compare_with_stock(pipe, sampler, args)

        state = pipe.full_state_dict()  # collective: every rank calls it, and gets the whole model
        if here:
            show_result(state, data, losses, seconds, found, mesh, args)
        mesh.barrier()  # the others wait while rank 0 writes and measures


def axes(args: argparse.Namespace) -> dict[str, int]:
    """The axes for hpcomm.init(), which infers an axis of -1."""
    if args.dp is None and args.pp is None:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        pp = next(n for n in range(1, world + 1) if world % n == 0 and n * n >= world)
        return {"dp": world // pp, "pp": pp}
    return {"dp": -1 if args.dp is None else args.dp, "pp": -1 if args.pp is None else args.pp}


def build_model(args: argparse.Namespace) -> torch.nn.Sequential:
    return gpt.build(d_model=args.d_model, heads=args.heads, blocks=args.blocks, context=args.context, seed=args.seed)


def build_optimizer(parameters: Iterable[torch.nn.Parameter], args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)


def learning_rate(step: int, steps: int) -> float:
    """Fraction of --lr: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, min(20, steps // 5))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def prove(pipe: hpcomm.Pipeline, sampler: text.Sampler, args: argparse.Namespace) -> None:
    """The first batch on this mesh and in one process; raises when a gradient differs."""
    x, y = (part.to(pipe.mesh.device) for part in sampler.batch(0))
    found = hpcomm.verify(pipe, build_model(args), x, target=y)
    if pipe.mesh.rank == 0:
        report.title("verified: the first batch on this mesh and in one process")
        print(
            f"loss {found.loss:.6f} and {found.reference_loss:.6f}; gradients of {found.compared} parameters compared"
        )
        print(f"largest relative difference {found.max_relative_difference:.1e} ({found.parameter})")


def train(pipe: hpcomm.Pipeline, sampler: text.Sampler, args: argparse.Namespace) -> tuple[list[float], float]:
    """The training loop. Returns the loss of every step, and the seconds that all steps took."""
    mesh = pipe.mesh
    optimizer = build_optimizer(pipe.parameters(), args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    losses: list[float] = []
    if mesh.rank == 0:
        report.title("training")
    mesh.barrier()
    start = time.perf_counter()
    with report.Progress(args.steps, args.batch_size * args.context, visible=mesh.rank == 0) as progress:
        for step in range(args.steps):
            x, y = (part.to(mesh.device) for part in sampler.batch(step))
            optimizer.zero_grad()
            loss = pipe.step(x, target=y)
            hpcomm.clip_grad_norm_(pipe, args.clip)
            optimizer.step()
            losses.append(float(loss))
            progress.show(step + 1, losses[-1], schedule.get_last_lr()[0])
            schedule.step()
            if step % 5 == 4 and rank_0_says(mesh, time.perf_counter() - start > args.seconds):
                break
    mesh.barrier()
    return losses, time.perf_counter() - start


def rank_0_says(mesh: hpcomm.Mesh, answer: bool) -> bool:
    """The answer of rank 0, on every rank: clocks differ, but all ranks must stop at the same step."""
    told = torch.tensor([answer], dtype=torch.int64, device=mesh.device)
    mesh.world.broadcast(told, 0)
    return bool(told)


def trace_a_step(pipe: hpcomm.Pipeline, sampler: text.Sampler, args: argparse.Namespace) -> None:
    """Draws a step of several beside its plan, on the terminal and as a picture."""
    folder = Path(args.timeline).with_suffix(".trace")
    x, y = (part.to(pipe.mesh.device) for part in sampler.batch(0))
    with pipe.traced(folder):
        for _ in range(8):
            pipe.zero_grad()
            pipe.mesh.barrier()  # as in the plan, all begin together
            pipe.step(x, target=y)
    pipe.zero_grad()
    pipe.mesh.barrier()
    if pipe.mesh.rank == 0:
        report.title("a step, planned and measured")
        try:
            trace = read(folder)
        except hpcomm.InvalidArgument as error:  # several hosts, each with a folder of its own
            print(error)
            return
        # Neither a lucky step nor one that was disturbed: the one of median length. The first warms up.
        lengths = {number: max(rank.end for rank in step.values()) for number, step in trace.steps.items() if number}
        number = sorted(lengths, key=lengths.__getitem__)[len(lengths) // 2]
        print(timeline(trace, number))
        Path(args.timeline).write_text(picture(trace, number), encoding="utf-8")
        print(f"picture: {args.timeline}; where the time went: python -m hpcomm trace report {folder}")


def compare_with_stock(pipe: hpcomm.Pipeline, sampler: text.Sampler, args: argparse.Namespace) -> Comparison | None:
    """The same step by stock PyTorch; raises when its results are others. None where there is nothing to compare."""
    x, y = (part.to(pipe.mesh.device) for part in sampler.batch(0))
    # Stock takes means of means: only with equal parts is that the mean.
    equal = args.batch_size % (pipe.mesh.dp.size * args.num_microbatches) == 0
    if pipe.mesh.size == 1 or args.rounds < 2 or not equal:
        return None
    import comparison  # not above: torch.distributed.pipelining takes seconds to import

    job = comparison.Job(pipe, args.schedule, build_model(args), gpt.loss_fn, x, y)
    found = comparison.with_stock(job, args.rounds, limit=15)
    if pipe.mesh.rank == 0:
        report.title("the same step by torch.distributed.pipelining with DistributedDataParallel, on gloo")
        print(f"same weights, batch, microbatches and threads; its schedule: {comparison.schedule_of(job)}")
        print(f"loss {found.loss:.6f} and {found.stock_loss:.6f}; gradients differ by at most {found.difference:.1e}")
        print(f"{found.rounds} steps of stock, in turn with twice as many others; slowest rank's ms (quartiles)")
        for name, seconds in found.seconds.items():
            low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
            print(f"{name:<22} {middle:7.2f}  ({low:.2f} to {high:.2f})")
    if not found.difference < 1e-3:
        raise SystemExit("stock PyTorch computed other gradients")
    return found


def one_process_speed(
    data: text.Text, args: argparse.Namespace, steps: int, threads: int, device: torch.device
) -> float:
    """Tokens per second of this process alone: same model, same global batch in one piece; 2 steps to warm up."""
    torch.set_num_threads(threads)
    sampler = text.Sampler(data.train, args.context, args.batch_size, args.seed, replica=0, replicas=1)
    model = build_model(args).to(device)
    optimizer = build_optimizer(model.parameters(), args)
    start = 0.0
    for step in range(2 + steps):
        if step == 2:
            start = time.perf_counter()
        x, y = (part.to(device) for part in sampler.batch(step))
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
    float(loss.detach())  # a GPU is done only when it says so
    return steps * args.batch_size * args.context / (time.perf_counter() - start)


def show_environment(mesh: hpcomm.Mesh, data: text.Text) -> None:
    report.title("environment")
    print(f"versions   hpcomm {hpcomm.__version__}, torch {torch.__version__}, python {platform.python_version()}")
    print(f"machine    {platform.system()} {platform.machine()}, {CORES} cores; tensors on {mesh.device}")
    shape = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in ("dp", "pp"))
    print(f"mesh       {shape}; ranks: {mesh.size}, compute threads in each: {torch.get_num_threads()}")
    print(f"transport  {mesh.world.transport}")
    print(
        f"text       {data.files} files of Python's library, {len(data.train):,} bytes; {len(data.held_out):,} held out"
    )


def show_plan(pipe: hpcomm.Pipeline, layers: list[str]) -> None:
    """Prints what each stage holds, which the stages tell each other: collective over mesh.pp."""
    mesh = pipe.mesh
    held = torch.zeros(pipe.plan.num_stages, 2, dtype=torch.int64, device=mesh.device)
    for stage, module in pipe.stages.items():
        held[stage] = torch.tensor([len(list(module.children())), sum(p.numel() for p in module.parameters())])
    mesh.pp.all_reduce(held)
    if mesh.rank != 0:
        return
    report.title("the plan of one training step, verified before it runs")
    print(pipe.plan)
    first = 0
    for stage, (count, parameters) in enumerate(held.tolist()):
        buckets = ", ".join(f"{size / 1024:.0f} KiB" for size in pipe.plan.buckets[stage])
        print(
            f"stage {stage}: {' '.join(layers[first : first + count])} | {parameters:,} parameters | buckets {buckets}"
        )
        first += count


def show_result(
    state: dict[str, torch.Tensor],
    data: text.Text,
    losses: list[float],
    seconds: float,
    found: Comparison | None,
    mesh: hpcomm.Mesh,
    args: argparse.Namespace,
) -> None:
    """What the trained model writes, its losses, and the speed beside that of one process."""
    model = build_model(args)
    model.load_state_dict(state)
    model.eval()
    report.title("what it writes")
    print(gpt.generate(model, b"def ", args.sample, context=args.context, seed=args.seed).decode(errors="replace"))

    held_out = gpt.mean_loss(model, data.held_out, context=args.context)
    speed = len(losses) * args.batch_size * args.context / seconds
    steps = min(10, args.steps)
    # The other ranks are idle now. More threads can be slower where other programs run: take the better.
    speeds = ((one_process_speed(data, args, steps, threads, mesh.device), threads) for threads in {1, CORES})
    alone, threads = max(speeds)
    report.title("summary")
    print(f"loss         {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte; {held_out:.3f} on the held-out text")
    print(f"training     {len(losses)} steps in {seconds:.1f} s")
    print(f"this mesh    {speed:,.0f} tokens/s over all steps (ranks: {mesh.size}, cores: {CORES})")
    how = f"{steps} steps of rank 0 alone, batch in one piece, threads: {threads}, the better of 1 and {CORES}"
    print(f"one process  {alone:,.0f} tokens/s ({how})")
    if found is not None:
        low, hidden, high = found.hidden()
        moving, exposed = found.moving() * 1e3, found.exposed() * 1e3
        faster = f"{found.speedup():.2f}x as fast (median ratio of {found.rounds} rounds)"
        print(f"stock        a step of hpcomm is {faster}")
        shares = f"{low:.0%} to {high:.0%}, nine times in ten"
        if high - low < 1:
            print(f"hidden share {hidden:.0%} of {moving:.2f} ms of communication ({shares})")
            print(f"             = 1 - {exposed:.2f} ms / {moving:.2f} ms, of each the mean of its faster half")
        else:
            print(f"hidden share unknown: {shares}; the rounds differ by more than it takes")
        print("             = 1 - (step - step without bytes) / (step without computation - step with neither)")
        if mesh.size * args.threads > CORES and mesh.device.type == "cpu":
            print(f"             {mesh.size} ranks share {CORES} cores: while one moves bytes, it computes nothing")


if __name__ == "__main__":
    main()
