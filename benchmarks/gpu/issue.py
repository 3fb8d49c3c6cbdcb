"""How long does the host take to issue an operation? The device works behind; nobody waits for it.

A small all-reduce, a fused send of 32 tensors (two ranks), a gradient bucket of 16 parameters from the mark of its
first gradient to its last operation; beside them what torch.distributed takes for as much, and on a GPU what NCCL takes
by itself for the operation that is under all of them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from time import perf_counter as now

import torch
import torch.distributed as dist

import hpcomm
from benchmarks.gpu.harness import ISSUE, Job, Step, Variant, measure
from benchmarks.gpu.nccl_alone import LIBRARY, NcclAlone, NcclError
from hpcomm import _C

TARGET = 15.0  # microseconds
BUCKETS, PARAMS = 4, 16


def run(job: Job) -> None:
    mesh = hpcomm.init(dp=job.ranks, device=job.device, timeout=60.0)
    alone = nccl_alone(job)
    for case in (small_all_reduce, bucket, fused_send):
        if job.in_time(f"issue: {case.__name__}"):
            case(job, mesh, alone)
    if alone is not None:
        alone.close()
    mesh.close()


def nccl_alone(job: Job, library: str = LIBRARY) -> NcclAlone | None:
    """None without a GPU, and where it fails on any rank: that is no failure of what is measured."""
    if not job.on_gpu:
        return None
    alone, words = None, ""
    for step in ("load", "connect"):  # all ranks do the second, or none
        try:
            if step == "load":
                alone = NcclAlone(job, library)
            elif alone is not None:
                alone.connect()
        except (NcclError, OSError, AttributeError) as error:  # no such library, no such function
            words = str(error)
        if not job.all_well(not words):
            job.report.note(f"NCCL alone is left out: {words or 'it failed on another rank'}")
            if alone is not None:
                alone.close()
            return None
    return alone


def report(job: Job, case: str, samples: dict[str, list[float]], ours: str) -> None:
    job.report.row(case, samples)
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "0":
        return  # to compare the others with: hpcomm then keeps the order itself
    got = 1e6 * statistics.median(samples[ours])
    job.report.target(f"{case}, {job.ranks} rank(s)", f"< {TARGET:.0f} us", f"{got:.1f} us", job.judged(got < TARGET))


def small_all_reduce(job: Job, mesh: hpcomm.Mesh, alone: NcclAlone | None) -> None:
    mine, theirs = (torch.ones(256, device=job.device) for _ in range(2))
    for tensor in (mine, theirs):  # connects; and is right
        (mesh.dp.all_reduce if tensor is mine else dist.all_reduce)(tensor)
        if not bool((tensor == job.ranks).all()):
            raise AssertionError(f"an all-reduce of ones over {job.ranks} ranks gave {tensor[:4].tolist()}")
        tensor.zero_()
    variants: dict[str, Step] = {
        "hpcomm all_reduce, async": lambda: mesh.dp.all_reduce(mine, async_op=True),
        "hpcomm all_reduce and its wait": lambda: mesh.dp.all_reduce(mine),
        "torch.distributed all_reduce, async": lambda: dist.all_reduce(theirs, async_op=True),
        "torch.distributed all_reduce and its wait": lambda: dist.all_reduce(theirs),
    }
    if alone is not None:
        variants["NCCL alone, ncclAllReduce"] = lambda: alone.all_reduce(theirs)
    samples = measure(job, variants, how=ISSUE, most=50)
    report(job, "all_reduce of 1 KB", samples, "hpcomm all_reduce, async")


def bucket(job: Job, mesh: hpcomm.Mesh, alone: NcclAlone | None) -> None:
    size = 64 if job.quick else 4096
    params = [torch.nn.Parameter(torch.zeros(size, device=job.device)) for _ in range(BUCKETS * PARAMS)]
    lane = mesh.lane(mesh.ranks("dp"), "gradient")
    bytes_each = 4 * size * PARAMS
    plan = _C.BucketPlan(params, bytes_each, bytes_each)
    reducer = _C.Reducer(lane, params, plan)
    hooks = _C.ReadyHooks(reducer, params)
    loss = _C.StepLoss(mesh.lane(mesh.ranks("dp"), "scalar"))
    number = len(plan.buckets)

    def reduce() -> None:
        reducer.arm(loss)
        hooks.mark_rest()
        reducer.finish()

    for i, param in enumerate(params):
        param.grad = torch.full_like(param, float(i + 1))
    loss.issue(torch.zeros((), dtype=torch.float64, device=job.device), 1.0)
    reduce()
    for i, param in enumerate(params):
        assert param.grad is not None
        if not bool((param.grad == float(i + 1)).all()):  # the sum over the ranks times 1 / the ranks' weight
            raise AssertionError(f"gradient {i} is {param.grad[:4].tolist()} where {i + 1} is due")
        param.grad.zero_()
    flat = torch.zeros(size * PARAMS, device=job.device)
    parts = list(flat.split(size))
    grads = [param.grad for param in params[:PARAMS] if param.grad is not None]

    def stock() -> None:
        torch._foreach_copy_(parts, grads)
        flat.mul_(1.0 / job.ranks)
        dist.all_reduce(flat, async_op=True).wait()
        torch._foreach_copy_(grads, parts)

    variants = {
        f"hpcomm Reducer, one of {number} buckets": Variant(reduce, per=number),
        "foreach_copy_, all_reduce, foreach_copy_": Variant(stock),
    }
    if alone is not None:
        variants["NCCL alone, ncclAllReduce"] = Variant(lambda: alone.all_reduce(flat))
    samples = measure(job, variants, how=ISSUE, most=20)
    report(job, f"a bucket of {PARAMS} gradients", samples, next(iter(variants)))


def fused_send(job: Job, mesh: hpcomm.Mesh, alone: NcclAlone | None) -> None:
    if job.ranks != 2:
        job.report.note("a fused send needs two ranks")
        return
    tree = [torch.full((1024,), float(mesh.rank + i), device=job.device) for i in range(32)]
    rooms = [torch.empty_like(tensor) for tensor in tree]
    channel = hpcomm.Channel(mesh.dp, peer=1 - mesh.rank, schema="frozen")
    peer = 1 - mesh.rank
    work = channel.send(tree)
    for i, tensor in enumerate(channel.recv()):
        if not bool((tensor == float(peer + i)).all()):
            raise AssertionError(f"tensor {i} of the message is {tensor[:4].tolist()}")
    work.wait()

    # The time of the sends alone; what the peer sent is taken in after each.
    def sends(calls: int) -> float:
        taken, works = 0.0, []
        for _ in range(calls):
            start = now()
            works.append(channel.send(tree))
            taken += now() - start
            channel.recv()
        for work in works:
            work.wait()
        return taken

    def stock(calls: int) -> float:
        taken, works = 0.0, []
        for _ in range(calls):
            start = now()
            operations = [dist.P2POp(dist.isend, tensor, peer) for tensor in tree]
            operations += [dist.P2POp(dist.irecv, room, peer) for room in rooms]
            works += dist.batch_isend_irecv(operations)
            taken += now() - start
        for work in works:
            work.wait()
        return taken

    samples = {
        "hpcomm Channel.send of 32 tensors": timed(job, sends),
        "batch_isend_irecv, 32 sends and receipts": timed(job, stock),
    }
    if alone is not None:
        packed, room = (torch.zeros(sum(tensor.numel() for tensor in tree), device=job.device) for _ in range(2))

        def exchange(calls: int) -> float:
            start = now()
            for _ in range(calls):
                alone.exchange(packed, room, peer)
            return now() - start

        samples["NCCL alone, ncclSend and ncclRecv in a group"] = timed(job, exchange)
    report(job, "a send of 32 x 4 KB", samples, "hpcomm Channel.send of 32 tensors")


def timed(job: Job, block: Callable[[int], float], calls: int = 10) -> list[float]:
    """Seconds per call of the slowest rank, by round; ``block`` says how long its calls took."""
    block(calls)
    samples = []
    for _ in range(job.rounds):
        job.synchronize()
        job.meet()
        samples.append(job.slowest(block(calls) / calls))
    job.synchronize()
    return samples
