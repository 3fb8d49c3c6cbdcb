"""How long are collectives between the ranks of one host? nccl-tests for CPU ranks, against other libraries.

    python -m benchmarks.collectives --ops all_reduce --ranks 2,4 -b 4 -e 16M -f 8 -c 1 --vs gloo,mpich
    python -m benchmarks.collectives --ops all_reduce --ranks 4 --hosts 2 --vs gloo     # two ranks on each of two hosts

It starts the ranks itself, one job after the other. The same processes run every library in turn, size by size and
round by round, so that what disturbs the machine hits all alike; medians over the rounds are printed.

Columns and flags are those of nccl-tests. algbw is size/time, busbw is algbw times 2(n-1)/n for all_reduce, (n-1)/n for
all_gather, reduce_scatter and all_to_all, 1 for broadcast and sendrecv: doc/PERFORMANCE.md of nccl-tests derives them.
Times are those of the slowest rank (nccl-tests' -a 3; its default is the average).

With --hosts ranks share memory only with those of their own host, and HPCOMM_CPU_TRANSPORT is hierarchical unless it
is set. Between hosts bytes take the loopback, which is no network: it costs the cores that compute, and has no delay.
With --link as well the two hosts have networks of their own, and one cable between them that carries so many bits a
second each way (benchmarks/hosts.py; tc's token bucket).

Peers: hpcomm is our communicator from Python, hpcomm-zero the same on memory from Communicator.allocate, c10d-hpcomm is
torch.distributed with the backend "hpcomm", gloo is torch.distributed with gloo, mpich is MPICH by way of mpi4py
(the extra "bench"). "broken" is gloo with one wrong element, to see that #wrong counts.

The exit code is 1 if an element was wrong, a rank failed or the time was up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import collectives_table as report
from benchmarks.launch import JobFailed, find_mpiexec, link_rate, require_hosts, result_file, run_ranks
from benchmarks.operations import DTYPES, OPERATIONS, REDOPS
from benchmarks.peers import INSTALL_MPI, NO_MPI, PEERS

ALIASES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}  # float32 is float


def byte_count(text: str) -> int:
    """4, 64K, 16M, 1G: powers of 1024, as nccl-tests reads them."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes such as 4, 64K, 16M or 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number")
    return int(text)


def whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)


