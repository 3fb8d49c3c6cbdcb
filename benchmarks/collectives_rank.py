"""One rank of benchmarks.collectives: runs all peers in turn, checks what they deliver, and reports on rank 0.

How a time is taken, for all peers alike:

- In every round each peer has one block; which peer begins moves on by one each round.
- Before a block: a barrier of gloo, then one iteration that is not timed. It brings the peer's buffers back into the
  caches, and the ranks leave it closer together than they leave any barrier of another library.
- A block is ``n`` iterations back to back between two readings of the clock. Its time is that of the slowest rank,
  divided by n.
- With ``--fresh`` an iteration first writes each element of its input, as a program does that sends what it has just
  computed. Without it, as in nccl-tests, nobody writes the buffers: what a receiver has read in place is still in its
  core's cache when it is sent again.
- Without ``-n`` the iterations fill about ``BLOCK`` seconds, found by trial; all ranks use the same number.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hpcomm
from benchmarks import collectives_table as report
from benchmarks.harness import environment
from benchmarks.launch import adopt_mpi_environment, enter_hosts
from benchmarks.operations import DTYPES, OPERATIONS, Buffers, Case, Operation, count_of, count_wrong, sizes
from benchmarks.peers import Mpich, Peer, Step, UnavailableError, UnsupportedError, make_peer

BLOCK = 0.02  # seconds
FEWEST, MOST = 3, 1000  # iterations of a block
LIMIT_FROM = 1 << 20  # bytes: below it, memory is not the limit
LARGE = 64 << 20  # bytes of the copy that no cache holds


class Rank:
    """What one rank does, with the arguments of the command line."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._notes: list[str] = []
        enter_hosts(arguments["hosts"])
        dist.init_process_group("gloo")
        self._mesh = hpcomm.init()
        self._peers = self._make_peers()

    def run(self) -> dict[str, Any]:
        """The whole job of these ranks; rank 0's result counts."""
        mesh = self._mesh
        described = environment(mesh)
        if (hosts := self._arguments["hosts"]) > 1:
            described |= {"hosts": hosts, "link": self._arguments["link"] or "loopback"}
        for peer in self._peers:
            if isinstance(peer, Mpich):
                described["mpi"] = peer.version
        self._say(f"\n# {mesh.size} ranks of {described['transport']}; peers: {', '.join(p.name for p in self._peers)}")
        for note in self._notes:
            self._say(f"# {note}")
        if mesh.size == self._arguments["ranks"][0]:
            self._say("".join(f"# {key:<18} {value}\n" for key, value in described.items() if key != "ranks"))
        result: dict[str, Any] = {"ranks": mesh.size, "environment": described}
        if self._arguments["wait"]:
            result["waits"] = [self._wait_cpu(peer) for peer in self._peers]
            self._say(report.waits(result["waits"]))
        else:
            rate = self._copy_rate()
            result["copy_gbs"] = rate
            self._say(
                f"# a rank copies {LARGE >> 20} MiB, all at once, at {rate:.2f} GB/s (bytes read and bytes written)"
            )
            result["rows"] = [row for name in self._arguments["ops"] for row in self._time_operation(OPERATIONS[name])]
        result["notes"] = self._notes
        return result

    def close(self) -> None:
        """Leaves the job in order, all ranks together."""
        dist.barrier()
        self._peers.clear()
        self._mesh.close()
        dist.destroy_process_group()

    # --- One operation ----------------------------------------------------------------------------------------------

    def _time_operation(self, operation: Operation) -> list[dict[str, Any]]:
        arguments, baseline = self._arguments, self._arguments["baseline"]
        peers = [peer for peer in self._peers if self._can(peer, operation)]
        if not peers:
            return []
        self._say(f"\n# {operation.name}, {self._mesh.size} ranks\n{report.header([p.name for p in peers], baseline)}")
        rows = []
        wanted = sizes(arguments["begin"], arguments["end"], arguments["factor"])
        dtype = DTYPES[arguments["dtype"]]
        for count in dict.fromkeys(count_of(operation, size, dtype, self._mesh.size) for size in wanted):
            case = self._case(operation, count)
            wrong = self._check(case, peers) if arguments["check"] else None
            samples, iterations = self._samples(case, peers)
            row = report.timed_row(case, arguments["dtype"], samples, iterations, wrong, baseline)
            self._say(report.line(row))
            rows.append(row)
        return rows

    def _samples(self, case: Case, peers: Sequence[Peer]) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Seconds per operation of the slowest rank, and iterations of the block, by peer and round."""
        steps: dict[str, Step] = {}
        common: Buffers | None = None
        for peer in peers:
            buffers = common if common and not peer.own_memory else case.buffers(peer.empty)
            if not peer.own_memory:
                common = buffers
            step = peer.step(case, buffers)
            steps[peer.name] = Fresh(buffers.input, step) if self._arguments["fresh"] else step
        if case.size >= LIMIT_FROM:
            steps[report.COPY] = Copy(case.size)
        names = list(steps)
        samples: dict[str, list[float]] = {name: [] for name in names}
        iterations: dict[str, list[int]] = {name: [] for name in names}
        given = self._arguments["iterations"]
        for step in steps.values():
            for _ in range(self._arguments["warmup"]):
                step()
        enough = {name: given or _enough(step) for name, step in steps.items()}
        for r in range(self._arguments["rounds"]):
            for k in range(len(names)):
                name = names[(r + k) % len(names)]
                n = enough[name]
                seconds = _block(steps[name], n)
                samples[name].append(seconds / (n * case.operation.transfers))
                iterations[name].append(n)
                if not given and seconds > 4 * BLOCK:  # slower than in the trial, perhaps by a thousand times
                    enough[name] = _filling(seconds / n)
        return samples, iterations

    # --- Checks -----------------------------------------------------------------------------------------------------

    def _check(self, case: Case, peers: Sequence[Peer]) -> dict[str, int]:
        """Wrong elements of all ranks, by peer."""
        wrong = torch.zeros(len(peers), dtype=torch.int64)
        buffers = [case.buffers(peer.empty) for peer in peers]
        for salt in range(self._arguments["check"]):
            expected = case.expected(salt)
            for i, (peer, own) in enumerate(zip(peers, buffers, strict=True)):
                step = peer.step(case, own)
                case.fill(own, salt)
                dist.barrier()
                step()
                found = own.output.clone() if case.operation.in_place else own.output
                # The step has said that this rank may use its buffers again. It does, so a peer that still reads them
                # gets wrong values.
                own.input.zero_()
                wrong[i] += count_wrong(found, expected)
                if case.operation.name == "all_reduce" and case.dtype.is_floating_point:
                    wrong[i] += self._different_bits(case, step, own.output, salt)
        dist.all_reduce(wrong)
        return {peer.name: int(count) for peer, count in zip(peers, wrong, strict=True)}

    def _different_bits(self, case: Case, step: Step, output: torch.Tensor, salt: int) -> int:
        """Elements in which this rank's result differs from rank 0's, for values whose sum has to be rounded."""
        generator = torch.Generator().manual_seed(case.rank + case.ranks * salt)
        output.copy_(torch.rand(case.count, generator=generator))
        dist.barrier()
        step()
        first = output.clone()
        dist.broadcast(first.view(torch.uint8), 0)
        return count_wrong(output, first)

    def _can(self, peer: Peer, operation: Operation) -> bool:
        """Whether all ranks could run it once; if not, a note says why."""
        reason = ""
        case = self._case(operation, 16)
        try:
            peer.step(case, case.buffers(peer.empty))()
        except UnsupportedError as error:
            reason = str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            if peer.name == self._arguments["baseline"] or peer.name.startswith("hpcomm"):
                raise
            reason = str(error).splitlines()[0]
        failures = torch.tensor([bool(reason)], dtype=torch.int64)
        dist.all_reduce(failures)
        if failures.item():
            what = f"{operation.name} of {self._arguments['dtype']}"
            self._notes.append(f"{peer.name} is left out of {what}, {case.redop}: {reason or 'another rank failed'}")
            self._say(f"# {self._notes[-1]}")
        return not failures.item()

    # --- The machine ------------------------------------------------------------------------------------------------

    def _copy_rate(self) -> float:
        """GB/s that each rank reads and writes, in sum, when all copy at once; the median of five blocks."""
        copy = Copy(LARGE)
        times = [_block(copy, 2) / 2 for _ in range(5)]
        return 2 * LARGE / statistics.median(times) / 1e9

    def _wait_cpu(self, peer: Peer) -> dict[str, Any]:
        """CPU seconds per second that ranks spend in a barrier which one of them, in turn, enters late."""
        late_by, ranks = self._arguments["late"], self._mesh.size
        peer.barrier()
        rounds = self._arguments["rounds"]
        shares = torch.full((rounds,), math.nan, dtype=torch.float64)
        for r in range(rounds):
            dist.barrier()
            if self._mesh.rank == r % ranks:
                time.sleep(late_by)
                peer.barrier()
                continue
            start, cpu = time.perf_counter(), time.process_time()
            peer.barrier()
            shares[r] = (time.process_time() - cpu) / (time.perf_counter() - start)
        everybody = [torch.empty_like(shares) for _ in range(ranks)]
        dist.all_gather(everybody, shares)
        values = [share for rank in everybody for share in rank.tolist() if not math.isnan(share)]
        return {
            "peer": peer.name,
            "ranks": ranks,
            "late_s": late_by,
            "cpu": report.quartiles(values),
            "largest": max(values),
            "samples": values,
        }

    # --- Small things -----------------------------------------------------------------------------------------------

    def _make_peers(self) -> list[Peer]:
        peers = [self._make_peer(name) for name in self._arguments["peers"]]
        return [peer for peer in peers if peer is not None]

    def _make_peer(self, name: str) -> Peer | None:
        try:
            return make_peer(name, self._mesh)
        except UnavailableError as error:
            self._notes.append(f"{name} is left out: {error}")
            return None

    def _case(self, operation: Operation, count: int) -> Case:
        arguments = self._arguments
        return Case(
            operation=operation,
            count=count,
            dtype=DTYPES[arguments["dtype"]],
            redop=arguments["redop"],
            root=arguments["root"],
            rank=self._mesh.rank,
            ranks=self._mesh.size,
        )

    def _say(self, text: str) -> None:
        if self._mesh.rank == 0:
            print(text, flush=True)


def _enough(step: Step) -> int:
    """Iterations that fill a block: tried with few at first, for an operation that waits may take very long."""
    n = FEWEST
    while True:
        seconds = _block(step, n)
        enough = _filling(seconds / n)
        if enough <= 4 * n:
            return enough
        n *= 4


def _filling(seconds: float) -> int:
    return min(MOST, max(FEWEST, math.ceil(BLOCK / max(seconds, 1e-9))))


def _block(step: Step, iterations: int) -> float:
    """Seconds of the slowest rank (collective).

    Nothing makes the ranks of a copy wait for each other: with more ranks than cores they would run one after the
    other, each as fast as if it were alone. Its time is from the first start to the last end; all share one clock.
    """
    dist.barrier()
    step()
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    end = time.perf_counter()
    readings = torch.tensor([end - start, end, -start], dtype=torch.float64)
    dist.all_reduce(readings, dist.ReduceOp.MAX)
    slowest, last, first = readings.tolist()
    return float(last + first) if isinstance(step, Copy) else float(slowest)


class Fresh:
    """A step whose input is written before it: with the values that it has."""

    def __init__(self, data: torch.Tensor, step: Step) -> None:
        self._data = data
        self._step = step

    def __call__(self) -> None:
        self._data.mul_(1)
        self._step()


class Copy:
    """Each rank copies memory of its own by memcpy, the fastest copy there is here."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


def main() -> None:
    adopt_mpi_environment()
    arguments = json.loads(sys.argv[1])
    try:
        if arguments["cores"]:  # before there are threads, which inherit it
            os.sched_setaffinity(0, {arguments["cores"][int(os.environ["RANK"])]})
        torch.set_num_threads(1)
        gc.disable()
        rank = Rank(arguments)
        result = rank.run()
        if os.environ["RANK"] == "0":
            Path(sys.argv[2]).write_text(json.dumps(result))
        rank.close()
    except BaseException:
        print(f"rank {os.environ['RANK']}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        # At once: an orderly exit would wait for the other ranks, in MPI and elsewhere.
        os._exit(1)


if __name__ == "__main__":
    main()