def cores(text: str) -> list[int]:
    """0,0,1,1: of this machine, and allowed to this process."""
    allowed = os.sched_getaffinity(0)
    chosen = [int(part) if part.isdigit() else -1 for part in text.split(",")]
    if not allowed.issuperset(chosen):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cores of {sorted(allowed)}, one for each rank")
    return chosen


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-b", "--begin", type=byte_count, default=4, help="smallest size in bytes (4)")
    parser.add_argument("-e", "--end", type=byte_count, default=16 << 20, help="largest size in bytes (16M)")
    parser.add_argument("-f", "--factor", type=positive, default=8, help="from one size to the next (8)")
    parser.add_argument("-n", "--iterations", type=positive, help="of a block; as many as take 20 ms by default")
    parser.add_argument("-w", "--warmup", type=positive, default=5, help="iterations that are not timed (5)")
    parser.add_argument("-c", "--check", type=whole, default=1, help="checks per size and peer; 0 for none (1)")
    parser.add_argument("--rounds", type=positive, help="blocks of each peer per size (7; 4 with --wait)")
    parser.add_argument("--ranks", default="2", help="of each job, such as 2,4,8")
    parser.add_argument("--hosts", type=positive, default=1, help="that the ranks pretend to be on, by HPCOMM_HOST (1)")
    parser.add_argument("--link", type=link_rate, metavar="RATE", help="between two --hosts, such as 1gbit or 200mbit")
    parser.add_argument("--cores", type=cores, help="of the ranks, such as 0,0,1,1 (the scheduler's choice)")
    parser.add_argument("--ops", default="all_reduce", help=f"of {','.join(OPERATIONS)}; or all")
    parser.add_argument("--vs", default="hpcomm-zero,c10d-hpcomm,gloo,mpich", help=f"peers, of {','.join(PEERS)}")
    parser.add_argument("--baseline", default="hpcomm", help="the peer that the others are divided by (hpcomm)")
    parser.add_argument("--dtype", default="float", help=f"one of {','.join(DTYPES)}, or torch's name of it")
    parser.add_argument("--redop", default="sum", choices=REDOPS)
    parser.add_argument("--root", type=int, default=0, help="of a broadcast")
    parser.add_argument("--fresh", action="store_true", help="every iteration writes its input first, within its time")
    parser.add_argument("--wait", action="store_true", help="measure the CPU time of waiting ranks instead")
    parser.add_argument("--late", type=float, default=1.0, help="seconds that they wait (1)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for everything (3600)")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args(argv)
    try:
        arguments.ranks = [positive(part) for part in arguments.ranks.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--ranks: {error}")
    if arguments.cores and any(len(arguments.cores) != ranks for ranks in arguments.ranks):
        parser.error(f"--cores: {len(arguments.cores)} cores for --ranks {arguments.ranks}")
    for ranks in arguments.ranks:
        require_hosts(parser, ranks, arguments.hosts, arguments.link)
    arguments.ops = list(OPERATIONS) if arguments.ops == "all" else arguments.ops.split(",")
    arguments.peers = list(dict.fromkeys([arguments.baseline, *filter(None, arguments.vs.split(","))]))
    arguments.dtype = ALIASES.get(arguments.dtype, arguments.dtype)
    for flag, given, known in (
        ("--ops", arguments.ops, OPERATIONS),
        ("--vs", arguments.peers, PEERS),
        ("--dtype", [arguments.dtype], DTYPES),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{flag}: {unknown[0]!r} is none of {', '.join(known)}")
    if min(arguments.ranks) < 2:
        parser.error("--ranks: a job needs two ranks or more")
    if not 0 <= arguments.root < min(arguments.ranks):
        parser.error(f"--root: there is no rank {arguments.root} in a job of {min(arguments.ranks)}")
    if arguments.factor < 2 or arguments.end < arguments.begin:
        parser.error("-b, -e, -f: sizes must grow from the first to the last")
    if arguments.redop == "avg" and not DTYPES[arguments.dtype].is_floating_point:
        parser.error(f"--redop avg: the average of {arguments.dtype} is not exact, and libraries round it differently")
    if arguments.wait and arguments.baseline in ("hpcomm-zero", "broken"):
        parser.error(f"--baseline {arguments.baseline}: it has no barrier of its own to --wait in")
    if arguments.wait:  # these have the barriers of others
        arguments.peers = [name for name in arguments.peers if name not in ("hpcomm-zero", "broken")]
    arguments.rounds = arguments.rounds or (4 if arguments.wait else 7)
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """All jobs, the summary and the JSON; returns the exit code."""
    if importlib.util.find_spec("numpy") is None:
        print(f"benchmarks.collectives: there is no numpy, which it needs; {INSTALL_MPI}", file=sys.stderr)
        return 2
    deadline = time.time() + arguments.timeout
    notes = []
    mpiexec = None
    if "mpich" in arguments.peers and arguments.link:
        arguments.peers.remove("mpich")
        notes.append("mpich is left out: its launcher does not start ranks on the hosts of --link")
        print(f"# {notes[-1]}")
    if "mpich" in arguments.peers:
        mpiexec = find_mpiexec()
        if mpiexec is None:
            arguments.peers.remove("mpich")
            notes.append(f"mpich is left out: {NO_MPI}")
            print(f"# {notes[-1]}")
    if arguments.baseline not in arguments.peers:
        print(
            f"benchmarks.collectives: nothing to compare with: --baseline {arguments.baseline}, {notes[-1]}",
            file=sys.stderr,
        )
        return 2
    jobs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hpcomm-bench-") as folder:
        for ranks in arguments.ranks:
            result = Path(folder) / f"{ranks}.json"
            call = ["-m", "benchmarks.collectives_rank", json.dumps(vars(arguments)), str(result)]
            run_ranks(ranks, call, mpiexec=mpiexec, deadline=deadline, link=arguments.link)
            jobs.append(json.loads(result.read_text()))
    wrong = 0
    if arguments.wait:
        if len(jobs) > 1:
            print("\n" + report.waits([row for job in jobs for row in job["waits"]]))
    else:
        rows = [row for job in jobs for row in job["rows"]]
        print("\n" + report.summary(rows, arguments.baseline))
        wrong = sum(peer["wrong"] or 0 for row in rows for peer in row["peers"].values())
        print(f"\n# wrong elements: {wrong if arguments.check and rows else 'not checked'}")
        if not rows:
            print("# nothing was measured")
            return 2
    if arguments.json:
        document = {
            "question": "collectives",
            "environment": {**jobs[0]["environment"], "ranks": arguments.ranks},
            "arguments": vars(arguments),
            "notes": notes,
            "wrong": wrong if arguments.check and not arguments.wait else None,
            "jobs": jobs,
        }
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


def main() -> None:
    arguments = parse()

    def interrupt(_: int, __: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        code = run(arguments)
    except JobFailed as error:
        sys.exit(f"benchmarks.collectives: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks.collectives: interrupted; all ranks are ended")
    sys.exit(code)


if __name__ == "__main__":
    main()
